"""recompute = "auto": the fastest policy that fits in the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unfreeze.core.process import COMPILED
from unfreeze.core.units import format_bytes
from unfreeze.models.recompute import Recompute
from unfreeze.parallel.plan.terms import Plan, replanned

FASTEST_FIRST: tuple[Recompute, ...] = ("nothing", "elementwise", "selective", "layers")
"""Recompute policies, least recomputation first; each keeps less than the one before it."""
SAME_BITS: tuple[Recompute, ...] = ("elementwise", "selective", "layers")
"""Policies among which a run may switch with bit-identical results: all visit a layer in equal pieces.
"nothing" takes all tokens at once, so products and sums are split differently
(tests/models/test_decoder.py)."""


def fastest(current: Plan, among: Sequence[Recompute] = FASTEST_FIRST) -> Plan:
    """Return the plan with the first of `among` that fits, or with the last if none does.

    Its `why` explains the choice. current: the plan with any of them.
    """
    # compiled code's memory is in no term: a policy that keeps more than "layers" must leave it free
    room = current.usable - (COMPILED if current.hardware.kind == "cpu" else 0)
    before = ""
    for choice in among:
        candidate = replanned(current, current.layout.but(recompute=choice))
        if candidate.total <= room or choice == among[-1]:
            why = f"the fastest that fits{before}" if candidate.fits else f"it takes the least{before}"
            return replace(candidate, why=why)
        before = f"; {choice} would take {format_bytes(candidate.total)}"
    raise ValueError("among is empty")
