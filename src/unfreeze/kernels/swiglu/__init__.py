"""SwiGLU and the other gated activations (activation.py), each with its own backward.

It keeps gate and up. Autograd would also keep silu(gate), and pass over memory four times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from unfreeze.kernels import liger
from unfreeze.kernels.choice.candidates import of_modules
from unfreeze.kernels.choice.choose import choose, choose_if_right
from unfreeze.kernels.choice.draw import normal, uniform
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Implementation, Op
from unfreeze.kernels.loops.rows import rows_view
from unfreeze.kernels.swiglu import reference
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation, ClampedSwiGLU, GeGLU, SquaredReLU

__all__ = ["OP", "bucket", "functions_for", "swiglu"]


def swiglu(
    gate: Tensor, up: Tensor | None = None, activation: Activation = SWIGLU, impl: str = "auto"
) -> Tensor:
    """h = a(gate, up), by default silu(gate) · up, silu(x) = x / (1 + e^-x). gate, up [..., I] -> h [..., I].

    Without `up`, gate is [..., 2I] and holds both, in the activation's layout: gate first, or interleaved.
    The reference rounds silu (gelu) and the product, the candidates only the product.
    Backward keeps its inputs and nothing else.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return choose(OP, gate.device, gate.dtype, bucket(gate, up, activation), impl)(gate, up, activation)


def bucket(gate: Tensor, up: Tensor | None = None, activation: Activation = SWIGLU) -> str:
    """The bucket of shapes that share a measurement, by the elements of h, and the activation's kind.

    The time of small ones is the overhead of a call, of large ones memory bandwidth. SwiGLU is not named.
    """
    elements = gate.numel() if up is not None else gate.numel() // 2
    size = "under 256k" if elements < 1 << 18 else "256k to 4M" if elements < 1 << 22 else "over 4M"
    return size if activation.kind == SWIGLU.kind else f"{size}, {activation.kind}"


class SwiGLUFunctions(Protocol):
    """The module of an implementation; reference.py documents each function."""

    def forward(self, gate: Tensor, up: Tensor, h: Tensor, activation: Activation = SWIGLU, /) -> None: ...

    def backward(
        self,
        dh: Tensor,
        gate: Tensor,
        up: Tensor,
        dgate: Tensor,
        dup: Tensor,
        activation: Activation = SWIGLU,
        /,
    ) -> None: ...

    def backward_weighted(
        self,
        dh: Tensor,
        gate: Tensor,
        up: Tensor,
        weight_n: Tensor,
        weighted: Tensor,
        dgate: Tensor,
        dup: Tensor,
        score_n: Tensor,
        activation: Activation = SWIGLU,
        /,
    ) -> None: ...


def functions_for(gate: Tensor, up: Tensor | None = None, activation: Activation = SWIGLU) -> SwiGLUFunctions:
    """forward and backward of the chosen implementation, for an op that writes its own backward.

    Liger has none of this form. Where it is chosen, they are Triton's if these run there and are right, else
    plain torch's.
    """
    kind = gate.device, gate.dtype, bucket(gate, up, activation)
    chosen = choose(OP, *kind)
    if not isinstance(chosen, SwiGLU):
        chosen = choose_if_right(OP, "triton", *kind, "the chosen one runs only under autograd")
    return chosen.functions


class SwiGLU:
    """An implementation: the op as autograd sees it."""

    def __init__(self, functions: SwiGLUFunctions):
        self.functions = functions

    def __call__(self, gate: Tensor, up: Tensor | None = None, activation: Activation = SWIGLU) -> Tensor:
        return _SwiGLU.apply(gate, up, self.functions, activation)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor | None, functions: SwiGLUFunctions, activation: Activation
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.functions, ctx.activation = functions, activation
        width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
        h = torch.empty((*gate.shape[:-1], width), dtype=gate.dtype, device=gate.device)
        functions.forward(*_parts(gate, up, activation), h.view(-1, width), activation)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gate, up = ctx.saved_tensors
        activation = ctx.activation
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
        into = _parts(dgate, dup, activation)
        ctx.functions.backward(rows_view(dh), *_parts(gate, up, activation), *into, activation)
        return dgate, dup, None, None


def _parts(gate: Tensor, up: Tensor | None, activation: Activation) -> tuple[Tensor, Tensor]:
    """(gate, up) as [rows, I] with last stride 1, or 2 if they alternate."""
    if up is not None:
        return rows_view(gate), rows_view(up)
    return activation.split(rows_view(gate))


def _case(rows: int, width: int, cuda_rows: int, activation: Activation = SWIGLU) -> Case:
    """Inputs of [rows, width] to measure with; a GPU gets cuda_rows. Interleaved ones are one tensor."""

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        n = cuda_rows if device.type == "cuda" else rows
        shapes = [(n, 2 * width)] if activation.interleaved else 2 * [(n, width)]
        tensors = [normal(device, generator, *shape).to(dtype).requires_grad_() for shape in shapes]
        return (*tensors, None, activation) if activation.interleaved else (*tensors, activation)

    size = torch.empty((rows, width), device="meta")
    return Case(bucket(size, size, activation), inputs)


def _weighted(implementation: Implementation) -> Implementation | None:
    """backward_weighted of an implementation, which then returns (w h, gradients of gate_up, score)."""
    if not isinstance(implementation, SwiGLU):
        return None

    def backward_weighted(
        dh: Tensor, gate_up: Tensor, weight_n: Tensor, activation: Activation
    ) -> tuple[Tensor, ...]:
        weighted, grad_gate_up = torch.empty_like(dh), torch.empty_like(gate_up)
        score_n = weight_n.new_empty(len(dh))
        implementation.functions.backward_weighted(
            dh,
            *activation.split(gate_up),
            weight_n,
            weighted,
            *activation.split(grad_gate_up),
            score_n,
            activation,
        )
        return weighted, grad_gate_up, score_n

    return backward_weighted


def _weighted_case(activation: Activation) -> Case:
    """19 rows, no multiple of a block, some of weight 0. The weights are always in float32."""

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        n, width = 19, 520
        columns = (width, len(activation.projections) * width)
        dh, gate_up = (normal(device, generator, n, wide).to(dtype) for wide in columns)
        weight = uniform(device, generator, n)
        weight[::7] = 0.0
        return dh, gate_up, weight, activation

    name = f"backward_weighted, {activation.kind}"
    return Case(bucket(torch.empty((19, 520), device="meta"), None), inputs, function=_weighted, name=name)


KINDS = (SWIGLU, GeGLU(), ClampedSwiGLU(interleaved=True, limit=1.0))  # random numbers seldom reach 7
OP = Op(
    name="swiglu",
    reference=SwiGLU(reference),
    candidates={
        **of_modules("unfreeze.kernels.swiglu", SwiGLU, "6 bytes a number, the reference 10 (clamped 84)"),
        "liger": Candidate(liger.load_swiglu, liger.refuses, waits_on=("cuda",)),
    },
    cases=tuple(
        _case(*sizes, activation)
        for activation in KINDS
        for sizes in ((128, 512, 128), (2048, 512, 2048), (1024, 4864, 16384))
    ),
    # float32: the exponential is good to 3e-7
    # bf16: two roundings of at most 2^-8 each, about 2^-9.3 in the mean square
    uses=(
        *map(_weighted_case, (*KINDS, SquaredReLU())),
        *(replace(_case(19, 520, 19, a), name=a.kind) for a in KINDS),
    ),
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3},
)
