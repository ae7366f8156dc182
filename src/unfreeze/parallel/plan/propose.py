"""Propose settings that fit if a run does not: each proposal is solved for and planned again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unfreeze.core.errors import DoesNotFit
from unfreeze.core.process import COMPILED, COMPILED_AT_MOST
from unfreeze.core.units import format_bytes
from unfreeze.models.recompute import Recompute
from unfreeze.parallel.plan.terms import Plan, replanned

MIN_TOKENS = 2  # per micro-batch: one token has no next token to predict
LESS: dict[str, tuple[Recompute, ...]] = {
    "nothing": ("elementwise", "selective", "layers"),
    "elementwise": ("selective", "layers"),
    "selective": ("layers",),
    "layers": (),
}
"""recompute -> policies that keep less, those that keep most first."""

Proposal = tuple[str, str]
"""(flags, the same with their bytes)."""
LARGER = "use a machine with more memory, a smaller checkpoint, or one in 4 bits"


def refuse_if_too_large(plan: Plan, others: Sequence[Proposal] = ()) -> None:
    """Raise DoesNotFit with the arithmetic and with settings that fit.

    others: further settings, proposed first.
    """
    if plan.fits:
        return
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in plan.terms.items() if size)
    peak, usable = format_bytes(plan.total), format_bytes(plan.usable)
    bound = {"ulimit": " within this shell's ulimit", "container": " in this container"}
    within = bound.get(plan.hardware.limit, "")
    arithmetic = f"peak {peak}, {usable} usable on {plan.hardware.name}{within}: {parts}"
    if plan.load > plan.training:
        arithmetic += f"; loading alone takes {format_bytes(plan.load)}"
    fits = [*others, *what_fits(plan)]
    if not fits:
        raise DoesNotFit(
            f"{arithmetic}. No number of tokens and no rank fits: the base alone is"
            f" {format_bytes(plan.terms['base'])}",
            next=LARGER,
        )
    descriptions = ", or ".join(description for _, description in fits)
    remedy = fits[0][0]
    if plan.hardware.limit == "ulimit":  # without room for it the compiler may wait for ever
        remedy = f"raise ulimit -v: compiling takes up to {COMPILED_AT_MOST} beside the peak; then {remedy}"
    raise DoesNotFit(f"{arithmetic}. Fits with {descriptions}", next=remedy)


def what_fits(plan: Plan) -> list[Proposal]:
    """Return changes that fit.

    First those that leave the result unchanged: offloaded experts, fewer layers that keep activations (the
    largest number that fits), recompute, more micro-batches (the smallest number), the last two together.
    Then fewer tokens per step (the largest number) and a lower rank (the largest). Only if none of these
    fits:
    fewer tokens with rank 1.
    """
    proposals: list[Proposal] = []
    layout, rank = plan.layout, plan.work.rank

    # offloaded experts, loaded layer by layer
    if layout.experts == "device" and plan.sizes.streamed and rank is not None:
        places = ["host"] * (plan.hardware.kind == "cuda") + ["disk"] * (not plan.sizes.packing)
        for place in places:
            elsewhere = replanned(plan, layout.but(experts=place))
            proposals += if_it_fits(elsewhere, f"--place.experts {place}")

    # layer inputs in host memory
    if plan.hardware.kind == "cuda" and rank is not None and layout.boundary == "device":
        elsewhere = replanned(plan, layout.but(boundary="host"))
        if elsewhere.layout.boundary_leaves:
            proposals += if_it_fits(elsewhere, "--place.boundary host")

    # the adapters' moments in host memory
    if plan.hardware.kind == "cuda" and rank is not None and layout.optimizer == "device":
        elsewhere = replanned(plan, layout.but(optimizer="host"))
        proposals += if_it_fits(
            elsewhere, "--place.optimizer host", "the moments of the adapters in host memory"
        )

    # fewer layers that keep activations
    if layout.recompute == "selective":
        most = plan.sizes.num_layers if layout.keep_layers is None else layout.keep_layers
        fewer = _largest(most, lambda count: fits_with_margin(replanned(plan, layout.but(keep_layers=count))))
        if 0 < fewer < most:
            with_fewer = replanned(plan, layout.but(keep_layers=fewer))
            proposals += if_it_fits(with_fewer, f"--place.keep-layers {fewer}")

    # more recomputation
    for mode in LESS[layout.recompute]:
        less = replanned(plan, layout.but(recompute=mode))
        proposals += if_it_fits(less, f"--place.recompute {mode}")

    # fewer tokens at once, a lower rank, finally both
    for start in _starts(plan):
        proposals += _fewer_tokens(start)
    if rank is not None:
        lower = _largest(rank, lambda value: fits_with_margin(_with_rank(plan, value)))
        if lower:
            proposals += if_it_fits(_with_rank(plan, lower), f"--lora.rank {lower}")
        if not proposals:
            for start in _starts(plan):
                one = _Start(_with_rank(start.plan, 1), f"{start.flags}--lora.rank 1 ")
                proposals += _fewer_tokens(one)
    return proposals


@dataclass(frozen=True)
class _Start:
    """A plan that a proposal changes further, with the flags that lead to it."""

    plan: Plan
    flags: str = ""


def _starts(plan: Plan) -> list[_Start]:
    """Return this plan, preceded by the same with full recomputation if not all is recomputed."""
    if plan.layout.recompute == "layers":
        return [_Start(plan)]
    least = replanned(plan, plan.layout.but(recompute="layers"))
    return [_Start(least, "--place.recompute layers "), _Start(plan)]


def _fewer_tokens(start: _Start) -> list[Proposal]:
    """Propose the same step in more micro-batches, or a smaller step in as many."""
    plan, parts = start.plan, start.plan.work.micro_batches
    tokens = _largest(plan.work.tokens, lambda n: fits_with_margin(replanned(plan, tokens=n)))
    if tokens < MIN_TOKENS or tokens == plan.work.tokens:
        return []

    # Upper bound of the requested step: tokens = step // micro_batches lost at most parts - 1.
    step = plan.work.tokens * parts + parts - 1
    # Two micro-batches hold different gradients than three or more (terms.py), so the smallest number that
    # fits is 2, 3, or the solution for three.
    with_sums = _largest(
        plan.work.tokens, lambda n: fits_with_margin(replanned(plan, tokens=n, micro_batches=max(parts, 3)))
    )
    proposals: list[Proposal] = []
    for more in sorted({2, 3, step // (with_sums + 1) + 1}):
        cut = replanned(plan, tokens=step // more, micro_batches=more)
        if more > parts and step // more >= MIN_TOKENS and not proposals:
            proposals += if_it_fits(
                cut, f"{start.flags}--micro-batches {more}", f"{step // more:,} tokens each, "
            )

    smaller = replanned(plan, tokens=tokens)
    return proposals + if_it_fits(smaller, f"{start.flags}--tokens-per-step {tokens * parts}")


def _with_rank(plan: Plan, rank: int) -> Plan:
    """Lower rank and experts_rank together, in proportion."""
    assert plan.work.rank is not None
    experts = plan.work.experts_rank
    scaled = None if experts is None else max(1, experts * rank // plan.work.rank)
    return replanned(plan, rank=rank, experts_rank=scaled)


def if_it_fits(plan: Plan, flags: str, what: str = "") -> list[Proposal]:
    """Return the plan as a proposal, or none. what: text to print beside its bytes."""
    return [(flags, f"{flags} ({what}{format_bytes(plan.total)})")] if fits_with_margin(plan) else []


def fits_with_margin(plan: Plan) -> bool:
    """Return True if it fits with room for a CPU's compiled kernels, whose memory is in no term."""
    room = COMPILED if plan.hardware.kind == "cpu" and plan.usable > 2 * COMPILED else 0
    return plan.fits and plan.total + room <= plan.usable


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n in 1..limit with fits(n), by bisection (bytes grow with n); 0 if none fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
