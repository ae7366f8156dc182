"""Rotary positions on R elements of each head; the others are copied.

The whole q of a head in one pass over memory.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from unfreeze.kernels.choice.candidates import of_modules
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.draw import normal, uniform
from unfreeze.kernels.choice.op import Arguments, Case, Op
from unfreeze.kernels.rotary import reference

__all__ = ["OP", "Pairing", "bucket", "rotary"]

Pairing = Literal["halves", "adjacent", "leading halves"]


def rotary(x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, pairing: Pairing, impl: str = "auto") -> Tensor:
    """y = [x_0 … x_(d-R-1) | (a cos - b sin), (b cos + a sin)], R = 2r.

    cos and sin [T, r] float32, one row per token, for all heads.

    pairing: a and b are the halves of the last R elements (Llama, Qwen), or their even and odd elements
    (DeepSeek, Kimi). "leading halves": those of the *first* R (GLM, MiniMax-M2), which come last in y. y has
    halves last in every case: q and k are permuted alike, so their product is unchanged.

    Computed in float32, rounded once. The gradient is the rotation by -angle; it keeps cos and sin only. x
    may be a view with last stride 1.
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    return choose(OP, x_THd.device, x_THd.dtype, bucket(x_THd, cos_Tr, sin_Tr, pairing), impl)(
        x_THd, cos_Tr, sin_Tr, pairing
    )


def bucket(x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, pairing: Pairing) -> str:
    """The bucket of shapes that share a measurement, by the numbers in x."""
    elements = x_THd.numel()
    return "under 256k" if elements < 1 << 18 else "256k to 4M" if elements < 1 << 22 else "over 4M"


class RotaryFunctions(Protocol):
    """The module of an implementation; reference.py documents rotate()."""

    def rotate(
        self,
        x_THd: Tensor,
        cos_Tr: Tensor,
        sin_Tr: Tensor,
        sign: float,
        read_adjacent: bool,
        write_adjacent: bool,
        y_THd: Tensor,
        /,
    ) -> None: ...


class Rotary:
    """An implementation: the op as autograd sees it."""

    def __init__(self, functions: RotaryFunctions):
        self.functions = functions

    def __call__(self, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, pairing: Pairing) -> Tensor:
        if pairing == "leading halves":
            R = 2 * cos_Tr.shape[-1]
            x_THd = torch.cat((x_THd[..., R:], x_THd[..., :R]), dim=-1)
        return _Rotary.apply(x_THd, cos_Tr, sin_Tr, pairing == "adjacent", self.functions)


class _Rotary(torch.autograd.Function):
    """Reads the pairs as in the checkpoint and writes them as halves.

    The gradient arrives in halves and is returned as the checkpoint's pairs.
    """

    @staticmethod
    def forward(
        ctx: Any, x_THd: Tensor, cos_Tr: Tensor, sin_Tr: Tensor, adjacent: bool, functions: RotaryFunctions
    ) -> Tensor:
        ctx.save_for_backward(cos_Tr, sin_Tr)
        ctx.adjacent, ctx.functions = adjacent, functions
        return _rotated(functions, x_THd, cos_Tr, sin_Tr, 1.0, adjacent, False)

    @staticmethod
    def backward(ctx: Any, dy_THd: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos_Tr, sin_Tr = ctx.saved_tensors
        dx_THd = _rotated(ctx.functions, dy_THd, cos_Tr, sin_Tr, -1.0, False, ctx.adjacent)
        return dx_THd, None, None, None, None


def _rotated(
    functions: RotaryFunctions,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    sign: float,
    read_adjacent: bool,
    write_adjacent: bool,
) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(-1) != 1:
        x = x.contiguous()
    functions.rotate(x, cos, sin, sign, read_adjacent, write_adjacent, y)
    return y


def _case(tokens: int, heads: int, cuda_tokens: int) -> Case:
    """Kimi's q, 64 of 192 elements rotated at half the width; a GPU gets more tokens."""
    width, rotated, pairing = 96, 32, "adjacent"

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        here = cuda_tokens if device.type == "cuda" else tokens
        x = normal(device, generator, here, heads, width).to(dtype).requires_grad_()
        angle = uniform(device, generator, here, rotated // 2) * 6.28
        return x, angle.cos(), angle.sin(), pairing

    empty = torch.empty((tokens, heads, width), device="meta")
    return Case(bucket(empty, empty, empty, pairing), inputs)


OP = Op(
    name="rotary",
    reference=Rotary(reference),
    candidates={**of_modules("unfreeze.kernels.rotary", Rotary, "4 bytes a number, the reference 40")},
    # torch.compile assumes that sizes equal at first stay equal: hence 20 tokens, 12 heads and 16 pairs, or
    # it recompiles for the next case
    cases=(_case(20, 12, 20), _case(2048, 16, 2048), _case(1024, 64, 8192)),
    # one rounding, at most 2^-8 in bf16
    tolerance={torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3},
)
