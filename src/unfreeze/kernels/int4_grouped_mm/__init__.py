"""Rows sorted by expert, times the INT4 matrices of their experts.

Used by a decode step of an MoE model. No gradient. n rows, E experts, N outputs, M inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.draw import drawn, normal, uniform
from unfreeze.kernels.choice.op import Arguments, Case, Config, Implementation, Op
from unfreeze.kernels.expand.bucket import readable
from unfreeze.kernels.int4_grouped_mm import reference
from unfreeze.kernels.loops import triton_options
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

__all__ = ["OP", "bucket", "expands", "int4_grouped_mm"]


def int4_grouped_mm(x_nM: Tensor, packed: Packed, offsets_E: Tensor, impl: str = "auto") -> Tensor:
    """y[r] = W_e x[r] for the rows r of expert e -> [n, N] in x's dtype.

    Rows of expert e stop at offsets_E[e] (int32, on the device). packed [E, N, M]; W is rounded to bf16 as
    the format requires, sums are float32. x last stride 1; rows beyond offsets_E[-1] are undefined.
    """
    return choose(OP, x_nM.device, x_nM.dtype, bucket(x_nM, packed, offsets_E), impl)(x_nM, packed, offsets_E)


def bucket(x_nM: Tensor, packed: Packed, offsets_E: Tensor) -> str:
    """The bucket: rows per expert, on average.

    "other" for what only the reference reads (the candidate's tiles are whole groups of 8 to 128 columns).
    """
    if (
        not isinstance(packed.codec, Int4)
        or packed.codec.group_size not in (8, 16, 32, 64, 128)
        or not readable(packed)
        or x_nM.stride(-1) != 1
    ):
        return "other"
    rows = x_nM.shape[0] / packed.shape[0]
    return (
        "up to 8" if rows <= 8 else "up to 64" if rows <= 64 else "up to 512" if rows <= 512 else "over 512"
    )


def expands(x_nM: Tensor, packed: Packed, offsets_E: Tensor) -> bool:
    """True if the chosen implementation expands whole experts in memory first.

    An op with its own workspace is better off expanding them itself.
    """
    return choose(OP, x_nM.device, x_nM.dtype, bucket(x_nM, packed, offsets_E)) is OP.reference


def _load_triton() -> Implementation:
    from unfreeze.kernels.int4_grouped_mm import triton_cuda

    return triton_cuda.Int4GroupedMm()


def _case(name: str, rows: int) -> Case:
    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        """Kimi-K2's gate and up on a GPU, a small one elsewhere; skewed routing, an expert without rows."""
        E, N, M = (6, 128, 256) if device.type == "cpu" else (48, 4096, 7168)
        codes = drawn(
            device,
            generator,
            lambda **how: torch.randint(-(2**31), 2**31 - 1, (E, N, M // 8), dtype=torch.int32, **how),
        )
        scales = (0.01 * normal(device, generator, E, N, M // 32)).bfloat16()
        share = uniform(device, generator, E)
        share[E // 2] = 0
        offsets = (share.cumsum(0) / share.sum() * rows * E).round().to(torch.int32)
        x = normal(device, generator, rows * E, M)
        packed = Packed(Int4(32), {"weight_packed": codes, "weight_scale": scales})
        return x.to(dtype), packed, offsets

    return Case(name, inputs)


CONFIGS: tuple[Config, ...] = (
    {"OUT": 128, "num_warps": 8, "num_stages": 2},
    {"OUT": 64, "num_warps": 4, "num_stages": 4},
    {"OUT": 32, "num_warps": 4, "num_stages": 4},
    {"ROWS": 64, "OUT": 64, "num_warps": 8, "num_stages": 3},
)
"""Measured beside its own (64 outputs, 3 stages)."""

OP = Op(
    name="int4_grouped_mm",
    reference=reference.int4_grouped_mm,
    candidates={
        "triton": triton_options.candidate(
            _load_triton,
            "0.6 bytes a weight, the reference 4.6",
            ("up to 8", "up to 64"),
            configs=dict.fromkeys(("up to 8", "up to 64", "up to 512"), CONFIGS),
        )
    },
    cases=(_case("up to 8", 1), _case("up to 64", 32), _case("up to 512", 256), _case("over 512", 1024)),
    # float32: sums of some thousand terms; bf16: one rounding of the result
    tolerance={torch.float32: 1e-5, torch.bfloat16: 4e-3},
    differentiable=False,
)
