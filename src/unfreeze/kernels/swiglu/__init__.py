"""SwiGLU with its own backward: it keeps gate and up, where autograd would keep silu(gate) too and make four passes over memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels import liger
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Candidate, Case, Op
from unfreeze.kernels.choice.parts import wrapped
from unfreeze.kernels.loops.rows import rows_view
from unfreeze.kernels.swiglu import reference

__all__ = ["OP", "bucket", "part_for", "swiglu"]


def swiglu(gate: Tensor, up: Tensor | None = None, impl: str = "auto") -> Tensor:
    """h = silu(gate) · up, gate and up [..., I] -> [..., I]. Without `up`, gate is [..., 2I]: both, gate first.

    The reference rounds silu and the product, the candidates only the product. Backward keeps its inputs and nothing else.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return choose(OP, gate.device, gate.dtype, bucket(gate, up), impl)(gate, up)


def bucket(gate: Tensor, up: Tensor | None = None) -> str:
    """Shapes that are measured as one, by the numbers in h: what a call costs decides the small ones, memory the large ones."""
    elements = gate.numel() if up is not None else gate.numel() // 2
    return "under 256k" if elements < 1 << 18 else "256k to 4M" if elements < 1 << 22 else "over 4M"


def part_for(gate: Tensor, up: Tensor | None = None) -> ModuleType:
    """forward, backward and backward_weighted (reference.py) of what is chosen for these inputs, for an op that writes its own backward."""
    return getattr(choose(OP, gate.device, gate.dtype, bucket(gate, up)), "part", reference)  # Liger's has no parts


class SwiGLU:
    """An implementation: the op as autograd sees it; `part` has forward, backward and backward_weighted for whoever writes his own backward."""

    def __init__(self, part: ModuleType):
        self.part = part

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return _SwiGLU.apply(gate, up, self.part)  # type: ignore[return-value]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, part: ModuleType) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        ctx.part = part
        width = gate.shape[-1] if up is not None else gate.shape[-1] // 2
        h = torch.empty((*gate.shape[:-1], width), dtype=gate.dtype, device=gate.device)
        part.forward(*_halves(gate, up), h.view(-1, width))
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
        ctx.part.backward(rows_view(dh), *_halves(gate, up), *_halves(dgate, dup))
        return dgate, dup, None


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gate, up) as [rows, I] with last stride 1."""
    if up is not None:
        return rows_view(gate), rows_view(up)
    first, second = rows_view(gate).chunk(2, dim=-1)
    return first, second


def _case(rows: int, width: int, cuda_rows: int) -> Case:
    """A GPU gets more rows."""

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        made = (torch.randn((cuda_rows if device.type == "cuda" else rows, width), generator=generator) for _ in range(2))
        return tuple(tensor.to(device, dtype).requires_grad_() for tensor in made)

    return Case(bucket(torch.empty((rows, width), device="meta"), torch.empty(0, device="meta")), inputs)


OP = Op(
    name="swiglu",
    reference=SwiGLU(reference),  # type: ignore[arg-type]
    candidates={
        **wrapped("unfreeze.kernels.swiglu", SwiGLU),
        "liger": Candidate(liger.swiglu, liger.refuses),
    },
    cases=(_case(128, 512, 128), _case(2048, 512, 2048), _case(1024, 4864, 16384)),
    # float32: the exponential is good to 3e-7. bf16: two roundings of 2^-8 at most, about 2^-9.3 each in the mean square
    tolerance={torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3},
)
