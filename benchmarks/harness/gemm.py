"""The machine's own GEMM rate at an expert's shapes, and the share of it that a training step reaches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.harness.sides import Side, Worker
from benchmarks.harness.timing import timed

GEMM = "torch.mm"
WAYS = {
    "together": "all cores on one GEMM",
    "each": "a GEMM per core",
    "batched": "all experts in one torch.bmm",
}
Gemm = tuple[int, int, int, bool]
"""(rows, inner, columns, transposed: the second factor lies as [columns, inner], as a weight does)"""


def expert_gemms(rows: int, hidden: int, width: int) -> list[Gemm]:
    """The GEMMs of gate and up in one, of down, and of the input gradient of each."""
    forward = [(rows, hidden, 2 * width, True), (rows, width, hidden, True)]
    return [*forward, (rows, hidden, width, False), (rows, 2 * width, hidden, False)]


def flops(gemms: Sequence[Gemm]) -> float:
    return sum(2.0 * rows * inner * columns for rows, inner, columns, _ in gemms)


def rate_here(
    gemms: Sequence[Gemm], dtype: torch.dtype, seconds: float = 0.5
) -> Callable[[], dict[str, float]]:
    """Return a function that measures torch.mm on this CPU, in GFLOP/s: `together`, `each`, and the faster.

    Operands stay in cache, so no implementation can be fed faster.
    """
    cores, generator = torch.get_num_threads(), torch.Generator().manual_seed(0)

    def operands() -> list[tuple[torch.Tensor, ...]]:
        factors = []
        for rows, inner, columns, transposed in gemms:
            a = torch.randn(rows, inner, generator=generator).to(dtype)
            b = torch.randn(columns, inner, generator=generator).to(dtype)
            b = b.t() if transposed else b.t().contiguous()
            factors.append((a, b, torch.empty(rows, columns, dtype=dtype)))
        return factors

    mine = [operands() for _ in range(cores)]
    pool = ThreadPoolExecutor(cores, "gemm", torch.set_num_threads, (1,))
    list(pool.map(time.sleep, [0.01] * cores))
    torch.set_num_threads(cores)  # a pool thread's setting is also what the process begins with

    def once(factors: Sequence[tuple[torch.Tensor, ...]]) -> None:
        for _ in range(4):
            for a, b, out in factors:
                torch.mm(a, b, out=out)

    def rate(work: Callable[[], object], copies: int) -> float:
        work()
        times, end = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return copies * 4 * flops(gemms) / statistics.median(times) / 1e9

    def measure() -> dict[str, float]:
        ways = {"together": rate(lambda: once(mine[0]), 1)}
        ways["each"] = rate(lambda: list(pool.map(once, mine)), cores)
        return {"gflops_per_second": max(ways.values()), **ways}

    return measure


def batched_rate(gemms: Sequence[Gemm], experts: int, device: str) -> Callable[[], dict[str, float]]:
    """The rate on a GPU, by torch.bmm over all experts' GEMMs: one GEMM would leave most of it idle."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(experts, *shape, device=device).bfloat16()

    operands = [
        (
            random(rows, inner),
            random(columns, inner).mT if flip else random(inner, columns),
            random(rows, columns),
        )
        for rows, inner, columns, flip in gemms
    ]

    def measure() -> dict[str, float]:
        timing = timed(
            lambda: [torch.bmm(a, b, out=out) for a, b, out in operands], torch.device(device), repeats=20
        )
        rate = experts * flops(gemms) / timing.ms / 1e6
        return {"gflops_per_second": rate, "batched": rate}

    return measure


def rate(rows: int, hidden: int, width: int, experts: int, device: str, dtype: str) -> Worker:
    """The rate as a side: each step measures it again."""
    gemms = expert_gemms(rows, hidden, width)
    step = (
        rate_here(gemms, getattr(torch, dtype)) if device == "cpu" else batched_rate(gemms, experts, device)
    )
    return Worker({"step": step}, {"gemms": [f"[{r}, {i}] x [{i}, {c}]" for r, i, c, _ in gemms]})


def rows_per_expert(tokens: int, model: Mapping[str, Any]) -> int:
    return max(1, tokens * model["num_experts_per_tok"] // model["n_routed_experts"])


def rate_side(job: Any, model: Mapping[str, Any]) -> Side:
    """The side GEMM beside a training job on a mixture of experts."""
    return job.run.side(
        GEMM,
        "harness.gemm:rate",
        rows=rows_per_expert(job.documents * job.length, model),
        hidden=model["hidden_size"],
        width=model["moe_intermediate_size"],
        experts=model["n_routed_experts"],
        device=job.run.device,
        dtype=job.settings["dtype"],
    )


def share_of_rate(
    entries: dict[str, dict[str, Any]], sides: Sequence[Side], ours: Sequence[str] | Mapping
) -> None:
    """Add the share of the measured rate to our sides; replace the replies of GEMM by its results."""
    if GEMM not in entries:
        return
    loaded, replies = {side.name: side.loaded for side in sides}, entries[GEMM].pop("replies")
    rates = {
        name: statistics.median(reply[name] for reply in replies)
        for name in ("gflops_per_second", *WAYS)
        if name in replies[0]
    }
    ways = ", ".join(f"{words} {rates[name]:.0f}" for name, words in WAYS.items() if name in rates)
    note = f"{rates['gflops_per_second']:.0f} GFLOP/s ({ways})"
    entries[GEMM] |= {**rates, "gemms": loaded[GEMM]["gemms"], "note": note}
    for name in entries.keys() & ours:
        entry, model = entries[name], loaded[name]["model_flops"]
        entry["model_flops"] = model
        entry["share"] = model / (entry["step_seconds"] * rates["gflops_per_second"] * 1e9)
        entry["note"] = f"{entry['share']:.0%} of torch.mm's rate"
