"""Smaller cases than an op's own, where those take Triton's interpreter, or a CPU without units for bf16, seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unfreeze.kernels.choice import ops
from unfreeze.kernels.choice.op import Case, Op
from unfreeze.quant.codec import Packed

MADE = {
    "adamw": (((8, 64), (33,)), False),
    "linear_cross_entropy": (6, 16, 70, False),
    "swiglu": (5, 40, 5),
    "token_order": (6, 2, 3, 16, 16),
}
"""Op -> arguments of its `_case`."""


def leaf(part: Any) -> Any:
    return part.detach().contiguous().requires_grad_()


def one_document(q, k, v, scale):
    return *(leaf(part[:1]) for part in (q, k, v)), scale


def an_eighth(x, packed, ends):
    """Half the rows of each expert's weight, a quarter of its columns."""
    rows, columns = packed.shape[1] // 2, packed.shape[2] // 4
    parts = {name: part[:, :rows, : part.shape[2] // 4].contiguous() for name, part in packed.parts.items()}
    return x[:, :columns].contiguous(), Packed(packed.codec, parts), ends


def an_eighth_of_a_state(u, w, k, a, state, steps):
    """Two heads, and two of the kernel's blocks of columns."""
    narrow = leaf(u[:, :2, :, :32]), None if w is None else leaf(w[:, :2]), leaf(k[:, :2])
    return *narrow, leaf(a[:, :2]), leaf(state[:, :2, :, :32]), steps


CUT: dict[str, Callable[..., tuple[Any, ...]]] = {
    "attention": one_document,
    "int4_grouped_mm": an_eighth,
    "state_scan": an_eighth_of_a_state,
}
"""Op -> a part of its case's arguments."""
SMALL = (*MADE, *CUT)


def small(name: str) -> Op:
    """The op with small cases and at most one of its uses; as it is, if there are none."""
    op = ops.import_op(name)
    if name in MADE:
        uses = () if name == "token_order" else op.uses[:1]  # its uses have 144 rows: test_uses.py
        return replace(op, cases=(ops._folder(name)._case(*MADE[name]),), uses=uses)
    if name in CUT:
        return replace(op, cases=tuple(cut(case, CUT[name]) for case in op.cases), uses=op.uses[:1])
    return op


def cut(case: Case, part: Callable[..., tuple[Any, ...]]) -> Case:
    return replace(case, inputs=lambda *where: part(*case.inputs(*where)))
