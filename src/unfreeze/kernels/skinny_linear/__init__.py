"""y = x Wᵀ + b without gradients for a few rows, as generation asks for it.

The time is that of reading W once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Candidate, Case, Implementation, Op

__all__ = ["OP", "is_skinny", "skinny_linear"]

# rows. From 4 on the CPU's float32 multiplications take longer than reading W, and a GEMM has twice as many
# in bf16
MAX_ROWS = 3


def bucket(rows: int) -> str:
    """Rows are what decides; W is read whole in any case."""
    return "1 row" if rows == 1 else f"2 or {MAX_ROWS} rows"


def is_skinny(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """Whether x Wᵀ is for this op: no gradient is asked for, few rows, bf16."""
    bf16 = x_TI.dtype == weight_OI.dtype == torch.bfloat16
    skinny = bf16 and x_TI.dim() == 2 and 0 < x_TI.shape[0] <= MAX_ROWS
    return skinny and not (torch.is_grad_enabled() and (x_TI.requires_grad or weight_OI.requires_grad))


def skinny_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """y[t, o] = Σ_i x[t, i] w[o, i] + b[o], summed in float32, rounded once.

    bf16 x [T, in], w [out, in], b [out] -> bf16 [T, out].
    No gradient flows back: ask `is_skinny` first. Errors of `choose`.
    """
    return choose(OP, x_TI.device, x_TI.dtype, bucket(x_TI.shape[0]), impl)(x_TI, weight_OI, bias_O)


def _numba_cpu() -> Implementation:
    from unfreeze.kernels.skinny_linear.numba_cpu import linear

    return linear


def _refuses(device: str, dtype: torch.dtype) -> str:
    if device != "cpu":
        return f"device {device}; its loops are for the CPU"
    return "" if dtype == torch.bfloat16 else f"{dtype}; it reads bfloat16"


def _case(rows: int) -> Case:
    def inputs(
        device: torch.device, dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, None]:
        x, weight = (
            torch.randn(rows, 1024, generator=generator),
            torch.randn(1536, 1024, generator=generator) / 32,
        )
        return x.to(device, dtype), weight.to(device, dtype), None

    return Case(bucket(rows), inputs, (torch.bfloat16,))


OP = Op(
    name="few_rows",  # in records and on the command line
    reference=F.linear,
    candidates={"numba": Candidate(_numba_cpu, _refuses)},
    cases=tuple(_case(rows) for rows in (1, MAX_ROWS)),
    tolerance={torch.bfloat16: 4e-3},  # the result is rounded once: 2^-9 at most of each element
    differentiable=False,
)
