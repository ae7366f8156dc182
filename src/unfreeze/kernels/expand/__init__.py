"""Packed weights to bf16 or float32, into memory the caller owns.

`expand` picks the candidate; reference.py is the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.kernels.choice.candidates import numba
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Implementation, Op
from unfreeze.kernels.expand import cases
from unfreeze.kernels.expand.bucket import bucket
from unfreeze.kernels.expand.reference import expand_reference, expand_stack_reference
from unfreeze.quant.codec import Packed
from unfreeze.quant.halves import Halves

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

    In one launch if the implementation supports it. The reference takes some matrices at once on a GPU,
    and one after the other on a CPU.
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
    if chosen is expand_reference and out.device.type != "cpu":
        expand_stack_reference(packed, experts, out)
        return
    for position, expert in enumerate(experts):
        chosen(packed, expert, out[position])


def _numba() -> Implementation:
    from unfreeze.kernels.expand.numba_cpu import expand_numba

    return expand_numba


def _triton() -> Implementation:
    from unfreeze.kernels.expand.triton_cuda import Expand

    return Expand()


_READ_ON_CPU = [bucket for kind in ("int4", "fp8", "mxfp4") for bucket in cases.buckets(kind)]
OP = Op(
    name="expand",
    reference=expand_reference,
    candidates={"numba": numba(_numba, computes=tuple(_READ_ON_CPU)), **cases.candidates(_triton)},
    cases=cases.cases(),
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    differentiable=False,
    exact_dtype=None,  # the format defines its rounding
    uses=cases.stacks(),
)
