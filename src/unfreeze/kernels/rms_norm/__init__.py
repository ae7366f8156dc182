"""RMSNorm with its own backward: it keeps x and one number per row.

Autograd would keep three float32 copies of x.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from unfreeze.kernels import liger
from unfreeze.kernels.choice.candidates import numba
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Candidate, Case, Implementation, Op
from unfreeze.kernels.loops import triton_options
from unfreeze.kernels.rms_norm import reference

__all__ = ["OP", "bucket", "rms_norm"]

FEW = 1 << 16  # numbers; below this the overhead of a call counts: the steps of generation


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, impl: str = "auto") -> Tensor:
    """y = weight · x / sqrt(mean(x²) + eps), with the mean in float32 for any dtype of x.

    In bf16 or fp16 an all-zero row with a tiny eps becomes NaN. x [..., D] -> y [..., D] in x's dtype,
    whatever the weight's: normalised in float32, rounded, then scaled (the rounding order of the Llama
    reference).
    Source: Zhang & Sennrich 2019.
    """
    return choose(OP, x_TD.device, x_TD.dtype, bucket(x_TD, weight_D, eps), impl)(x_TD, weight_D, eps)


def bucket(x_TD: Tensor, weight_D: Tensor, eps: float) -> str:
    """The bucket: "few" or "many" numbers.

    "other" if the weight has neither x's dtype nor float32 (only the reference takes that).
    """
    if weight_D.dtype not in (x_TD.dtype, torch.float32):
        return "other"
    return "few" if x_TD.numel() < FEW else "many"


class RMSNormFunctions(Protocol):
    """The module of an implementation; reference.py documents each function."""

    def forward(self, x_TD: Tensor, weight_D: Tensor, eps: float, /) -> tuple[Tensor, Tensor]: ...

    def backward(self, dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor, /) -> Tensor: ...

    def weight_gradient(self, dy_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T1: Tensor, /) -> Tensor: ...


class _RMSNorm(torch.autograd.Function):
    """dx = r (g - n mean(g n)), dweight = Σ_T dy n.

    With r = 1 / sqrt(mean(x²) + eps), n = x r and g = dy · weight.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float, functions: RMSNormFunctions) -> Tensor:
        y_TD, r_T1 = functions.forward(x_TD, weight_D, eps)
        ctx.save_for_backward(x_TD, weight_D, r_T1)
        ctx.functions = functions
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_TD, weight_D, r_T1 = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = ctx.functions.weight_gradient(dy_TD, x_TD, weight_D, r_T1)
        if ctx.needs_input_grad[0]:
            dx = ctx.functions.backward(dy_TD, x_TD, weight_D, r_T1)
        return dx, dweight, None, None


def _by(functions: RMSNormFunctions) -> Implementation:
    """The op, computed by `functions`."""

    def rms_norm_by(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return _RMSNorm.apply(x_TD, weight_D, eps, functions)

    return rms_norm_by


def _numba() -> Implementation:
    from unfreeze.kernels.rms_norm import numba_cpu

    return _by(numba_cpu)


def _triton() -> Implementation:
    from unfreeze.kernels.rms_norm import triton_cuda

    return _by(triton_cuda)


def _inputs(
    rows: int,
    width: int,
    learns: bool,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, float]:
    if device.type == "cuda" and learns:
        rows *= 8  # 2,048 x 1,024 fills two cores, not a GPU
    x, weight = (
        scale * torch.randn(rows, width, generator=generator),
        1 + 0.1 * torch.randn(width, generator=generator),
    )
    return x.to(device, dtype).requires_grad_(learns), weight.to(device, dtype).requires_grad_(learns), 1e-6


OP = Op(
    name="rms_norm",
    reference=_by(reference),
    candidates={
        "numba": numba(_numba, ("many",)),
        "triton": triton_options.candidate(_triton, "4 bytes a number, the reference 36"),
        "liger": Candidate(liger.load_rms_norm, liger.refuses, waits_on=("cuda",)),
    },
    # few: as in generation, without gradients; many: a training step
    cases=(
        Case("few", functools.partial(_inputs, 4, 1024, False)),
        Case("many", functools.partial(_inputs, 2048, 1024, True)),
    ),
    # numbers as small as the root of eps, in rows that are no multiple of a block
    uses=(Case("few", functools.partial(_inputs, 5, 1000, True, scale=1e-3), name="small numbers"),),
    # float32: sums of some thousand terms in another order. bf16: two roundings of 2^-9 each, and one
    # rounding of dweight's sum.
    tolerance={torch.float32: 2e-6, torch.bfloat16: 1e-2},
)
