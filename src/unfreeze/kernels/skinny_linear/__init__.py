"""y = x Wᵀ + b without gradients for a few rows, as needed in generation.

Its time is that of reading W once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Candidate, Case, Implementation, Op
from unfreeze.kernels.skinny_linear.reference import reference

__all__ = ["OP", "is_skinny", "skinny_linear"]

MAX_ROWS = 3
# rows, by the dtype of x. bf16: from 4 rows on the CPU's float32 multiplications take longer than reading W,
# and a GEMM multiplies twice as fast. float32: a GEMM would have to widen W first
MOST_ROWS = {torch.bfloat16: MAX_ROWS, torch.float32: 16}


def bucket(rows: int) -> str:
    """The bucket by rows, which decide the time; W is read whole in any case."""
    return "1 row" if rows == 1 else f"2 or {MAX_ROWS} rows" if rows <= MAX_ROWS else "4 rows on"


def is_skinny(x_TI: Tensor, weight_OI: Tensor) -> bool:
    """True if this op can compute x Wᵀ: no gradient is needed, few rows, W in bf16."""
    most = MOST_ROWS.get(x_TI.dtype, 0) if weight_OI.dtype == torch.bfloat16 else 0
    skinny = x_TI.dim() == 2 and 0 < x_TI.shape[0] <= most
    return skinny and not (torch.is_grad_enabled() and (x_TI.requires_grad or weight_OI.requires_grad))


def skinny_linear(
    x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """y[t, o] = Σ_i x[t, i] w[o, i] + b[o], summed in float32, rounded once.

    w [out, in] bf16; x [T, in] and b [out] bf16, or float32 -> [T, out] in x's dtype. No gradient flows back:
    check `is_skinny` first. Errors of `choose`.
    """
    return choose(OP, x_TI.device, x_TI.dtype, bucket(x_TI.shape[0]), impl)(x_TI, weight_OI, bias_O)


def _numba_cpu() -> Implementation:
    from unfreeze.kernels.skinny_linear.numba_cpu import linear

    return linear


def _refuses(device: str, dtype: torch.dtype) -> str:
    if device != "cpu":
        return f"device {device}; its loops are for the CPU"
    return "" if dtype in MOST_ROWS else f"{dtype}; its loops read bfloat16 and float32"


def _case(rows: int, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> Case:
    def inputs(
        device: torch.device, dtype: torch.dtype, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, None]:
        x, weight = (
            torch.randn(rows, 1024, generator=generator),
            torch.randn(1536, 1024, generator=generator) / 32,
        )
        return x.to(device, dtype), weight.to(device, torch.bfloat16), None

    return Case(bucket(rows), inputs, dtypes)


OP = Op(
    name="few_rows",  # in records and on the command line
    reference=reference,
    candidates={
        "numba": Candidate(
            _numba_cpu, _refuses, predicted_on=("cpu",), because="the weight is read once, as it is stored"
        )
    },
    cases=(_case(1), _case(MAX_ROWS), _case(8, (torch.float32,))),
    # bf16: one rounding of the result, at most 2^-9 of each element
    tolerance={torch.bfloat16: 4e-3, torch.float32: 1e-6},
    differentiable=False,
)
