"""unfreeze bench profile moe|dense|decode: where the time of one step goes, op by op, beside the machine's GEMM rate. About 1 minute.

One step of our side of that benchmark (of decode: 32 tokens at batch 1) under torch's profiler, on one core, so that times add up to the step's.
Numba loops are listed by name; GEMMs with their FLOP and what share that is of torch.mm's measured rate on one core at the job's shapes.
Written to docs/profiles/<name>.md of the checkout, or --out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from tyro.conf import Positional

from unfreeze.core.command import Common
from unfreeze.core.errors import DataError
from unfreeze.recipes.bench.training import say
from unfreeze.recipes.config import Folder, Frozen, parse, writing

SHOWN = 30  # ops; the rest is one line
REST = "all else: Python, autograd, loops without a name"


class Config(Frozen):
    """What is profiled."""

    name: Annotated[Literal["moe", "dense", "decode"], Positional] = Field(description="the benchmark whose job is profiled: moe, dense or decode")
    batch: int = Field(default=1, ge=1, description="of decode: rows that are generated at once")
    checkpoint: Folder = Field(default="", description="folder where the random checkpoint is, or is made and kept; default: a temporary one")
    out: Folder = Field(default="", description="the table; default: docs/profiles/<name>.md of the checkout")


class Spent(NamedTuple):
    """One op over the step: calls, seconds of its own (without the ops it calls), FLOP where torch's profiler counts them."""

    op: str
    calls: int
    seconds: float
    flop: float


class Profile(NamedTuple):
    """seconds: of the whole step; without: of a step without the profiler; rate: FLOP per second of torch.mm at the job's shapes."""

    spent: list[Spent]
    seconds: float
    without: float
    rate: float


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> file, seconds, ops (op, calls, seconds, flop)."""
    config = parse(Config, arguments, command="bench profile", description=__doc__ or "", positional=True)
    return measure(config, common)


def measure(config: Config, common: Common, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The profile at any size: `sizes` replace those of the benchmark's model."""
    import torch

    from unfreeze.recipes.bench import dense, kimi
    from unfreeze.recipes.bench.checkpoints import checkpoints
    from unfreeze.recipes.bench.flops import GemmRate, expert_gemms
    from unfreeze.recipes.bench.rows import Stamp, checkout

    root = checkout()
    if root is None and not config.out:
        raise DataError("there is no source checkout here, so no docs/profiles", next="--out FILE")
    out = Path(config.out) if config.out else (root or Path()) / "docs" / "profiles" / f"{config.name}.md"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stamp = Stamp.now("profile", f"unfreeze bench profile {config.name}" + f" --batch {config.batch}" * (config.batch > 1), threads=1)
        model = dense.qwen2(**(sizes or {})) if config.name == "dense" else kimi.config(**(sizes or {}))
        tiny = kimi.config(**{**(sizes or {}), **kimi.CHECKED}) if config.name != "dense" else model | {"num_hidden_layers": 1}
        with checkpoints(config.checkpoint, model, tiny) as (checkpoint, checked):
            say(common)("loading")
            step, what = job(config, str(checkpoint), str(checked), model)
            gemms = expert_gemms(*gemm_shape(config, model))
            found = profiled(step, GemmRate(gemms).measure()["gflops_per_second"] * 1e9)
    finally:
        torch.set_num_threads(threads)
    text = page(config.name, what, stamp, found)
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    if not (common.quiet or common.json):
        print(text)
        print(f"wrote {out}")
    return {"file": str(out), "seconds": found.seconds, "ops": [spent._asdict() for spent in found.spent]}


def job(config: Config, checkpoint: str, checked: str, model: Mapping[str, Any]) -> tuple[Callable[[], Any], str]:
    """(one step of the benchmark's job, what it is in words)."""
    from unfreeze.recipes.bench import decode, dense, moe
    from unfreeze.recipes.bench.job import trainer

    if config.name == "decode":
        worker, prompts = decode.ours(checkpoint), decode.prompts_of(config.batch, 8, model["vocab_size"])
        return (lambda: worker.calls["generate"](prompts, 32)), f"32 tokens after prompts of 8, batch {config.batch}, bf16"
    lora, documents, length = (moe.LORA, moe.DOCUMENTS, moe.LENGTH) if config.name == "moe" else (None, dense.DOCUMENTS, dense.LENGTH)
    worker = trainer(checkpoint, checked, "bfloat16", lora, "selective", documents, length)
    return worker.calls["step"], f"a training step of {documents} documents of {length} tokens, bf16, recompute selective"


def gemm_shape(config: Config, model: Mapping[str, Any]) -> tuple[int, int, int]:
    """(rows, hidden, width) of the MLP whose GEMMs the rate is measured at."""
    from unfreeze.recipes.bench import dense, moe

    if config.name == "dense":
        return dense.DOCUMENTS * dense.LENGTH, model["hidden_size"], model["intermediate_size"]
    tokens = moe.DOCUMENTS * moe.LENGTH if config.name == "moe" else config.batch
    return max(1, tokens * model["num_experts_per_tok"] // model["n_routed_experts"]), model["hidden_size"], model["moe_intermediate_size"]


def profiled(step: Callable[[], Any], rate: float) -> Profile:
    """One step under the profiler, after two without."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    started = time.perf_counter()
    step()
    without = time.perf_counter() - started
    with named_loops(), profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as recorded:
        started = time.perf_counter()
        with torch.profiler.record_function("step"):
            step()
        seconds = time.perf_counter() - started
    spent = [
        Spent(entry.key, entry.count, entry.self_cpu_time_total / 1e6, float(entry.flops or 0))
        for entry in recorded.key_averages() if entry.key != "step" and entry.self_cpu_time_total > 0
    ]  # fmt: skip
    spent.sort(key=lambda one: -one.seconds)
    return Profile(spent, seconds, without, rate)


@contextmanager
def named_loops() -> Iterator[None]:
    """Inside, each numba loop is an op of its own to the profiler: "numba gather"."""
    import torch

    from unfreeze.kernels.numba_options import Kernel

    plain = Kernel.__call__

    def recorded(self: Any, elements: int, *arguments: Any) -> Any:
        with torch.profiler.record_function(f"numba {self.parallel.py_func.__name__.lstrip('_')}"):
            return plain(self, elements, *arguments)

    Kernel.__call__ = recorded
    try:
        yield
    finally:
        Kernel.__call__ = plain


def page(name: str, what: str, stamp: Any, found: Profile) -> str:
    """The table as markdown."""
    from unfreeze.recipes.bench.report import markdown

    lines = []
    for one in found.spent[:SHOWN]:
        speed = one.flop / one.seconds
        rate = [f"{one.flop / 1e9:,.1f}", f"{speed / 1e9:,.0f}", f"{speed / found.rate:.0%}"] if one.flop else [""] * 3
        lines.append([one.op, f"{one.calls:,}", f"{one.seconds * 1e3:,.1f}", f"{one.seconds / found.seconds:.1%}", *rate])
    fewer = found.spent[SHOWN:]
    if fewer:
        seconds, calls = sum(one.seconds for one in fewer), sum(one.calls for one in fewer)
        lines.append([f"{len(fewer)} smaller ops", f"{calls:,}", f"{seconds * 1e3:,.1f}", f"{seconds / found.seconds:.1%}", *[""] * 3])
    rest = max(0.0, found.seconds - sum(one.seconds for one in found.spent))
    lines.append([REST, "", f"{rest * 1e3:,.1f}", f"{rest / found.seconds:.1%}", *[""] * 3])
    machine = stamp.machine
    return "\n\n".join([
        f"# Profile of `{name}`",
        f"`{stamp.command}`, {stamp.run[:10]}, commit {stamp.commit or 'not recorded'}; {machine.name}, one core, torch {machine.versions['torch']}. "
        f"{what[0].upper()}{what[1:]}: {found.seconds:.2f} s under the profiler, {found.without:.2f} s without. "
        f"torch.mm in bf16 at the job's MLP shapes on one core: {found.rate / 1e9:,.0f} GFLOP/s. Times are each op's own.",
        markdown(["op", "calls", "ms", "of the step", "GFLOP", "GFLOP/s", "of torch.mm's rate"], lines),
    ]) + "\n"  # fmt: skip
