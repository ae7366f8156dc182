"""Packed weights to bf16 or float32, into memory the caller owns.

`expand` picks the candidate; reference.py is the oracle.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.kernels.choice.candidates import numba
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Case, Implementation, Op
from unfreeze.kernels.expand.bucket import LARGE, bucket
from unfreeze.kernels.expand.reference import expand_reference
from unfreeze.kernels.loops import triton_options
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.halves import Halves
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import Mxfp4

__all__ = ["OP", "bucket", "expand", "expand_reference", "expand_stack"]


def expand(packed: Packed, expert: int | None, out: Tensor, impl: str = "auto") -> Tensor:
    """out = packed[expert].dequantize(), in out's dtype; returns `out`.

    INT4: (nibble - 8) * scale, rounded once to bf16; a float32 `out` holds that number, widened. packed [out,
    in] (expert None) or [E, out, in]; out [out, in] bf16 or float32, rows may be strided (a block of a larger
    workspace).

    Every implementation equals Packed.dequantize() bit for bit if the scales are finite; formats that only
    the reference can read go to it. Gate and up with separate parts are two matrices, one below the other.
    """
    if isinstance(packed.codec, Halves):
        for place, (codec, parts) in zip(out.chunk(2), packed.codec.each(packed.parts), strict=True):
            expand(Packed(codec, parts), expert, place, impl)
        return out
    return choose(OP, out.device, out.dtype, bucket(packed, expert, out), impl)(packed, expert, out)


def expand_stack(packed: Packed, experts: Sequence[int], out: Tensor, impl: str = "auto") -> None:
    """out[m] = packed[experts[m]], as `expand` of each: out [M, out, in].

    In one launch if the implementation supports it, else one after the other.
    """
    if isinstance(packed.codec, Halves):
        for place, (codec, parts) in zip(out.chunk(2, dim=1), packed.codec.each(packed.parts), strict=True):
            expand_stack(Packed(codec, parts), experts, place, impl)
        return
    chosen = choose(OP, out.device, out.dtype, bucket(packed, None, out), impl)
    fill = getattr(chosen, "fill", None)
    if fill is not None:
        first = experts[0] if experts else 0
        # consecutive: no list to copy to the device, which would make the host wait
        consecutive = list(experts) == list(range(first, first + len(experts)))
        fill(packed, first if consecutive else torch.tensor(list(experts), device=out.device), out)
        return
    for position, expert in enumerate(experts):
        chosen(packed, expert, out[position])


def _numba() -> Implementation:
    from unfreeze.kernels.expand.numba_cpu import expand_numba

    return expand_numba


def _triton() -> Implementation:
    from unfreeze.kernels.expand.triton_cuda import Expand

    return Expand()


def _inputs(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Packed, int, Tensor]:
    """One matrix of a stack of four: any codes, scales of both signs. On a GPU large is 16 times as large."""
    if device.type == "cuda" and rows * columns >= LARGE:
        rows *= 16
    codes = torch.randint(
        -(2**31), 2**31 - 1, (4, rows, columns // 8), dtype=torch.int32, generator=generator
    )
    scales = torch.randn(4, rows, columns // 32, generator=generator).bfloat16()
    packed = Packed(Int4(32), {"weight_packed": codes.to(device), "weight_scale": scales.to(device)})
    return packed, 2, torch.zeros(rows, columns, dtype=dtype, device=device)


def _fp8_inputs(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Packed, int, Tensor]:
    """One matrix of a stack of four in FP8: any codes but NaN, float32 scales of blocks of 128 x 128."""
    codec = Fp8()
    codes = torch.randint(0, 256, (4, rows, columns), dtype=torch.uint8, generator=generator)
    codes[(codes & 127) == 127] = 0
    _, shape = codec.parts(rows, columns)["weight_scale_inv"]
    scales = torch.randn(4, *shape, generator=generator).to(device)
    parts = dict(zip(codec.suffixes, (codes.view(torch.float8_e4m3fn).to(device), scales), strict=True))
    return Packed(codec, parts), 2, torch.zeros(rows, columns, dtype=dtype, device=device)


def _mxfp4_inputs(
    rows: int, columns: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Packed, int, Tensor]:
    """One matrix of a stack of four in MXFP4: any codes, scales from 2^-27 to 2^23."""
    codec = Mxfp4()
    codes = torch.randint(0, 256, (4, rows, columns // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (4, rows, columns // 32), dtype=torch.uint8, generator=generator)
    parts = dict(zip(codec.suffixes, (codes.to(device), scales.to(device)), strict=True))
    return Packed(codec, parts), 2, torch.zeros(rows, columns, dtype=dtype, device=device)


OP = Op(
    name="expand",
    reference=expand_reference,
    candidates={
        "numba": numba(_numba),
        "triton": triton_options.candidate(
            _triton, "2.6 bytes a weight, the reference 17", ("small", "large")
        ),
        "triton_fp8": triton_options.candidate(
            _triton, "3 bytes a weight, the reference 19", ("small, fp8", "large, fp8")
        ),
        "triton_mxfp4": triton_options.candidate(
            _triton, "2.5 bytes a weight, the reference 11", ("small, mxfp4", "large, mxfp4")
        ),
    },
    cases=(
        Case("small", functools.partial(_inputs, 64, 256)),
        Case("large", functools.partial(_inputs, 1024, 1024)),
        Case("small, fp8", functools.partial(_fp8_inputs, 64, 256)),
        Case("large, fp8", functools.partial(_fp8_inputs, 1024, 1024)),
        Case("small, mxfp4", functools.partial(_mxfp4_inputs, 64, 256)),
        Case("large, mxfp4", functools.partial(_mxfp4_inputs, 1024, 1024)),
    ),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    differentiable=False,
    exact_dtype=None,  # the format defines its rounding
)
