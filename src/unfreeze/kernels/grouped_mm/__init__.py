"""Matrix products of rows sorted by expert: each expert's rows times its matrix, or times other rows.

torch's F.grouped_mm is one kernel on cards of compute capability 9 and 10. On others (A100, RTX 3090 to 5090,
L40S) it copies the offsets to the host, which waits, and calls a product for each expert: `loops_on`.
Source: torch's aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_fallback.

n rows, E experts, N outputs, M inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.draw import normal, uniform
from unfreeze.kernels.choice.op import Arguments, Case, Config, Implementation, Op
from unfreeze.kernels.grouped_mm import reference
from unfreeze.kernels.loops import triton_options

__all__ = ["OP", "bucket", "grouped_mm", "loops_on"]

ONE_KERNEL = (9, 10)  # major numbers


def grouped_mm(
    a: Tensor, b: Tensor, offsets_E: Tensor, out: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """a [n, M], b [E, M, N] -> y[r] = a[r] @ b[expert of r], [n, N]; or a [M, n], b [n, N] -> [E, M, N].

    The second is a[:, rows of e] @ b[rows of e] for each expert, 0 for one without rows. Rows of e stop at
    offsets_E[e] (int32, on the device); those beyond offsets_E[-1] are undefined in y. Sums are float32,
    rounded once to a's dtype. Triton takes any strides; torch one of 1, the other a multiple of 16 bytes.
    out: memory for the result, last stride 1; torch's is copied there.
    """
    return choose(OP, a.device, a.dtype, bucket(a, b, offsets_E), impl)(a, b, offsets_E, out)


def bucket(a: Tensor, b: Tensor, offsets_E: Tensor, out: Tensor | None = None) -> str:
    """The bucket: rows per expert on average, or "outer" for products of rows with rows."""
    if b.dim() == 2:
        return "outer"
    return "up to 64" if a.shape[0] <= 64 * b.shape[0] else "over 64"


def loops_on(capability: tuple[int, int]) -> bool:
    """True if F.grouped_mm is a loop over experts with a wait on cards of that CUDA compute capability."""
    return capability[0] not in ONE_KERNEL


def _load_triton() -> Implementation:
    from unfreeze.kernels.grouped_mm import triton_cuda

    return triton_cuda.GroupedMm()


def _case(name: str, rows: int) -> Case:
    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        """Qwen3-30B's gate and up on a GPU, small ones elsewhere; skewed routing, an expert without rows."""
        E, N, M = (6, 64, 96) if device.type == "cpu" else (128, 1536, 2048)
        share = uniform(device, generator, E)
        share[E // 2] = 0
        offsets = (share.cumsum(0) / share.sum() * rows * E).round().to(torch.int32)
        a = normal(device, generator, rows * E, M).to(dtype)
        if name == "outer":
            return a.t(), normal(device, generator, rows * E, 16).to(dtype), offsets
        return a, normal(device, generator, E, N, M).to(dtype).transpose(1, 2), offsets

    return Case(name, inputs)


ROWS_CONFIGS: tuple[Config, ...] = (
    {"ROWS": 128, "OUT": 128, "IN": 32, "num_warps": 8, "num_stages": 4},
    {"ROWS": 64, "OUT": 128, "IN": 64, "num_warps": 4, "num_stages": 4},
    {"ROWS": 128, "OUT": 256, "IN": 32, "num_warps": 8, "num_stages": 3},
    {"ROWS": 64, "OUT": 64, "IN": 64, "num_warps": 4, "num_stages": 4},
    {"ROWS": 32, "OUT": 128, "IN": 64, "num_warps": 4, "num_stages": 4},
)
OUTER_CONFIGS: tuple[Config, ...] = (
    {"ROWS": 32, "OUT": 128, "num_warps": 4, "num_stages": 4},
    {"ROWS": 64, "OUT": 64, "num_warps": 4, "num_stages": 4},
    {"ROWS": 128, "OUT": 64, "num_warps": 4, "num_stages": 3},
)

OP = Op(
    name="grouped_mm",
    reference=reference.grouped_mm,
    candidates={
        "triton": triton_options.candidate(
            _load_triton,
            "the same bytes in one launch; torch's loop waits for the host and launches one for each expert",
            cards=loops_on,
            configs={"up to 64": ROWS_CONFIGS, "over 64": ROWS_CONFIGS, "outer": OUTER_CONFIGS},
        )
    },
    cases=(_case("up to 64", 32), _case("over 64", 128), _case("outer", 64)),
    # float32: sums of some thousand terms; bf16: one rounding of the result
    tolerance={torch.float32: 1e-5, torch.bfloat16: 4e-3},
    differentiable=False,
)
