"""Choose the layout for a model on a machine, by predicting bytes and seconds of every combination.

Among those that fit, layouts that are built today come first, then the fastest. Among layouts within 5 % of
the fastest, the one with the fewest unbuilt parts (Layout.not_built) wins.
If none fits, `proposals` says what would: fewer tokens per step, a lower rank, smaller moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import Layout
from unfreeze.core.units import format_bytes
from unfreeze.kernels.loops.triton_options import installed
from unfreeze.models.recompute import Recompute
from unfreeze.parallel.plan.aside import Aside
from unfreeze.parallel.plan.counts import Counts
from unfreeze.parallel.plan.fastest import FASTEST_FIRST
from unfreeze.parallel.plan.fleet import PER_HOST, Fleet, devices
from unfreeze.parallel.plan.layouts import MANY, Facts, layouts
from unfreeze.parallel.plan.places import Places, bytes_by_place, fullest_share, with_buffers
from unfreeze.parallel.plan.propose import MIN_TOKENS
from unfreeze.parallel.plan.rates import Rates, of_device
from unfreeze.parallel.plan.sampling import Rollout, sampling_seconds
from unfreeze.parallel.plan.seconds import IMBALANCE, Seconds, Step, asking, seconds
from unfreeze.parallel.plan.sizes import Sizes
from unfreeze.parallel.plan.terms import Work, beside

TOKENS = tuple(2**power for power in range(16, 8, -1))
"""Tokens per step to try if the user sets none, 65,536 first. If that is more, also the number that gives
each device a whole document."""
HOST_SIZES = (128, 256, 512, 768, 1024, 1536, 2048)  # GiB of hosts on the market
CPU_SIZES = (8, 16, 32, 64, 96, 128, 192, *HOST_SIZES[1:], 3072, 4096)  # GiB of machines without a GPU
WISH = Layout()
MOST = 64  # maximum number of devices to propose
WAITING = 0.25  # share of a step spent waiting for transfers; above it a layout is proposed, not chosen
CLOSE = 1.05  # layouts count as equally fast if the fastest is at most this many times as fast


@dataclass(frozen=True)
class PlanRequest:
    """The requested training, and what of it may be chosen.

    work        rank, moments and the loss block; its tokens are replaced
    tokens      per step on all devices; None: chosen from TOKENS
    length      tokens of a document
    wish        requested placement; fields with "auto" are chosen
    recomputes  recompute policies to try, if the wish leaves that open
    rates       measured on this machine; None: the device's entry in machines.toml, if there is one
    waiting     maximum share of a step spent waiting for transfers
    aside       tokens of a device's micro-batch -> the second model's cost; None: there is none
    second_rates  measured on this machine for that model; None: the same as for the trained one
    packs       as Facts.packs
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
    packs: str = ""


@dataclass(frozen=True)
class PlanChoice:
    """One layout at one number of tokens: bytes by place, and seconds if the device's rates are known.

    whole: a device's micro-batch has room for the longest document; otherwise a run cuts documents.
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
        """Share of the step spent waiting for transfers; 0 if no seconds are known."""
        return self.time.shown / self.time.step if self.time else 0.0


def choose_plan(sizes: Sizes, counts: Counts, fleet: Fleet, request: PlanRequest) -> tuple[PlanChoice, bool]:
    """Return (the layout, True if it fits). If none fits, the one that exceeds its memory the least.

    Raises ConfigError if a step has too few tokens for the devices.
    """
    choices = list(_choices(sizes, counts, fleet, request))
    if not choices:
        parts = fleet.count * request.work.micro_batches
        raise ConfigError(
            f"{request.tokens:,} tokens per step are fewer than {MIN_TOKENS} for each of {parts:,}"
            " devices and micro-batches",
            next=f"--tokens-per-step {MIN_TOKENS * parts} or more, or fewer devices",
        )
    worth_it = [choice for choice in choices if choice.waits <= request.waiting]
    fitting = [choice for choice in worth_it if choice.places.fits]
    if not fitting:
        return min(worth_it or choices, key=_over), False
    fitting = [choice for choice in fitting if choice.whole] or fitting
    fitting = [choice for choice in fitting if choice.places.roomy] or fitting
    best = max(fitting, key=_rank)
    near = [c for c in fitting if _built(c) == _built(best) and _speed(c) * CLOSE >= _speed(best)]
    return min(near, key=lambda choice: (len(choice.not_built), -_speed(choice))), True


def proposals(sizes: Sizes, counts: Counts, fleet: Fleet, request: PlanRequest) -> list[str]:
    """Return changes that would fit, one line each, with their bytes.

    First single changes: a lower rank, smaller moments, more host memory, fewer tokens, more tokens (which
    wait less for transfers that come once per pass), or a longer accepted wait. If none is enough, several
    together, and the next larger machine.
    """
    fitting: list[str] = []

    # smaller state: half the rank, a quarter …; moments in int8
    if request.work.rank is not None:
        for rank in _halves(request.work.rank):
            experts = request.work.experts_rank
            lower = replace(
                request.work, rank=rank, experts_rank=None if experts is None else min(experts, rank)
            )
            fitting += if_it_fits(f"--lora.rank {rank}", sizes, counts, fleet, replace(request, work=lower))
            if fitting:
                break
    if request.work.optimizer_moments == "float32":
        small = replace(request, work=replace(request.work, optimizer_moments="int8"))
        fitting += if_it_fits("--optimizer.moments int8", sizes, counts, fleet, small)

    # more host memory
    for gib in HOST_SIZES:
        if gib * 2**30 > fleet.host and fleet.kind == "cuda":
            more = replace(fleet, host=gib * 2**30)
            lines = if_it_fits(_with_host(more), sizes, counts, more, request)
            if lines:
                fitting += lines
                break

    # fewer tokens per step than requested, or more: each as close to the request as fits. Without a request
    # all were tried already
    fewer = [tokens for tokens in TOKENS if request.tokens and tokens < request.tokens]
    more = [tokens for tokens in reversed(TOKENS) if request.tokens and tokens > request.tokens]
    for numbers in (fewer, more):
        for tokens in numbers:
            other = replace(request, tokens=tokens)
            if lines := if_it_fits(f"--tokens-per-step {tokens}", sizes, counts, fleet, other):
                fitting += lines
                break

    # as many tokens or fewer, even if the step then waits for transfers
    for tokens in (request.tokens, *fewer):
        words = "" if tokens == request.tokens else f"--tokens-per-step {tokens}"
        lines = if_it_fits(words, sizes, counts, fleet, replace(request, tokens=tokens), slow=True)
        if lines:
            fitting += [line for line in lines if line not in fitting]
            break
    if fitting:
        return fitting
    return _together(sizes, counts, fleet, request) + _larger_machine(sizes, counts, fleet, request)


def too_large(sizes: Sizes, counts: Counts, fleet: Fleet, request: PlanRequest) -> str:
    """Explain why nothing fits: the one term that exceeds its memory even at minimal settings, or the sum."""
    least = {name: values[-1] for name, values in _options(fleet, request).items()}
    choice = min(_choices(sizes, counts, *_changed(fleet, request, least)), key=_over)
    places, where = choice.places, choice.places.over
    terms, usable = (
        (places.device, places.device_usable) if where == "device" else (places.host, places.host_usable)
    )
    name, size = max(terms.items(), key=lambda term: term[1])
    asks = _words_of(fleet, request, least)
    even = f"even with {asks}: " if asks else ""
    what = f"{name} alone takes {format_bytes(size)}"
    if size <= usable:
        what = f"a step takes {format_bytes(sum(terms.values()))}, most of it {name}"
    return f"{even}{what}; a {where} has {format_bytes(usable)} usable"


def _together(sizes: Sizes, counts: Counts, fleet: Fleet, request: PlanRequest) -> list[str]:
    """Propose several changes at once, each as small as possible with all later ones at their maximum.

    Preserved longest to shortest: host memory, the rank, the moments, the tokens. [] if even all changes
    together do not fit. A layout that mostly waits is used only if no other fits.
    """
    options = _options(fleet, request)
    for slow in (False, True):

        def fits(changes: Mapping[str, Any], slow: bool = slow) -> bool:
            choices = _choices(sizes, counts, *_changed(fleet, request, changes), only_fitting=True)
            return any(slow or choice.waits <= request.waiting for choice in choices)

        changes = {name: values[-1] for name, values in options.items()}
        if not fits(changes):
            continue
        for name, values in options.items():
            changes[name] = next(value for value in values if fits(changes | {name: value}))
        words = _words_of(fleet, request, changes)
        return if_it_fits(words, sizes, counts, *_changed(fleet, request, changes), slow=slow)
    return []


def _options(fleet: Fleet, request: PlanRequest) -> dict[str, list[Any]]:
    """Return name of a change -> its values: unchanged first, then milder to harder."""
    work, parts = request.work, fleet.count * request.work.micro_batches
    most = request.tokens or TOKENS[0]
    hosts = [gib * 2**30 for gib in HOST_SIZES if gib * 2**30 > fleet.host]
    # if every weight trains, nothing can be offloaded
    movable = fleet.kind == "cuda" and work.rank is not None
    return {
        "host": [fleet.host, *(hosts if movable else [])],
        "rank": [work.rank, *(_halves(work.rank) if work.rank else [])],
        "moments": list(dict.fromkeys([work.optimizer_moments, "int8"])),
        "tokens": [request.tokens, *(t for t in TOKENS if MIN_TOKENS * parts <= t < most)],
    }


def _changed(fleet: Fleet, request: PlanRequest, changes: Mapping[str, Any]) -> tuple[Fleet, PlanRequest]:
    work, rank = request.work, changes["rank"]
    experts = None if work.experts_rank is None else min(work.experts_rank, rank)
    work = replace(work, rank=rank, experts_rank=experts, optimizer_moments=changes["moments"])
    return replace(fleet, host=changes["host"]), replace(request, work=work, tokens=changes["tokens"])


def _words_of(fleet: Fleet, request: PlanRequest, changes: Mapping[str, Any]) -> str:
    """'--lora.rank 4 --tokens-per-step 512': the flags that differ from the request."""
    words: list[str] = []
    if changes["rank"] != request.work.rank:
        words.append(f"--lora.rank {changes['rank']}")
    if changes["moments"] != request.work.optimizer_moments:
        words.append(f"--optimizer.moments {changes['moments']}")
    if changes["tokens"] != request.tokens:
        words.append(f"--tokens-per-step {changes['tokens']}")
    if changes["host"] != fleet.host:
        words.append(_with_host(replace(fleet, host=changes["host"])))
    return " ".join(words)


def _with_host(fleet: Fleet) -> str:
    """'--hardware 8xH100+768GB'; for this machine, which has no such name, '768 GB of host memory'."""
    if fleet.here:
        return f"{fleet.host // 2**30:,} GB of host memory"
    return f"--hardware {_named(fleet, fleet.name.partition('+')[0].strip())}"


def _named(fleet: Fleet, devices: str) -> str:
    """'8xH100+768GB', as --hardware accepts it."""
    return devices + (f"+{fleet.host / 2**30:g}GB" if fleet.host else "")


def _larger_machine(sizes: Sizes, counts: Counts, fleet: Fleet, request: PlanRequest) -> list[str]:
    """Propose the next larger machine that fits: more CPU memory, more devices, or a larger device."""
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
        if lines := if_it_fits(words, sizes, counts, machine, request):
            return lines
    return []


def if_it_fits(
    words: str, sizes: Sizes, counts: Counts, fleet: Fleet, request: PlanRequest, *, slow: bool = False
) -> list[str]:
    """Return [the change, with bytes and speed of its layout], or [] if it does not fit.

    slow: also accept a longer wait than requested, which then is one of the changes.
    """
    choices = _choices(sizes, counts, fleet, request, only_fitting=True)
    fitting = [choice for choice in choices if slow or choice.waits <= request.waiting]
    if not fitting:
        return []
    best = max([choice for choice in fitting if choice.places.roomy] or fitting, key=_rank)
    rate = best.tokens_per_second
    parts = [f"{format_bytes(sum(best.places.device.values()))} a device"]
    if best.places.host:
        parts.append(f"{format_bytes(sum(best.places.host.values()))} of host memory")
    if rate is not None:
        parts.append(f"{rate:,.{0 if rate >= 10 else 1}f} tokens/s predicted")
    if best.waits > request.waiting:
        longer = f"--waiting {math.ceil(best.waits * 100) / 100:.2f}"
        words = f"{words} {longer}" if words else longer
        parts.append(f"{best.waits:.0%} of a step waits for transfers")
    if best.not_built:
        parts.append(f"not built yet: {', '.join(best.not_built)}")
    return [f"{words} ({', '.join(parts)}; {best.layout.words(counts.num_experts)})"]


def _choices(
    sizes: Sizes, counts: Counts, fleet: Fleet, request: PlanRequest, *, only_fitting: bool = False
) -> Iterator[PlanChoice]:
    rates = rates_of(fleet, request)
    parts = fleet.count * request.work.micro_batches
    documents = request.length * parts
    tried = (documents, *TOKENS) if documents > TOKENS[0] else TOKENS
    for tokens in (request.tokens,) if request.tokens else tried:
        if tokens < MIN_TOKENS * parts:
            continue
        work, tokens = replace(request.work, tokens=tokens // parts), tokens // parts * parts
        if request.aside is not None:
            work = beside(work, request.aside(work.tokens))
        for layout in _layouts(counts, fleet, request):
            places = bytes_by_place(sizes, counts, work, fleet, layout)
            if only_fitting and not places.fits:
                continue
            time = None
            if rates is not None:
                of_work = replace(request, work=replace(request.work, aside=work.aside))
                time = seconds_of(sizes, counts, fleet, rates, layout, of_work, tokens)
            whole = work.tokens >= request.length
            yield PlanChoice(layout, tokens, places, time, tuple(layout.not_built()), whole)


def rates_of(fleet: Fleet, request: PlanRequest) -> Rates | None:
    """Return the devices' rates; None if unknown, so that the plan has no seconds."""
    if request.rates or fleet.device is None:
        return request.rates
    return of_device(fleet.device, triton=installed() or not fleet.here)  # another machine's torch brings it


def seconds_of(
    sizes: Sizes,
    counts: Counts,
    fleet: Fleet,
    rates: Rates,
    layout: Layout,
    request: PlanRequest,
    tokens: int,
    imbalance: float = IMBALANCE,
) -> Seconds:
    """Return the seconds of a step of `tokens` tokens in a layout."""
    second, beside_it = 0.0, request.work.aside
    if beside_it is not None and beside_it.counts is not None:
        own, part = request.second_rates or rates, tokens // (fleet.count * request.work.micro_batches)
        second = asking(beside_it.counts, own, tokens=part, length=request.length)
    step = Step(
        tokens,
        request.length,
        _trained(sizes, counts, request.work, layout.sharing),
        every_weight=request.work.rank is None,
        micro_batches=request.work.micro_batches,
        adapted=_adapted(sizes, counts),
        orthogonal=sizes.orthogonal_flop if request.work.optimizer == "muon" else 0.0,
    )
    time = seconds(counts, fleet, rates, layout, step, imbalance=imbalance, second=second)
    answers = request.work.answers
    if answers is None or answers.step is None:
        return time
    return replace(time, rollout=_rollout(sizes, counts, fleet, rates, layout, request.work, tokens, time))


def _rollout(
    sizes: Sizes,
    counts: Counts,
    fleet: Fleet,
    rates: Rates,
    layout: Layout,
    work: Work,
    tokens: int,
    time: Seconds,
) -> Rollout:
    """Return the seconds of a step with rewards. time: of a pass of `tokens` on the fleet, and an update.

    Devices share the answers, unless they share weights: then all sample every answer together.
    """
    assert work.answers is not None and work.answers.step is not None
    of, n = work.answers.step, max(fleet.count, work.processes)
    alike = layout.sharing > 1 or layout.sharded or layout.rest == "peers"
    trained = 0 if work.rank is None else sum(_trained(sizes, counts, work, 1).values())
    prompt = asking(counts, rates, tokens=of.prompts * of.prompt_tokens, length=of.prompt_tokens)
    sampling = sampling_seconds(
        counts,
        rates,
        work.answers if alike else work.answers.shared(n),
        cached=sizes.cached,
        trained=trained,
        number_bytes=sizes.compute_bytes,
        prefill=prompt / (1 if alike else n),
    )
    passes = math.ceil(of.trained / (tokens * n / fleet.count))
    return Rollout(sampling, time.of_passes(passes), of)


def _adapted(sizes: Sizes, counts: Counts) -> float:
    """Return the share of linear layers' widths that adapters have: A and B are as wide as their layer."""
    widths = counts.widths.into + counts.widths.out
    return min(1.0, sizes.dense_per_rank / widths) if widths else 0.0


def _trained(sizes: Sizes, counts: Counts, work: Work, split: int) -> dict[str, int]:
    """Return the parameters that the fullest device trains."""
    if work.rank is None:
        return {"dense": sizes.elements}
    experts = sizes.experts_per_rank * (work.experts_rank or work.rank)
    return {"dense": sizes.dense_per_rank * work.rank, "experts": int(experts * fullest_share(counts, split))}


def _layouts(counts: Counts, fleet: Fleet, request: PlanRequest) -> Iterator[Layout]:
    """Yield every layout that this fleet can have."""
    recomputes = request.recomputes if request.wish.recompute == "auto" else (request.wish.recompute,)
    facts = facts_of(fleet, counts, every_weight=request.work.rank is None, packs=request.packs)
    for layout in layouts(request.wish, facts):
        layout = with_buffers(layout, counts, fleet)
        if layout is not None:
            yield from (layout.but(recompute=recompute) for recompute in recomputes)


def facts_of(fleet: Fleet, counts: Counts, *, every_weight: bool, packs: str = "") -> Facts:
    """Return the facts that determine possible layouts, for machines that may not be here."""
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
        frozen=counts.frozen,
        packs=packs,
    )


def _built(choice: PlanChoice) -> bool:
    return not choice.not_built


def _speed(choice: PlanChoice) -> float:
    """Return tokens per second; without rates of the device, simply the tokens."""
    return choice.tokens_per_second or float(choice.tokens)


def _rank(choice: PlanChoice) -> tuple[bool, bool, float]:
    return choice.whole, _built(choice), _speed(choice)


def _over(choice: PlanChoice) -> float:
    """Return bytes over usable bytes, for the fuller memory."""
    device = sum(choice.places.device.values()) / max(1, choice.places.device_usable)
    host = sum(choice.places.host.values()) / max(1, choice.places.host_usable)
    return max(device, host)


def _halves(rank: int) -> Sequence[int]:
    return [rank >> shift for shift in range(1, rank.bit_length())]
