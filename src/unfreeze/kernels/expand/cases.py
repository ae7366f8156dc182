"""Inputs of every format that the Triton kernels read, for records and checks, and the candidates for them.

`KERNELS` has the bytes moved for each weight in bf16. The kernel's: the parts it reads, the weight it writes.
The reference's: the inputs and outputs of its operations. tests/kernels/expand/test_counts.py counts both.
None is a measurement.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.choice.op import Candidate, Case, Config, Implementation
from unfreeze.kernels.expand.bucket import LARGE, OTHER_FP8, OTHER_INT4
from unfreeze.kernels.expand.reference import expand_reference
from unfreeze.kernels.loops import triton_options
from unfreeze.quant.awq import Awq
from unfreeze.quant.bitsandbytes import Bits4
from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.gptq import Gptq
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4

EXPERTS = 4  # in the stack of a case
ONE_BYTE = {"U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Kernel(NamedTuple):
    """A format as it is measured.

    codec      its most usual form
    moved      bytes a weight of the Triton kernel
    reference  bytes a weight of the reference
    """

    codec: Codec
    moved: float
    reference: float


KERNELS = {
    "int4": Kernel(Int4(32), 2.6, 18),
    "fp8": Kernel(Fp8(), 3, 33),
    "mxfp4": Kernel(Mxfp4(), 2.5, 17),
    "nvfp4": Kernel(Nvfp4(), 2.6, 34),
    "nf4": Kernel(Bits4(), 2.5, 31),
    "int8": Kernel(Integers(8, 0, packed=False), 3, 13),
    "awq": Kernel(Awq(), 2.5, 90),
    "gptq": Kernel(Gptq(), 2.5, 85),
    "integers": Kernel(Integers(4, 128, zeros=True), 2.5, 43),
    "mxfp8": Kernel(Mxfp8(), 3, 14),
    OTHER_INT4: Kernel(Int4(128, "F16"), 2.5, 18),
    OTHER_FP8: Kernel(Fp8(scale_dtype="F16"), 3, 45),
}
"""Kind of `bucket` -> its case."""


CONFIGS: tuple[Config, ...] = (
    {"WORDS": 128, "num_warps": 2},
    {"WORDS": 128, "num_warps": 4},
    {"WORDS": 256, "num_warps": 4},
    {"WORDS": 512, "num_warps": 8},
)
"""Of INT4's kernel, measured beside its own (up to 512 words, 4 warps)."""


def buckets(kind: str) -> tuple[str, str]:
    """The buckets of a kind, as bucket.py names them."""
    return ("small", "large") if kind == "int4" else (f"small, {kind}", f"large, {kind}")


def candidates(load: Callable[[], Implementation]) -> dict[str, Candidate]:
    """The Triton candidate of each kind, "triton" for INT4: one implementation, which `load` imports."""
    return {
        "triton" if kind == "int4" else f"triton_{kind}": triton_options.candidate(
            load,
            f"{kernel.moved:g} bytes a weight, the reference {kernel.reference:g}",
            buckets(kind),
            computes=buckets(kind),
            configs={buckets(kind)[1]: CONFIGS} if kind == "int4" else None,
        )
        for kind, kernel in KERNELS.items()
    }


def cases() -> tuple[Case, ...]:
    """Two of each kind."""
    sizes = (("small", 64, 256), ("large", 1024, 1024))
    return tuple(
        Case(bucket, functools.partial(_inputs, kernel.codec, rows, columns))
        for kind, kernel in KERNELS.items()
        for bucket, (_, rows, columns) in zip(buckets(kind), sizes, strict=True)
    )


def stacks() -> tuple[Case, ...]:
    """Some matrices of a stack into a wider workspace, as the experts of a layer are expanded."""
    return tuple(
        Case(buckets(kind)[0], functools.partial(_stack_inputs, kernel.codec), function=_filling, name="fill")
        for kind, kernel in KERNELS.items()
    )


def _stack_inputs(
    codec: Codec, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Packed, int, Tensor]:
    """The matrices from the second on, of 64 x 256 each; the workspace has 16 more rows and columns."""
    packed, _, out = _inputs(codec, 64, 256, device, dtype, generator)
    wider = out.new_zeros(EXPERTS - 1, 64 + 16, 256 + 16)
    return packed, 1, wider[:, :64, :256]


def _filling(implementation: Implementation) -> Implementation | None:
    """Its `fill`; of the reference one matrix after the other; None if it has none."""
    if implementation is not expand_reference:
        return getattr(implementation, "fill", None)

    def fill(packed: Packed, first: int, out: Tensor) -> None:
        for position, matrix in enumerate(out):
            expand_reference(packed, first + position, matrix)

    return fill


def _inputs(
    codec: Codec,
    rows: int,
    columns: int,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Packed, int, Tensor]:
    """One matrix of a stack. On a GPU a large one is 16 times as large."""
    if device.type == "cuda" and rows * columns >= LARGE:
        rows *= 16
    packed = drawn(codec, EXPERTS, rows, columns, generator)
    parts = {name: part.to(device) for name, part in packed.parts.items()}
    return Packed(codec, parts), 2, torch.zeros(rows, columns, dtype=dtype, device=device)


def drawn(codec: Codec, experts: int, rows: int, columns: int, generator: torch.Generator) -> Packed:
    """A stack of matrices: any codes but NaN, scales of both signs, or from 2^-27 to 2^22."""
    parts: dict[str, Tensor] = {}
    for place, (suffix, (kind, shape)) in enumerate(codec.parts(rows, columns).items()):
        shape = (experts, *shape)
        if suffix.endswith("g_idx"):
            groups = parts["scales"].shape[-2] if "scales" in parts else parts["weight_scale"].shape[-1]
            part = torch.randint(groups, shape, dtype=torch.int32, generator=generator)
        elif kind in FLOATS:
            part = torch.randn(shape, generator=generator).to(FLOATS[kind])
        elif kind == "I32":
            part = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)
        else:
            power = place == 1 and isinstance(codec, (Mxfp4, Mxfp8))
            low, high = (100, 150) if power else (0, 256)
            part = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
            if kind == "F8_E4M3":
                part[(part & 127) == 127] = 0
            part = part.view(ONE_BYTE[kind])
        parts[suffix] = part
    return Packed(codec, parts)
