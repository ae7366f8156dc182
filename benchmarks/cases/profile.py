"""Say where the time of one step goes, op by op, beside the GEMM and copy rates.

`unfreeze dev bench profile moe|dense|decode|growth`, 1 to 2 minutes.

One step of our side of that benchmark (of decode: 32 tokens at batch 1) under torch's profiler, on one core,
so that times add up to the step's.
Numba loops are listed by name. GEMMs come with their FLOP, and what share that is of torch.mm's measured rate
on one core at the job's shapes. Operations whose bytes follow from recorded shapes come with those, and what
share that is of a measured copy's rate.
Of growth: the same step at each of --tokens, per token beside each other, in one process, the smallest first.
Written to docs/profiles/<name>.md of the checkout, or --out.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from tyro.conf import Positional

from benchmarks.harness.training import computed_here, say
from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import DataError

SHOWN = 30  # ops; the rest is one line
REST = "all else: Python, autograd, loops without a name"


class Config(Frozen):
    """What is profiled."""

    name: Annotated[Literal["moe", "dense", "decode", "growth"], Positional] = Field(
        description="the benchmark whose job is profiled: moe, dense, decode or growth"
    )
    batch: int = Field(default=1, ge=1, description="of decode: rows that are generated at once")
    tokens: tuple[int, ...] = Field(
        default=(65536, 4096), min_length=2, description="of growth: tokens per step, multiples of 512"
    )
    checkpoint: Folder = Field(
        default="",
        description="folder where the random checkpoint is, or is made and kept; default: a temporary one",
    )
    out: Folder = Field(default="", description="the table; default: docs/profiles/<name>.md of the checkout")


class Spent(NamedTuple):
    """What one op took over the step.

    calls; seconds: its own, without the ops it calls; flop: where torch's profiler counts them; moved: the
    bytes it moves at least, where they follow from what the profiler recorded (traffic.py). 0 where not
    known.
    """

    op: str
    calls: int
    seconds: float
    flop: float
    moved: float = 0.0


class Profile(NamedTuple):
    """What one profiled step showed.

    seconds: of the whole step. without, kernel, faults: seconds, of them in the operating system's kernel,
    and pages faulted in, of a step without the profiler.
    rate: FLOP per second of torch.mm at the job's shapes; copy: bytes per second of a copy.
    """

    spent: list[Spent]
    seconds: float
    without: float
    rate: float
    copy: float
    kernel: float = 0.0
    faults: int = 0


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Profile and write the page; -> file, seconds, ops (op, calls, seconds, flop, moved).

    Of growth: the seconds and ops of each size, by its tokens.
    """
    config = parse(Config, arguments, command="dev bench profile", description=__doc__ or "", positional=True)
    return measure(config, common)


def measure(config: Config, common: Common, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The profile at any size: `sizes` replace those of the benchmark's model."""
    import torch

    from benchmarks.cases import dense, growth
    from benchmarks.harness import kimi
    from benchmarks.harness.checkpoints import checkpoints
    from benchmarks.harness.flops import GemmRate, expert_gemms
    from benchmarks.harness.rows import Stamp, checkout
    from benchmarks.harness.traffic import copy_rate

    growth.whole_documents(config.tokens)
    root = checkout()
    if root is None and not config.out:
        raise DataError("there is no source checkout here, so no docs/profiles", next="--out FILE")
    out = Path(config.out) if config.out else (root or Path()) / "docs" / "profiles" / f"{config.name}.md"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stamp = Stamp.now("profile", command(config), threads=1)
        model = {
            "dense": lambda: dense.qwen2(**(sizes or {})),
            "growth": lambda: kimi.config(**{**growth.SIZES, **(sizes or {})}),
        }.get(config.name, lambda: kimi.config(**(sizes or {})))()
        tiny = (
            kimi.config(**{**(sizes or {}), **kimi.CHECKED})
            if config.name != "dense"
            else model | {"num_hidden_layers": 1}
        )
        with checkpoints(config.checkpoint, model, model if config.name == "growth" else tiny) as (
            checkpoint,
            checked,
        ):
            found: dict[int, Profile] = {}
            for tokens in sorted(config.tokens) if config.name == "growth" else [0]:
                say(common)(f"{tokens:,} tokens" if tokens else "loading")
                step, what = job(config, str(checkpoint), str(checked), model, tokens)
                gemms = expert_gemms(*gemm_shape(config, model, tokens))
                found[tokens] = profiled(
                    step,
                    GemmRate(gemms, dtype=getattr(torch, computed_here())).measure()["gflops_per_second"]
                    * 1e9,
                    copy_rate(),
                )
    finally:
        torch.set_num_threads(threads)
    text = growth_page(stamp, found) if config.name == "growth" else page(config.name, what, stamp, found[0])
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    if not (common.quiet or common.json):
        print(text)
        print(f"wrote {out}")
    ops = {tokens: [spent._asdict() for spent in one.spent] for tokens, one in found.items()}
    seconds = {tokens: one.seconds for tokens, one in found.items()}
    return {"file": str(out), "seconds": seconds.get(0, seconds), "ops": ops.get(0, ops)}


def job(
    config: Config, checkpoint: str, checked: str, model: Mapping[str, Any], tokens: int
) -> tuple[Callable[[], Any], str]:
    """(one step of the benchmark's job, what it is in words). tokens: of a step of growth."""
    from benchmarks.cases import decode, dense, growth, moe
    from benchmarks.harness.job import trainer

    if config.name == "decode":
        worker, prompts = decode.ours(checkpoint), decode.prompts_of(config.batch, 8, model["vocab_size"])
        return (
            lambda: worker.calls["generate"](prompts, 32)
        ), f"32 tokens after prompts of 8, batch {config.batch}, bf16"
    lora, documents, length = {
        "moe": (moe.LORA, moe.DOCUMENTS, moe.LENGTH),
        "dense": (None, dense.DOCUMENTS, dense.LENGTH),
        "growth": (growth.LORA, tokens // growth.LENGTH, growth.LENGTH),
    }[config.name]
    worker = trainer(checkpoint, checked, computed_here(), lora, "selective", documents, length)
    return (
        worker.calls["step"],
        f"a training step of {documents} documents of {length} tokens, {computed_here()}, recompute"
        " selective",
    )


def gemm_shape(config: Config, model: Mapping[str, Any], tokens: int) -> tuple[int, int, int]:
    """(rows, hidden, width) of the MLP whose GEMMs the rate is measured at."""
    from benchmarks.cases import dense, moe

    if config.name == "dense":
        return dense.DOCUMENTS * dense.LENGTH, model["hidden_size"], model["intermediate_size"]
    tokens = {"moe": moe.DOCUMENTS * moe.LENGTH, "growth": tokens}.get(config.name, config.batch)
    return (
        max(1, tokens * model["num_experts_per_tok"] // model["n_routed_experts"]),
        model["hidden_size"],
        model["moe_intermediate_size"],
    )


def profiled(step: Callable[[], Any], rate: float, copy: float) -> Profile:
    """One step under the profiler, after two without."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.harness.traffic import by_op

    step()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    step()
    without, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    with (
        named_loops() as counted,
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as recorded,
    ):
        started = time.perf_counter()
        with torch.profiler.record_function("step"):
            step()
        seconds = time.perf_counter() - started
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    moved = by_op(recorded.profiler.kineto_results.events())
    spent = [
        Spent(
            entry.key,
            entry.count,
            entry.self_cpu_time_total / 1e6,
            float(entry.flops or counted[entry.key]),
            float(moved.get(entry.key, 0)),
        )
        for entry in recorded.key_averages()
        if entry.key != "step" and entry.self_cpu_time_total > 0
    ]
    spent.sort(key=lambda one: -one.seconds)
    return Profile(
        spent,
        seconds,
        without,
        rate,
        copy,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
    )


@contextmanager
def named_loops() -> Iterator[Counter[str]]:
    """Show each numba loop to the profiler as an op of its own while the context lasts: "numba gather".

    Experts that are multiplied from their codes are one op for each direction.
    Gives FLOP by name where they are known here and not to the profiler.
    """
    import torch

    from unfreeze.kernels.expert_mlp.panels_cpu import Panels
    from unfreeze.kernels.loops.numba_options import Kernel

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


def page(name: str, what: str, stamp: Any, found: Profile) -> str:
    """The table as markdown."""
    from benchmarks.harness.report import markdown

    lines = []
    for one in found.spent[:SHOWN]:
        time = [f"{one.seconds * 1e3:,.1f}", f"{one.seconds / found.seconds:.1%}"]
        lines.append([one.op, f"{one.calls:,}", *time, *arithmetic(one, found), *memory(one, found)])
    fewer = found.spent[SHOWN:]
    if fewer:
        seconds, calls = sum(one.seconds for one in fewer), sum(one.calls for one in fewer)
        lines.append(
            [
                f"{len(fewer)} smaller ops",
                f"{calls:,}",
                f"{seconds * 1e3:,.1f}",
                f"{seconds / found.seconds:.1%}",
                *[""] * 6,
            ]
        )
    rest = max(0.0, found.seconds - sum(one.seconds for one in found.spent))
    lines.append([REST, "", f"{rest * 1e3:,.1f}", f"{rest / found.seconds:.1%}", *[""] * 6])
    return (
        "\n\n".join(
            [
                f"# Profile of `{name}`",
                (
                    f"{where(stamp)} {what[0].upper()}{what[1:]}: {found.seconds:.2f} s under the profiler,"
                    f" {without(found)}. {limits(found)}"
                ),
                markdown(
                    [
                        "op",
                        "calls",
                        "ms",
                        "of the step",
                        "GFLOP",
                        "GFLOP/s",
                        "of torch.mm's rate",
                        "MB",
                        "GB/s",
                        "of a copy's rate",
                    ],
                    lines,
                ),
            ]
        )
        + "\n"
    )


def growth_page(stamp: Any, found: Mapping[int, Profile]) -> str:
    """Steps of several sizes beside each other, per token; the dearest op first."""
    from benchmarks.harness.report import markdown

    least, most = min(found), max(found)
    ops = {tokens: {one.op: one for one in profile.spent} for tokens, profile in found.items()}
    none = Spent("", 0, 0.0, 0.0)

    def per_token(op: str, tokens: int) -> float:
        return ops[tokens].get(op, none).seconds * 1e6 / tokens

    names = sorted(
        {op for size in ops.values() for op in size},
        key=lambda op: -max(per_token(op, tokens) for tokens in found),
    )
    lines = []
    for op in names[:SHOWN]:
        times = [per_token(op, tokens) for tokens in found]
        calls = [f"{ops[tokens].get(op, none).calls:,}" for tokens in found]
        largest = ops[most].get(op, none)
        shares = [*arithmetic(largest, found[most])[1:], *memory(largest, found[most])[1:]]
        lines.append(
            [
                op,
                *(f"{time:.2f}" for time in times),
                f"{per_token(op, most) - per_token(op, least):+.2f}",
                *calls,
                *shares,
            ]
        )
    totals = {tokens: one.seconds * 1e6 / tokens for tokens, one in found.items()}
    smaller = {tokens: sum(per_token(op, tokens) for op in names[SHOWN:]) for tokens in found}
    rest = {tokens: max(0.0, totals[tokens] - sum(per_token(op, tokens) for op in names)) for tokens in found}
    for name, times in ((f"{len(names[SHOWN:])} smaller ops", smaller), (REST, rest), ("whole step", totals)):
        lines.append(
            [
                name,
                *(f"{time:.2f}" for time in times.values()),
                f"{times[most] - times[least]:+.2f}",
                *[""] * (len(found) + 4),
            ]
        )
    sizes = [f"{tokens:,}" for tokens in found]
    steps = "; ".join(
        f"{tokens:,} tokens: {totals[tokens]:.1f} us per token under the profiler,"
        f" {one.without * 1e6 / tokens:.1f} without, of that {one.kernel * 1e6 / tokens:.1f} in the kernel"
        f" with {one.faults / tokens:.2f} page faults per token"
        for tokens, one in found.items()
    )
    return (
        "\n\n".join(
            [
                "# Profile of `growth`",
                (
                    f"{where(stamp)} Training steps of documents of 512 tokens, {computed_here()}, recompute"
                    f" selective. {steps}. {limits(found[most])}"
                ),
                markdown(
                    [
                        "op",
                        *(f"us per token at {size}" for size in sizes),
                        "more",
                        *(f"calls at {size}" for size in sizes),
                        "GFLOP/s",
                        "of torch.mm's rate",
                        "GB/s",
                        "of a copy's rate",
                    ],
                    lines,
                ),
            ]
        )
        + "\n"
    )


def command(config: Config) -> str:
    flags = f" --batch {config.batch}" if config.name == "decode" and config.batch != 1 else ""
    if config.name == "growth" and config.tokens != Config.model_fields["tokens"].default:
        flags = f" --tokens {' '.join(map(str, config.tokens))}"
    return f"unfreeze dev bench profile {config.name}{flags}"


def where(stamp: Any) -> str:
    commit, machine = stamp.commit or "not recorded", stamp.machine
    return (
        f"`{stamp.command}`, {stamp.run[:10]}, commit {commit}; {machine.name}, one core, torch"
        f" {machine.versions['torch']}."
    )


def without(found: Profile) -> str:
    return (
        f"{found.without:.2f} s without, of that {found.kernel:.2f} s in the kernel with {found.faults:,}"
        " page faults"
    )


def limits(found: Profile) -> str:
    return (
        f"Limits of one core: torch.mm in {computed_here()} at the job's MLP shapes"
        f" {found.rate / 1e9:,.0f} GFLOP/s; a copy in memory {found.copy / 1e9:,.1f} GB/s, what it reads and"
        " writes counted. Times are each op's own. Bytes are inputs and outputs once each, where they follow"
        " from recorded shapes: a lower bound, and above the copy's rate where a cache holds them."
    )


def arithmetic(one: Spent, found: Profile) -> list[str]:
    """GFLOP, GFLOP/s, share of the GEMM rate."""
    speed = one.flop / one.seconds if one.flop else 0.0
    return (
        [f"{one.flop / 1e9:,.1f}", f"{speed / 1e9:,.0f}", f"{speed / found.rate:.0%}"]
        if one.flop
        else [""] * 3
    )


def memory(one: Spent, found: Profile) -> list[str]:
    """MB, GB/s, share of the copy's rate."""
    speed = one.moved / one.seconds if one.moved else 0.0
    return (
        [f"{one.moved / 1e6:,.0f}", f"{speed / 1e9:,.1f}", f"{speed / found.copy:.0%}"]
        if one.moved
        else [""] * 3
    )
