"""SwiGLU with its own backward.

It keeps gate and up. Autograd would also keep silu(gate), and pass over memory four times.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from unfreeze.kernels import liger
from unfreeze.kernels.choice.candidates import of_modules
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Op
from unfreeze.kernels.loops.rows import rows_view
from unfreeze.kernels.swiglu import reference

__all__ = ["OP", "bucket", "functions_for", "swiglu"]


def swiglu(gate: Tensor, up: Tensor | None = None, impl: str = "auto") -> Tensor:
    """h = silu(gate) · up, where silu(x) = x / (1 + e^-x). gate, up [..., I] -> h [..., I].

    Without `up`, gate is [..., 2I] and holds both, gate first.
    The reference rounds silu and the product, the candidates only the product.
    Backward keeps its inputs and nothing else.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return choose(OP, gate.device, gate.dtype, bucket(gate, up), impl)(gate, up)


def bucket(gate: Tensor, up: Tensor | None = None) -> str:
    """The bucket of shapes that share a measurement, by the elements of h.

    The time of small ones is the overhead of a call, of large ones memory bandwidth.
    """
    elements = gate.numel() if up is not None else gate.numel() // 2
    return "under 256k" if elements < 1 << 18 else "256k to 4M" if elements < 1 << 22 else "over 4M"


class SwiGLUFunctions(Protocol):
    """The module of an implementation; reference.py documents each function."""

    def forward(self, gate: Tensor, up: Tensor, h: Tensor, /) -> None: ...

    def backward(self, dh: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, /) -> None: ...

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
        /,
    ) -> None: ...


def functions_for(gate: Tensor, up: Tensor | None = None) -> SwiGLUFunctions:
    """forward and backward of the chosen implementation, for an op that writes its own backward."""
    chosen = choose(OP, gate.device, gate.dtype, bucket(gate, up))
    return chosen.functions if isinstance(chosen, SwiGLU) else reference  # Liger's have another form


class SwiGLU:
    """An implementation: the op as autograd sees it."""

    def __init__(self, functions: SwiGLUFunctions):
        self.functions = functions

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return _SwiGLU.apply(gate, up, self.functions)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, functions: SwiGLUFunctions) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.functions = functions
        width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
        h = torch.empty((*gate.shape[:-1], width), dtype=gate.dtype, device=gate.device)
        functions.forward(*_halves(gate, up), h.view(-1, width))
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
        ctx.functions.backward(rows_view(dh), *_halves(gate, up), *_halves(dgate, dup))
        return dgate, dup, None


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gate, up) as [rows, I] with last stride 1."""
    if up is not None:
        return rows_view(gate), rows_view(up)
    first, second = rows_view(gate).chunk(2, dim=-1)
    return first, second


def _case(rows: int, width: int, cuda_rows: int) -> Case:
    """Inputs of [rows, width] to measure with; a GPU gets cuda_rows."""

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        tensors = (
            torch.randn((cuda_rows if device.type == "cuda" else rows, width), generator=generator)
            for _ in range(2)
        )
        return tuple(tensor.to(device, dtype).requires_grad_() for tensor in tensors)

    return Case(bucket(torch.empty((rows, width), device="meta"), torch.empty(0, device="meta")), inputs)


OP = Op(
    name="swiglu",
    reference=SwiGLU(reference),
    candidates={
        **of_modules("unfreeze.kernels.swiglu", SwiGLU, "6 bytes a number, the reference 10"),
        "liger": Candidate(liger.load_swiglu, liger.refuses, waits_on=("cuda",)),
    },
    cases=(_case(128, 512, 128), _case(2048, 512, 2048), _case(1024, 4864, 16384)),
    # float32: the exponential is good to 3e-7
    # bf16: two roundings of at most 2^-8 each, about 2^-9.3 in the mean square
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3},
)
