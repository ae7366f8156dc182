"""The layout a machine should run a model in: the bytes and seconds of every combination are predicted.

Of those that fit, layouts that run today come first, then the fastest. Among layouts within 5 % of the
fastest, the one with the fewest unbuilt parts (Layout.not_built) is chosen.
Where none fits, `proposals` says what would: fewer tokens a step, a lower rank, smaller moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import Layout
from unfreeze.core.units import format_bytes
from unfreeze.models.recompute import Recompute
from unfreeze.parallel.plan.aside import Aside
from unfreeze.parallel.plan.counts import Counts
from unfreeze.parallel.plan.fastest import FASTEST_FIRST
from unfreeze.parallel.plan.fleet import PER_HOST, Fleet, devices
from unfreeze.parallel.plan.layouts import MANY, Facts, layouts
from unfreeze.parallel.plan.places import Places, bytes_by_place, fullest_share, with_buffers
from unfreeze.parallel.plan.propose import MIN_TOKENS
from unfreeze.parallel.plan.rates import Rates, of_device
from unfreeze.parallel.plan.seconds import IMBALANCE, Seconds, Step, asking, seconds
from unfreeze.parallel.plan.sizes import Sizes
from unfreeze.parallel.plan.terms import Work, beside

TOKENS = tuple(2**power for power in range(16, 8, -1))
"""Tokens of a step that are tried where the user names none, 65,536 first; and, if that is more, as many as
give each device a whole document."""
HOST_SIZES = (128, 256, 512, 768, 1024, 1536, 2048)  # GiB that hosts are sold with
CPU_SIZES = (8, 16, 32, 64, 96, 128, 192, *HOST_SIZES[1:], 3072, 4096)  # GiB of a machine without a GPU
WISH = Layout()
MOST = 64  # devices that are proposed
WAITING = 0.25  # share of a step spent waiting for transfers; above it a layout is proposed, not chosen
CLOSE = 1.05  # a layout counts as equally fast if the fastest is at most this many times as fast


@dataclass(frozen=True)
class PlanRequest:
    """What the user wants trained, and what of it may be chosen.

    work        rank, moments and the loss block; its tokens are replaced
    tokens      of a step on all devices; None: chosen from TOKENS
    length      tokens of a document
    wish        where the parts must lie; "auto" in a field: chosen
    recomputes  recompute policies to try, where the wish leaves that open
    rates       as measured on this machine; None: from the device's entry in machines.toml, if there is one
    waiting     share of a step that may be spent waiting for transfers
    aside       tokens of a device's micro-batch -> what a second model takes beside them; None: there is none
    second_rates  as measured on this machine for that model; None: the same as for the one that trains
    """

    work: Work
    tokens: int | None
    length: int
    wish: Layout = WISH
    recomputes: tuple[Recompute, ...] = FASTEST_FIRST
    rates: Rates | None = None
    waiting: float = WAITING
    aside: Callable[[int], Aside] | None = None
    second_rates: Rates | None = None


@dataclass(frozen=True)
class PlanChoice:
    """One layout at one number of tokens: bytes by place, and seconds where the device's facts are known.

    whole: a device's micro-batch has room for the longest document; else a run cuts documents.
    """

    layout: Layout
    tokens: int
    places: Places
    time: Seconds | None
    not_built: tuple[str, ...]
    whole: bool = True

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.time.step if self.time else None

    @property
    def waits(self) -> float:
        """Share of the step that waits for transfers; 0 where it has no seconds."""
        return self.time.shown / self.time.step if self.time else 0.0


def choose_plan(sizes: Sizes, counts: Counts, fleet: Fleet, asked: PlanRequest) -> tuple[PlanChoice, bool]:
    """-> (the layout, whether it fits). Where none fits, the one that exceeds its memory the least.

    Raises ConfigError where a step has too few tokens for the devices.
    """
    choices = list(_choices(sizes, counts, fleet, asked))
    if not choices:
        parts = fleet.count * asked.work.micro_batches
        raise ConfigError(
            f"{asked.tokens:,} tokens a step are less than {MIN_TOKENS} for each of {parts:,}"
            " devices and micro-batches",
            next=f"--tokens-per-step {MIN_TOKENS * parts} or more, or fewer devices",
        )
    worth_it = [choice for choice in choices if choice.waits <= asked.waiting]
    fitting = [choice for choice in worth_it if choice.places.fits]
    if not fitting:
        return min(worth_it or choices, key=_over), False
    fitting = [choice for choice in fitting if choice.whole] or fitting
    fitting = [choice for choice in fitting if choice.places.roomy] or fitting
    best = max(fitting, key=_rank)
    near = [c for c in fitting if _built(c) == _built(best) and _speed(c) * CLOSE >= _speed(best)]
    return min(near, key=lambda choice: (len(choice.not_built), -_speed(choice))), True


def proposals(sizes: Sizes, counts: Counts, fleet: Fleet, asked: PlanRequest) -> list[str]:
    """What fits instead, one line each, with its bytes.

    First one change each: a lower rank, smaller moments, more host memory, fewer tokens, or more, which wait
    less for what arrives once a pass; and to wait longer. Where none of these is enough, several together,
    and the next larger machine.
    """
    found: list[str] = []

    # smaller state: half the rank, a quarter …; moments in int8
    if asked.work.rank is not None:
        for rank in _halves(asked.work.rank):
            experts = asked.work.experts_rank
            lower = replace(
                asked.work, rank=rank, experts_rank=None if experts is None else min(experts, rank)
            )
            found += if_it_fits(f"--lora.rank {rank}", sizes, counts, fleet, replace(asked, work=lower))
            if found:
                break
    if asked.work.optimizer_moments == "float32":
        small = replace(asked, work=replace(asked.work, optimizer_moments="int8"))
        found += if_it_fits("--optimizer.moments int8", sizes, counts, fleet, small)

    # more host memory
    for gib in HOST_SIZES:
        if gib * 2**30 > fleet.host and fleet.kind == "cuda":
            more = replace(fleet, host=gib * 2**30)
            lines = if_it_fits(_with_host(more), sizes, counts, more, asked)
            if lines:
                found += lines
                break

    # fewer tokens a step than were asked for, or more: each as close to them as fits. Without any asked for
    # all were tried already
    fewer = [tokens for tokens in TOKENS if asked.tokens and tokens < asked.tokens]
    more = [tokens for tokens in reversed(TOKENS) if asked.tokens and tokens > asked.tokens]
    for numbers in (fewer, more):
        for tokens in numbers:
            other = replace(asked, tokens=tokens)
            if lines := if_it_fits(f"--tokens-per-step {tokens}", sizes, counts, fleet, other):
                found += lines
                break

    # as many tokens or fewer, even if it then waits for transfers
    for tokens in (asked.tokens, *fewer):
        words = "" if tokens == asked.tokens else f"--tokens-per-step {tokens}"
        lines = if_it_fits(words, sizes, counts, fleet, replace(asked, tokens=tokens), slow=True)
        if lines:
            found += [line for line in lines if line not in found]
            break
    if found:
        return found
    return _together(sizes, counts, fleet, asked) + _larger_machine(sizes, counts, fleet, asked)


def too_large(sizes: Sizes, counts: Counts, fleet: Fleet, asked: PlanRequest) -> str:
    """Why nothing fits: what alone is larger than its place with the least that can be asked, or the sum."""
    least = {name: values[-1] for name, values in _options(fleet, asked).items()}
    choice = min(_choices(sizes, counts, *_changed(fleet, asked, least)), key=_over)
    places, where = choice.places, choice.places.over
    terms, usable = (
        (places.device, places.device_usable) if where == "device" else (places.host, places.host_usable)
    )
    name, size = max(terms.items(), key=lambda term: term[1])
    asks = _words_of(fleet, asked, least)
    even = f"even with {asks}: " if asks else ""
    what = f"{name} alone {format_bytes(size)}"
    if size <= usable:
        what = f"a step {format_bytes(sum(terms.values()))}, most of it {name}"
    return f"{even}{what}, a {where} has {format_bytes(usable)} usable"


def _together(sizes: Sizes, counts: Counts, fleet: Fleet, asked: PlanRequest) -> list[str]:
    """Several changes at once, none larger than it must be with those after it at their utmost.

    Kept as they are as long as possible: host memory, then the rank, the moments, the tokens. [] where not
    even all of them fit. A layout that mostly waits is taken only where no other fits.
    """
    options = _options(fleet, asked)
    for slow in (False, True):

        def fits(changes: Mapping[str, Any], slow: bool = slow) -> bool:
            choices = _choices(sizes, counts, *_changed(fleet, asked, changes), only_fitting=True)
            return any(slow or choice.waits <= asked.waiting for choice in choices)

        changes = {name: values[-1] for name, values in options.items()}
        if not fits(changes):
            continue
        for name, values in options.items():
            changes[name] = next(value for value in values if fits(changes | {name: value}))
        words = _words_of(fleet, asked, changes)
        return if_it_fits(words, sizes, counts, *_changed(fleet, asked, changes), slow=slow)
    return []


def _options(fleet: Fleet, asked: PlanRequest) -> dict[str, list[Any]]:
    """Name of a change -> its values: as it is, then milder to harder."""
    work, parts = asked.work, fleet.count * asked.work.micro_batches
    most = asked.tokens or TOKENS[0]
    hosts = [gib * 2**30 for gib in HOST_SIZES if gib * 2**30 > fleet.host]
    movable = fleet.kind == "cuda" and work.rank is not None  # where every weight trains, nothing leaves
    return {
        "host": [fleet.host, *(hosts if movable else [])],
        "rank": [work.rank, *(_halves(work.rank) if work.rank else [])],
        "moments": list(dict.fromkeys([work.optimizer_moments, "int8"])),
        "tokens": [asked.tokens, *(t for t in TOKENS if MIN_TOKENS * parts <= t < most)],
    }


def _changed(fleet: Fleet, asked: PlanRequest, changes: Mapping[str, Any]) -> tuple[Fleet, PlanRequest]:
    work, rank = asked.work, changes["rank"]
    experts = None if work.experts_rank is None else min(work.experts_rank, rank)
    work = replace(work, rank=rank, experts_rank=experts, optimizer_moments=changes["moments"])
    return replace(fleet, host=changes["host"]), replace(asked, work=work, tokens=changes["tokens"])


def _words_of(fleet: Fleet, asked: PlanRequest, changes: Mapping[str, Any]) -> str:
    """'--lora.rank 4 --tokens-per-step 512': what differs from what was asked."""
    words: list[str] = []
    if changes["rank"] != asked.work.rank:
        words.append(f"--lora.rank {changes['rank']}")
    if changes["moments"] != asked.work.optimizer_moments:
        words.append(f"--optimizer.moments {changes['moments']}")
    if changes["tokens"] != asked.tokens:
        words.append(f"--tokens-per-step {changes['tokens']}")
    if changes["host"] != fleet.host:
        words.append(_with_host(replace(fleet, host=changes["host"])))
    return " ".join(words)


def _with_host(fleet: Fleet) -> str:
    """'--hardware 8xH100+768GB'; of this machine, which has no such name, '768 GB of host memory'."""
    if fleet.here:
        return f"{fleet.host // 2**30:,} GB of host memory"
    return f"--hardware {_named(fleet, fleet.name.partition('+')[0].strip())}"


def _named(fleet: Fleet, devices: str) -> str:
    """'8xH100+768GB', as --hardware takes it."""
    return devices + (f"+{fleet.host / 2**30:g}GB" if fleet.host else "")


def _larger_machine(sizes: Sizes, counts: Counts, fleet: Fleet, asked: PlanRequest) -> list[str]:
    """The next larger machine that fits: more memory of a CPU; more devices, or the next larger one."""
    if fleet.kind == "cpu":
        larger = [(f"--hardware cpu:{gib}GB", replace(fleet, memory=gib * 2**30)) for gib in CPU_SIZES]
        larger = [(words, machine) for words, machine in larger if machine.memory > fleet.memory]
    else:
        counts_of = [fleet.count * 2**power for power in range(1, 7) if fleet.count * 2**power <= MOST]
        kind = fleet.name.partition("+")[0].strip().rpartition("x")[2]
        larger = [
            (
                f"{n} such devices" if fleet.here else f"--hardware {_named(fleet, f'{n}x{kind}')}",
                replace(fleet, count=n),
            )
            for n in counts_of
        ]
        known = sorted(devices().items(), key=lambda item: item[1].memory_gib)
        larger += [
            (
                f"--hardware {_named(fleet, f'{fleet.count}x{name}')}",
                replace(fleet, memory=int(facts.memory_gib * 2**30), device=facts),
            )
            for name, facts in known
            if facts.memory_gib * 2**30 > fleet.memory
        ]
    for words, machine in larger:
        if lines := if_it_fits(words, sizes, counts, machine, asked):
            return lines
    return []


def if_it_fits(
    words: str, sizes: Sizes, counts: Counts, fleet: Fleet, asked: PlanRequest, *, slow: bool = False
) -> list[str]:
    """[what is changed, with the bytes and speed of the layout], or [] where it does not fit.

    slow: also one that waits longer than asked; how long is then one of the changes.
    """
    choices = _choices(sizes, counts, fleet, asked, only_fitting=True)
    fitting = [choice for choice in choices if slow or choice.waits <= asked.waiting]
    if not fitting:
        return []
    best = max([choice for choice in fitting if choice.places.roomy] or fitting, key=_rank)
    rate = best.tokens_per_second
    parts = [f"{format_bytes(sum(best.places.device.values()))} a device"]
    if best.places.host:
        parts.append(f"{format_bytes(sum(best.places.host.values()))} of host memory")
    if rate is not None:
        parts.append(f"{rate:,.{0 if rate >= 10 else 1}f} tokens/s predicted")
    if best.waits > asked.waiting:
        longer = f"--waiting {math.ceil(best.waits * 100) / 100:.2f}"
        words = f"{words} {longer}" if words else longer
        parts.append(f"{best.waits:.0%} of a step waits for transfers")
    if best.not_built:
        parts.append(f"not built yet: {', '.join(best.not_built)}")
    return [f"{words} ({', '.join(parts)}; {best.layout.words(counts.num_experts)})"]


def _choices(
    sizes: Sizes, counts: Counts, fleet: Fleet, asked: PlanRequest, *, only_fitting: bool = False
) -> Iterator[PlanChoice]:
    rates = rates_of(fleet, asked)
    parts = fleet.count * asked.work.micro_batches
    documents = asked.length * parts
    tried = (documents, *TOKENS) if documents > TOKENS[0] else TOKENS
    for tokens in (asked.tokens,) if asked.tokens else tried:
        if tokens < MIN_TOKENS * parts:
            continue
        work, tokens = replace(asked.work, tokens=tokens // parts), tokens // parts * parts
        if asked.aside is not None:
            work = beside(work, asked.aside(work.tokens))
        for layout in _layouts(counts, fleet, asked):
            found = bytes_by_place(sizes, counts, work, fleet, layout)
            if only_fitting and not found.fits:
                continue
            time = None
            if rates is not None:
                of_work = replace(asked, work=replace(asked.work, aside=work.aside))
                time = seconds_of(sizes, counts, fleet, rates, layout, of_work, tokens)
            whole = work.tokens >= asked.length
            yield PlanChoice(layout, tokens, found, time, tuple(layout.not_built()), whole)


def rates_of(fleet: Fleet, asked: PlanRequest) -> Rates | None:
    """How fast its devices work; None where that is unknown, so that the plan has no seconds."""
    return asked.rates or (of_device(fleet.device) if fleet.device else None)


def seconds_of(
    sizes: Sizes,
    counts: Counts,
    fleet: Fleet,
    rates: Rates,
    layout: Layout,
    asked: PlanRequest,
    tokens: int,
    imbalance: float = IMBALANCE,
) -> Seconds:
    """The seconds of a step of so many tokens in a layout."""
    second, beside_it = 0.0, asked.work.aside
    if beside_it is not None and beside_it.counts is not None:
        own, part = asked.second_rates or rates, tokens // (fleet.count * asked.work.micro_batches)
        second = asking(beside_it.counts, own, tokens=part, length=asked.length)
    step = Step(
        tokens,
        asked.length,
        _trained(sizes, counts, asked.work, layout.sharing),
        every_weight=asked.work.rank is None,
        micro_batches=asked.work.micro_batches,
    )
    return seconds(counts, fleet, rates, layout, step, imbalance=imbalance, second=second)


def _trained(sizes: Sizes, counts: Counts, work: Work, split: int) -> dict[str, int]:
    """Parameters that the fullest device trains."""
    if work.rank is None:
        return {"dense": sizes.elements}
    experts = sizes.experts_per_rank * (work.experts_rank or work.rank)
    return {"dense": sizes.dense_per_rank * work.rank, "experts": int(experts * fullest_share(counts, split))}


def _layouts(counts: Counts, fleet: Fleet, asked: PlanRequest) -> Iterator[Layout]:
    """Every layout that this fleet could have."""
    recomputes = asked.recomputes if asked.wish.recompute == "auto" else (asked.wish.recompute,)
    for found in layouts(asked.wish, facts_of(fleet, counts, every_weight=asked.work.rank is None)):
        layout = with_buffers(found, counts, fleet)
        if layout is not None:
            yield from (layout.but(recompute=recompute) for recompute in recomputes)


def facts_of(fleet: Fleet, counts: Counts, *, every_weight: bool) -> Facts:
    """What decides which layouts there can be on machines that may not be here."""
    splits = {1, fleet.count, PER_HOST if fleet.count % PER_HOST == 0 else 1}
    return Facts(
        kind=fleet.kind,
        processes=fleet.count,
        num_experts=counts.num_experts,
        every_weight=every_weight,
        splits=tuple(sorted(splits)),
        more=MANY,
        host=fleet.host > 0,
        unbuilt=True,
    )


def _built(choice: PlanChoice) -> bool:
    return not choice.not_built


def _speed(choice: PlanChoice) -> float:
    """Tokens per second; without facts about the device, simply the tokens."""
    return choice.tokens_per_second or float(choice.tokens)


def _rank(choice: PlanChoice) -> tuple[bool, bool, float]:
    return choice.whole, _built(choice), _speed(choice)


def _over(choice: PlanChoice) -> float:
    """Bytes over usable bytes, of the fuller place."""
    device = sum(choice.places.device.values()) / choice.places.device_usable
    host = sum(choice.places.host.values()) / max(1, choice.places.host_usable)
    return max(device, host)


def _halves(rank: int) -> Sequence[int]:
    return [rank >> shift for shift in range(1, rank.bit_length())]
