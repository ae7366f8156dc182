"""recompute = "auto": the fastest choice that fits in the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unfreeze.core.process import COMPILED
from unfreeze.core.units import format_bytes
from unfreeze.models.recompute import Recompute
from unfreeze.parallel.plan.terms import Plan, replanned

FASTEST_FIRST: tuple[Recompute, ...] = ("nothing", "elementwise", "selective", "layers")
"""What is computed again in backward, the least first; each keeps less than the one before it."""
SAME_BITS: tuple[Recompute, ...] = ("elementwise", "selective", "layers")
"""Among these a run may change, and its numbers stay the same to the bit: all visit a layer in equal pieces.
"nothing" takes all tokens at once, so products and sums are cut otherwise (tests/models/test_decoder.py)."""


def fastest(made: Plan, among: Sequence[Recompute] = FASTEST_FIRST) -> Plan:
    """The plan with the first of `among` that fits; with the last where none does. Its `why` says so.

    made: the plan with any of them.
    """
    # what compiled code takes is in no term: a choice that keeps more than "layers" leaves it free
    room = made.usable - (COMPILED if made.hardware.kind == "cpu" else 0)
    before = ""
    for choice in among:
        found = replanned(made, made.layout.but(recompute=choice))
        if found.total <= room or choice == among[-1]:
            why = f"the fastest that fits{before}" if found.fits else f"it takes the least{before}"
            return replace(found, why=why)
        before = f"; {choice} would take {format_bytes(found.total)}"
    raise ValueError("among is empty")
