"""One step under torch's profiler, and the page that says where its time went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.case import Run
from benchmarks.harness.gemm import expert_gemms, rate_here, rows_per_expert
from benchmarks.harness.report import markdown
from unfreeze.config.parse import writing
from unfreeze.kernels.expert_mlp.panels_cpu import Panels
from unfreeze.kernels.loops.numba_options import Kernel

SHOWN = 30  # ops; the rest is one line
REST = "all else: Python, autograd, loops without a name"


class Spent(NamedTuple):
    """Time of one op. seconds: self time; flop: 0 if neither the profiler nor we count it."""

    op: str
    calls: int
    seconds: float
    flop: float


class Profile(NamedTuple):
    """seconds: of the step; without: of one without the profiler. rate: FLOP/s of torch.mm."""

    spent: list[Spent]
    seconds: float
    without: float
    rate: float


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def mlp(model: Mapping[str, Any], tokens: int) -> tuple[int, int, int]:
    """(rows, hidden, width) of the MLP, or of an expert, at `tokens` tokens."""
    if "n_routed_experts" not in model:
        return tokens, model["hidden_size"], model["intermediate_size"]
    return rows_per_expert(tokens, model), model["hidden_size"], model["moe_intermediate_size"]


def profiled(step: Callable[[], Any], gemm: tuple[int, int, int], dtype: str) -> Profile:
    """Profile one step, after two without the profiler. gemm: rows, hidden, width of the MLP for the rate."""
    step()
    started = time.perf_counter()
    step()
    without = time.perf_counter() - started
    rate = rate_here(expert_gemms(*gemm), getattr(torch, dtype))()["gflops_per_second"] * 1e9
    with named_loops() as counted, profile(activities=[ProfilerActivity.CPU], with_flops=True) as recorded:
        started = time.perf_counter()
        with torch.profiler.record_function("step"):
            step()
        seconds = time.perf_counter() - started
    spent = [
        Spent(e.key, e.count, e.self_cpu_time_total / 1e6, float(e.flops or counted[e.key]))
        for e in recorded.key_averages()
        if e.key != "step" and e.self_cpu_time_total > 0
    ]
    return Profile(sorted(spent, key=lambda one: -one.seconds), seconds, without, rate)


@contextmanager
def named_loops() -> Iterator[Counter[str]]:
    """Show each numba loop to the profiler as an op of its own while the context lasts: "numba gather".

    Experts multiplied from their codes are one op for each direction.
    Yields FLOP by op name for ops whose FLOP the profiler does not count.
    """
    plain, forward, backward = Kernel.__call__, Panels.forward_group, Panels.backward_group
    counted: Counter[str] = Counter()

    def recorded(self: Any, elements: int, parts: int, *arguments: Any) -> None:
        with torch.profiler.record_function(f"numba {self.loop.py_func.__name__.lstrip('_')}"):
            plain(self, elements, parts, *arguments)

    def experts(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def named(self: Panels, call: Any, group: Any, x: torch.Tensor, *rest: Any) -> None:
            # three matrices, without adapters
            counted[name] += 6 * group.num_rows * x.shape[1] * call.down.columns
            with torch.profiler.record_function(name):
                real(self, call, group, x, *rest)

        return named

    Kernel.__call__ = recorded
    Panels.forward_group, Panels.backward_group = (
        experts("numba experts forward", forward),
        experts("numba experts backward", backward),
    )
    try:
        yield counted
    finally:
        Kernel.__call__, Panels.forward_group, Panels.backward_group = plain, forward, backward


def table(tokens: int, step: Profile, per_token: bool) -> str:
    """One line per op, the slowest first; per_token: microseconds per token instead of milliseconds."""
    unit, scale = ("us per token", 1e6 / tokens) if per_token else ("ms", 1e3)
    fewer = step.spent[SHOWN:]
    rest = max(0.0, step.seconds - sum(one.seconds for one in step.spent))
    smaller = Spent(
        f"{len(fewer)} smaller ops", sum(o.calls for o in fewer), sum(o.seconds for o in fewer), 0.0
    )
    lines = []
    for one in (*step.spent[:SHOWN], *([smaller] if fewer else []), Spent(REST, 0, rest, 0.0)):
        speed = one.flop / one.seconds if one.flop else 0.0
        counted = [f"{one.flop / 1e9:,.1f}", f"{speed / 1e9:,.0f}", f"{speed / step.rate:.0%}"]
        time = [f"{one.seconds * scale:,.2f}", f"{one.seconds / step.seconds:.1%}"]
        lines.append(
            [one.op, f"{one.calls:,}" if one.calls else "", *time, *(counted if one.flop else [""] * 3)]
        )
    return markdown(["op", "calls", unit, "of the step", "GFLOP", "GFLOP/s", "of torch.mm's rate"], lines)


def page(run: Run, name: str, profiles: Mapping[int, Profile], out: Path) -> dict[str, Any]:
    """Write and print the page; -> file, and the seconds and ops at each number of tokens."""
    stamp = run.stamp
    here = f"{stamp.machine.name}, one core, torch {stamp.machine.versions['torch']}"
    parts = [
        f"# Profile of `{name}`",
        f"`{stamp.command}`, {stamp.run[:10]}, commit {stamp.commit or 'not recorded'}; {here}. Times are"
        " each op's own. The rate is that of torch.mm on one core at the job's MLP shapes.",
    ]
    for tokens, one in profiles.items():
        times = f"{one.seconds:.2f} s under the profiler, {one.without:.2f} s without; torch.mm"
        parts += [
            f"{tokens:,} tokens: {times} {one.rate / 1e9:,.0f} GFLOP/s.",
            table(tokens, one, per_token=len(profiles) > 1),
        ]
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if not (run.common.quiet or run.common.json):
        print("\n\n".join([*parts, f"wrote {out}"]))
    sizes = {
        tokens: {"seconds": one.seconds, "ops": [s._asdict() for s in one.spent]}
        for tokens, one in profiles.items()
    }
    return {"file": str(out), "steps": sizes}
