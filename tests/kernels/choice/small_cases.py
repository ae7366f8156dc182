"""Smaller cases than an op's own, where those take Triton's interpreter, or a CPU without units for bf16, seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from unfreeze.kernels import adamw, linear_cross_entropy
from unfreeze.kernels.choice import ops
from unfreeze.kernels.choice.op import Case, Op
from unfreeze.kernels.expert_mlp import cases as experts
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


def two_documents(q, k, v, scale):
    """At most two, and half of their heads."""
    return *(leaf(part[:2, :, : part.shape[2] // 2]) for part in (q, k, v)), scale


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
    "attention": two_documents,
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


def to_compare(name: str) -> Op:
    """The op with all its cases, of fewer numbers: in bf16 a CPU without units for it takes seconds for its own."""
    op = ops.import_op(name)
    if name == "expert_mlp":
        return replace(op, cases=tuple(narrow_experts()))
    if name == "adamw":
        few = [adamw._case([(8, 1024)] * 8, False), adamw._case([(128, 160)] * 2, True)]
        return replace(op, cases=(few[0], op.cases[1], few[1], op.cases[3]))
    if name == "linear_cross_entropy":  # more words than Triton's kernel has in a block
        few = [linear_cross_entropy._case(24, 32, 5000, trained) for trained in (False, True)]
        return replace(op, cases=(*few, *op.cases[2:]))
    return replace(op, cases=tuple(cut(case, two_documents) for case in op.cases))


COMPARED_SMALL = ("adamw", "attention", "expert_mlp", "linear_cross_entropy")


def narrow_experts() -> Iterator[Case]:
    """As expert_mlp.cases.measured, with a sixteenth of the weights."""
    for kind, suffix in experts.SUFFIX.items():
        for name, rows in (("under 64", 16), ("64 on", 64)):
            tokens = rows * 8 // experts.PER_TOKEN
            problem = experts.Problem(tokens, 8, 128, 64, 8, used=8, kind=kind)
            yield Case(name + suffix, problem.arguments)


def cut(case: Case, part: Callable[..., tuple[Any, ...]]) -> Case:
    return replace(case, inputs=lambda *where: part(*case.inputs(*where)))
