"""The backend of packed experts on a CPU as a separate op: its choice is timed like any other.

With any of them, nothing expanded is saved for backward: fused.py promises that, independent of speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Op
from unfreeze.kernels.expert_mlp import loop_cpu, panels_cpu
from unfreeze.kernels.expert_mlp.backend import Backend
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.fused import fused_expert_mlp
from unfreeze.kernels.expert_mlp.reference import reference_expert_mlp
from unfreeze.quant.codec import Packed

BUCKET = "64 on"  # as in OP; its inputs are timed


@dataclass(frozen=True)
class By:
    """The op, computed by one backend."""

    backend: Callable[[], Backend[Any]]

    def __call__(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Packed,
        down: Packed,
        factors: ExpertFactors | None,
    ) -> Tensor:
        return fused_expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down, factors, self.backend())


def _panels_refuse(device: str, dtype: torch.dtype) -> str:
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return f"{dtype} on {device}; panels are bfloat16 or float32 on a CPU"
    if dtype == torch.float32 or panels_cpu.available():
        return ""
    return "this CPU has no AVX512-bf16, or AMX beside it"


def op_of(inputs: Callable[[torch.device, torch.dtype, torch.Generator], Arguments]) -> Op:
    """The op; `inputs` as in a case of expert_mlp."""
    return Op(
        name="packed_experts",
        reference=By(loop_cpu.LoopCpu),
        candidates={"panels": Candidate(functools.partial(By, panels_cpu.Panels), _panels_refuse)},
        cases=(Case(BUCKET, inputs),),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 0.015},
        differentiable=False,  # forward alone is timed: backward takes the same products
        preferred="panels",
        because="an expanded weight is written as its instruction reads it",
        against=reference_expert_mlp,
    )
