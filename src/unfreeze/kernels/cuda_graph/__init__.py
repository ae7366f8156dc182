"""Repeats the same launches, such as a step of generation.

From the host each time, or captured once as a CUDA graph and replayed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Implementation, Op
from unfreeze.kernels.cuda_graph import reference
from unfreeze.kernels.cuda_graph.launches import CannotCapture, Launches
from unfreeze.kernels.rms_norm import rms_norm
from unfreeze.kernels.swiglu import swiglu

__all__ = ["OP", "CannotCapture", "Launches", "bucket", "pays", "replay"]


def replay(launches: Launches, impl: str = "auto") -> Tensor:
    """Run launches.run(*launches.buffers) without gradients.

    The result is valid until the next call with these launches. Raises CannotCapture if the implementation
    captures and these launches read a value on the host, and the errors of `choose`.
    """
    return choose(OP, launches.device, launches.dtype, bucket(launches.rows), impl)(launches)


def bucket(rows: int) -> str:
    """The bucket by rows.

    A launch costs the host the same whatever it does, so the time it keeps the device busy decides.
    """
    return (
        "1 row" if rows == 1 else "2 to 16 rows" if rows <= 16 else "17 to 64 rows" if rows <= 64 else "other"
    )


def pays(device: torch.device, dtype: torch.dtype, rows: int) -> bool:
    """True if replaying is measured or predicted to be faster than launching."""
    return choose(OP, device, dtype, bucket(rows)) is not OP.reference


def _cuda_graph() -> Implementation:
    from unfreeze.kernels.cuda_graph import capture

    return capture.replay


def _refuses(device: str, dtype: torch.dtype) -> str:
    return "" if device == "cuda" else f"device {device}; graphs of launches are CUDA's"


def decoder_like(x_SD: Tensor, cached_SGNd: Tensor, *weights: Tensor) -> Tensor:
    """A stand-in for a step of generation.

    Per layer two norms, attention of one query per row over the cache, SwiGLU; weights [q, o, gate_up, down]
    each.
    """
    groups, width = cached_SGNd.shape[1], cached_SGNd.shape[3]
    norm = weights[0]
    for q, o, gate_up, down in zip(*(weights[1 + part :: 4] for part in range(4)), strict=True):
        q_SHd = F.linear(rms_norm(x_SD, norm, 1e-6), q).unflatten(-1, (groups, -1, width))
        o_SHd = F.scaled_dot_product_attention(q_SHd, cached_SGNd, cached_SGNd)
        x_SD = x_SD + F.linear(o_SHd.flatten(1), o)
        x_SD = x_SD + F.linear(swiglu(F.linear(rms_norm(x_SD, norm, 1e-6), gate_up)), down)
    return x_SD


def _case(rows: int) -> Case:
    """28 layers of the Qwen3-0.6B shape, 512 positions cached; two narrow layers on a CPU.

    Its 16 query heads, over 8 key heads, are 128 wide.
    """

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        layers, D, I, H, G, d, N = (
            (28, 1024, 3072, 16, 8, 128, 512) if device.type == "cuda" else (2, 64, 128, 4, 2, 16, 32)
        )
        shapes = [(H * d, D), (D, H * d), (2 * I, D), (D, I)] * layers
        weights = [torch.randn(shape, generator=generator) * shape[1] ** -0.5 for shape in shapes]
        buffers = [
            torch.randn((rows, D), generator=generator),
            torch.randn((rows, G, N, d), generator=generator),
            torch.ones(D),
            *weights,
        ]
        return (Launches(decoder_like, tuple(tensor.to(device, dtype) for tensor in buffers), rows, dtype),)

    return Case(bucket(rows), inputs)


OP = Op(
    name="replay",  # in records and on the command line
    reference=reference.replay,
    candidates={
        "cuda_graph": Candidate(
            _cuda_graph,
            _refuses,
            predicted_on=("cuda",),
            because="one launch a step, where the host makes 1,008 (counted with the references, 28 layers)",
            waits_on=("cuda",),
        )
    },
    cases=(_case(1), _case(8), _case(64)),
    # the launches are the same, but a library may choose another GEMM on another stream, and a rounding in
    # one layer passes through all later ones
    tolerance={torch.float32: 1e-5, torch.bfloat16: 2e-2},
    differentiable=False,
    exact_dtype=None,
)
