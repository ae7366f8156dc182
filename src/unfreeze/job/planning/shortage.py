"""Memory ran out during a run: raise DoesNotFit with settings that need less."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from unfreeze.core.errors import DoesNotFit, ran_out
from unfreeze.core.process import COMPILED, COMPILED_AT_MOST
from unfreeze.core.units import format_bytes

if TYPE_CHECKING:
    from unfreeze.parallel.plan import Plan

LESS = 0.75
"""Largest share of the planned peak for a proposal; the plan was too low, so its limit cannot be used."""


@contextmanager
def refused_when_short(plans: list[Plan]) -> Generator[None]:
    """Turn an out-of-memory error into DoesNotFit. plans: holds the run's plan, once there is one."""
    try:
        yield
    except Exception as error:
        if not (what := ran_out(error)):
            raise
        if not plans:
            raise DoesNotFit(
                f"memory ran out: {what}", next="end other programs, or raise ulimit -v"
            ) from error
        (plan,) = plans
        peak, usable = format_bytes(plan.total), format_bytes(plan.usable)
        raise DoesNotFit(
            f"memory ran out: {what}; the plan was {peak} of {usable} usable on {plan.hardware.name}",
            next=remedy(plan),
        ) from error


def remedy(plan: Plan) -> str:
    """Return the flags of the first proposal that needs at most LESS of this plan.

    If the plan fits but leaves no room for compiled code, first suggest freeing memory.
    """
    from unfreeze.parallel.plan import USABLE, what_fits
    from unfreeze.parallel.plan.propose import LARGER
    from unfreeze.parallel.plan.terms import plan as plan_of

    smaller = replace(plan.hardware, available=int(LESS * min(plan.total, plan.usable) / USABLE))
    fits = what_fits(plan_of(plan.sizes, plan.layout, plan.work, smaller))
    less = fits[0][0] if fits else LARGER
    if plan.hardware.kind == "cpu" and plan.total <= plan.usable < plan.total + COMPILED:
        return (
            f"end other programs or raise ulimit -v, as compiling takes up to {COMPILED_AT_MOST}; or {less}"
        )
    return less
