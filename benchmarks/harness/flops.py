"""How many floating-point operations a training step is, and how many the machine does at those shapes.

Model work of a step of T tokens (for MFU):         T · (4·N + 6·A) + 3·attention      frozen base, adapters
                                                       T · 6·N + 3·attention              every weight trained
  N  matmul parameters a token meets: every Linear it passes (the head too), the router, K routed experts
  A  adapter parameters a token meets (those of the K experts it is given, not of the others)
  attention  2 · H · (query + value width) · Σ over documents of L(L + 1)/2, per layer: causal scores and
             their sums
Recomputed work is counted apart: layers 2·(N + A) of the layers, but for the last product of dense and shared
MLPs, and attention once more; selective the same without attention and experts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.harness.timing import timed
from unfreeze.adapters import sites
from unfreeze.adapters.lora import ExpertLowRank
from unfreeze.models import Decoder
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.moe import MoE
from unfreeze.models.recompute import Recompute


@dataclass(frozen=True)
class StepFlops:
    """The FLOP of one step.

    model: of the mathematics alone. recomputed: what the step does a second time, by its recompute setting.
    """

    model: float
    recomputed: float


def step_flops(model: Decoder, lengths: Sequence[int], recompute: Recompute) -> StepFlops:
    """Count the FLOP of one step over documents of these lengths.

    The model may be on meta; its adapters are counted where they are attached.
    """
    tokens, shape = sum(lengths), model.shape
    share = shape.experts_per_token / shape.num_experts if shape.num_experts else 0.0
    dense = sum(
        m.in_features * m.out_features
        for name, m in model.named_modules()
        if isinstance(m, Linear) and name != "lm_head"
    )
    routers = sum(m.gate.weight.numel() for m in model.modules() if isinstance(m, MoE))
    experts = (
        sum(
            3 * m.num_experts * m.hidden_size * m.intermediate_size
            for m in model.modules()
            if isinstance(m, Experts)
        )
        * share
    )
    head = shape.hidden_size * shape.vocab_size
    trained = list(sites(model))
    expert_adapters = (
        sum(_numel(site.adapter) for site in trained if isinstance(site.adapter, ExpertLowRank)) * share
    )
    dense_adapters = sum(
        _numel(site.adapter) for site in trained if not isinstance(site.adapter, ExpertLowRank)
    )
    widths = 2 * shape.head_dim if shape.mla is None else shape.mla.nope + shape.mla.rope + shape.mla.value
    attention = shape.num_layers * 2 * shape.num_heads * widths * sum(n * (n + 1) / 2 for n in lengths)
    adapters = expert_adapters + dense_adapters
    per_weight = 4 if trained else 6
    work = tokens * (per_weight * (dense + routers + experts + head) + 6 * adapters) + 3 * attention
    # the last product of a layer isn't computed again
    lasts = [m.down_proj for m in model.modules() if isinstance(m, MLP)]
    repeated = dense - sum(last.in_features * last.out_features for last in lasts)
    dense_model = shape.mla is None and not shape.num_experts
    again = {
        "nothing": 0.0,
        # beyond dense models it keeps a part of these: at most
        "elementwise": (0.0 if dense_model else tokens * 2 * (repeated + dense_adapters)),
        "selective": tokens * 2 * (repeated + dense_adapters),
        "layers": tokens * 2 * (repeated + routers + experts + adapters) + attention,
    }[recompute]
    return StepFlops(work, again)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True)
class Gemm:
    """One product [rows, inner] @ [inner, columns].

    transposed: the second factor lies as [columns, inner], as a weight does in forward.
    """

    rows: int
    inner: int
    columns: int
    transposed: bool = True

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns


def expert_gemms(rows: int, hidden: int, width: int) -> list[Gemm]:
    """List the four GEMMs of an expert with that many rows.

    Gate and up in one, down, and the input gradient of each.
    """
    return [
        Gemm(rows, hidden, 2 * width),
        Gemm(rows, width, hidden),
        Gemm(rows, hidden, width, False),
        Gemm(rows, 2 * width, hidden, False),
    ]


class GemmRate:
    """Measures FLOP per second of torch.mm in `dtype` on all cores, at given shapes.

    Two ways are measured: all cores on one GEMM, and each core on GEMMs of its own. The faster counts as the
    machine's rate. Operands stay in cache, so no implementation can be fed faster.
    """

    def __init__(self, gemms: Sequence[Gemm], seconds: float = 0.5, dtype: torch.dtype = torch.bfloat16):
        self.gemms, self.seconds, self.cores = list(gemms), seconds, torch.get_num_threads()
        generator = torch.Generator().manual_seed(0)

        def operands() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
            made = []
            for gemm in self.gemms:
                a = torch.randn(gemm.rows, gemm.inner, generator=generator).to(dtype)
                shape = (gemm.columns, gemm.inner) if gemm.transposed else (gemm.inner, gemm.columns)
                b = torch.randn(shape, generator=generator).to(dtype)
                made.append(
                    (a, b.t() if gemm.transposed else b, torch.empty(gemm.rows, gemm.columns, dtype=dtype))
                )
            return made

        self._operands = [operands() for _ in range(self.cores)]
        self._pool = ThreadPoolExecutor(self.cores, "gemm", torch.set_num_threads, (1,))
        for started in [self._pool.submit(time.sleep, 0.01) for _ in range(self.cores)]:
            started.result()
        torch.set_num_threads(self.cores)  # a pool thread's setting is also what the process begins with

    def measure(self) -> dict[str, Any]:
        """-> gflops_per_second (the faster way), together, each (the two ways), over about `seconds` each."""
        together = self._rate(lambda: self._round(self._operands[0]), 1)
        each = self._rate(
            lambda: [
                done.result() for done in [self._pool.submit(self._round, mine) for mine in self._operands]
            ],
            self.cores,
        )
        return {"gflops_per_second": max(together, each), "together": together, "each": each}

    @staticmethod
    def _round(operands: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        for _ in range(4):
            for a, b, out in operands:
                torch.mm(a, b, out=out)

    def _rate(self, run: Any, copies: int) -> float:
        """Median over runs, in GFLOP/s."""
        work, times = copies * 4 * sum(gemm.flops for gemm in self.gemms), []
        run()
        end = time.perf_counter() + self.seconds
        while not times or time.perf_counter() < end:
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        return work / statistics.median(times) / 1e9


class BatchedGemmRate:
    """Measures a GPU's rate at those shapes: torch.bmm in bf16 over the GEMMs of all experts at once.

    One expert's GEMM alone would leave most of the GPU idle.
    """

    def __init__(self, gemms: Sequence[Gemm], experts: int, device: torch.device | str):
        self.gemms, self.experts, self.device = list(gemms), experts, torch.device(device)
        generator = torch.Generator(device=device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(experts, *shape, generator=generator, device=device).bfloat16()

        self._operands = [
            (
                random(g.rows, g.inner),
                random(g.columns, g.inner).mT if g.transposed else random(g.inner, g.columns),
                random(g.rows, g.columns),
            )
            for g in self.gemms
        ]

    def measure(self) -> dict[str, Any]:
        """-> gflops_per_second: of the median round; batched: the same, the one way there is."""
        found = timed(self._round, self.device, repeats=20)
        rate = self.experts * sum(gemm.flops for gemm in self.gemms) / found.ms / 1e6
        return {"gflops_per_second": rate, "batched": rate}

    def _round(self) -> None:
        for a, b, out in self._operands:
            torch.bmm(a, b, out=out)
