"""The dense half of a layer, x + down(swiglu(gate n, up n)) with n = norm(x), as one op.

For a compiler that fuses what lies between the GEMMs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Implementation, Op
from unfreeze.kernels.dense_mlp import reference
from unfreeze.kernels.dense_mlp.reference import Projection
from unfreeze.kernels.loops import compiled

__all__ = ["FEWEST", "OP", "Projection", "bucket", "dense_mlp", "implementation"]

# rows. Fewer are a step of generation or a short document: the GEMMs read their weights in most of the time,
# nothing to fuse
FEWEST = 256


def dense_mlp(
    x_TD: Tensor,
    norm_D: Tensor,
    eps: float,
    gate: Projection,
    up: Projection,
    down: Projection,
    impl: str = "auto",
) -> Tensor:
    """y = x + down(silu(gate n) · up n), n = norm_D · x / sqrt(mean(x²) + eps).

    x [T, D] -> y [T, D]; adapters inside the projections.
    Source: the pre-norm residual block with Shazeer 2020, arXiv:2002.05202. Errors of `choose`.
    """
    return implementation(x_TD, gate, up, down, impl)(x_TD, norm_D, eps, gate, up, down)


def implementation(
    x_TD: Tensor, gate: Projection, up: Projection, down: Projection, impl: str = "auto"
) -> Implementation:
    """Give what is chosen for these inputs.

    A caller whose own code is the reference asks whether it is OP.reference. Errors of `choose`.
    """
    return choose(OP, x_TD.device, x_TD.dtype, bucket(x_TD, gate, up, down), impl)


def bucket(x_TD: Tensor, gate: Projection, up: Projection, down: Projection) -> str:
    """Name the bucket: "adapters" (frozen weights beside them) or "all weights" train.

    "other": few rows, or weights in another dtype than x.
    """
    parts = (gate, up, down)
    if x_TD.shape[0] < FEWEST or any(part.weight.dtype != x_TD.dtype for part in parts):
        return "other"
    return "adapters" if any(part.A is not None for part in parts) else "all weights"


def _load_compiled() -> Implementation:
    from unfreeze.kernels.dense_mlp.torch_compiled import Compiled

    return Compiled()


def _case(trains: str) -> Case:
    """The Qwen2-0.5B shape; a GPU gets more rows.

    Adapters of rank 16, B drawn at random too: with B = 0 A has no gradient.
    """
    width, inner, rank = 896, 4864, 16

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        def random(*shape: int, spread: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator) * spread

        def projection(out: int, into: int) -> Projection:
            weight = random(out, into, spread=into**-0.5).to(device, dtype)
            if trains == "all weights":
                return Projection(weight.requires_grad_())
            A, B = random(rank, into, spread=into**-0.5), random(out, rank, spread=0.1)
            return Projection(weight, None, A.to(device).requires_grad_(), B.to(device).requires_grad_(), 2.0)

        x_TD = random(16384 if device.type == "cuda" else 512, width).to(device, dtype).requires_grad_()
        norm_D = (1 + random(width, spread=0.1)).to(device, dtype).requires_grad_(trains == "all weights")
        return (
            x_TD,
            norm_D,
            1e-6,
            projection(inner, width),
            projection(inner, width),
            projection(width, inner),
        )

    return Case(trains, inputs)


OP = Op(
    name="dense_mlp",
    reference=reference.dense_mlp,
    candidates={"compiled": Candidate(_load_compiled, compiled.refuses, named_on=("cpu",))},
    cases=(_case("all weights"), _case("adapters")),
    # float32: sums of 4,864 terms. bf16: four roundings of 2^-9 at most on the way to a gradient, and those
    # of the sums' operands
    tolerance={torch.float32: 1e-5, torch.bfloat16: 1.5e-2},
)
