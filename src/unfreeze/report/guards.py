"""The guards of a run: setting, result and state of each, computed from the run's events and config.

Counts that the report's pictures also show (peak memory, loss, gradient norm, supervised tokens, experts) are
made once, by the public functions here and in balance.py. Row, picture and caption all use them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Literal, NamedTuple

from unfreeze.core.process import BESIDE, BESIDE_ON_GPU, COMPILED, WORKSPACES
from unfreeze.core.schema import DataEvent, GapEvent, ReceiptEvent, TrainEvent
from unfreeze.core.units import format_bytes, plural
from unfreeze.report.events import ENOUGH_STEPS, last, number, of_kind, series, warnings
from unfreeze.report.learnt import training
from unfreeze.report.run import RunFolder
from unfreeze.report.tables import left_out, standing_still

GUARD_HEAD = ("guard", "state", "setting", "result", "what to do")
MANY_TOKENS = 0.2  # share of tokens beyond the policy's bounds; above it most of an update is cut away
MOSTLY = 0.9  # share of clipped steps after warm-up; above it clipping decides nearly every update's size
GAP_FLOAT32 = 1e-4  # nats at any token; see evaluate/gap.py
# nats: mean, and at one token. The largest gaps by rounding alone with tiny-k2 (docs/reference/events.md),
# and the limits: about three times those, as another model's logits can be larger
ROUNDING_BFLOAT16 = (0.008, 0.3)
GAP_BFLOAT16 = (0.024, 1.0)

# allowed difference between planned and measured: docs/measured/plan_checked.md
OFF_BYTES, OFF_SECONDS = 0.10, 0.25

State = Literal["ok", "look", "fault"]
"""ok: nothing to do. look: the run continues, but the user should know. fault: the run's numbers cannot be
trusted, or it was refused."""


class GuardRow(NamedTuple):
    """A row of the table of guards: name, state, setting, result, remedy."""

    guard: str
    state: State
    setting: str
    result: str
    remedy: str = ""


REMEDY = {
    "Memory plan": "Raise --micro-batches or lower --tokens-per-step: a pass then holds fewer tokens.",
    "Planned peak": "Nothing to do while the peak is below the usable memory: only the forecast was off.",
    "Planned seconds": "Nothing to do: only the forecast was off; other programs may have taken time.",
    "Data rows": "Correct the rows named under Data; --data.on-bad-row error stops at the first.",
    "Receipt": "Check that the learning rate is not 0 and that rows have answers: unfreeze data show.",
    "Receipt of the first step": "Don't use the result: a requested part has not learnt.",
    "Loss and gradients finite": "Lower --learning-rate, and look at the rows that suspects.jsonl names.",
    "Loss and gradient spikes": "Nothing to do if the loss recovered; else lower --learning-rate.",
    "Clipped tokens": "Take fewer --updates or a lower --learning-rate.",
    "Gradient norm clipped": "Try another --learning-rate; a higher --optimizer.clip cuts less.",
    "Supervised tokens": "Check the supervised tokens with unfreeze data show: such a step teaches nothing.",
    "Expert load": "Nothing to do while the answers are good; else broader data helps.",
    "Sampler against trainer": (
        "Probably bfloat16 rounding. To be sure, run a few steps with --dtype float32; if it is amber there"
        " too, report it."
    ),
    "Expert op against the reference": (
        "The kernel is wrong on this device: unfreeze doctor --gpu (--ops on a CPU) finds and bans it. Then"
        " train again."
    ),
    "Trackers": "Nothing to do for the run: its numbers are in events.jsonl.",
}
"""Guard -> remedy for the user if it is not ok, in one sentence."""


def guard_rows(run: RunFolder) -> list[GuardRow]:
    """One row per guard that this run had."""
    parts: tuple[Callable[[RunFolder], GuardRow | None], ...] = (
        _plan,
        _planned_peak,
        _planned_seconds,
        _data,
        _receipt,
        _expert_op,
        _finite,
        _spikes,
        _clipping,
        _policy_clipping,
        _supervised,
        _experts,
        _gap,
        _trackers,
    )
    rows = [row for part in parts if (row := part(run)) is not None]
    return [row if row.state == "ok" else row._replace(remedy=REMEDY[row.guard]) for row in rows]


def _listed(messages: list[tuple[int, str]], shown: int = 3) -> str:
    more = f"; and {len(messages) - shown} more, see events.jsonl" if len(messages) > shown else ""
    return "; ".join(f"step {step:,}: {words}" for step, words in messages[:shown]) + more


def peak_memory(run: RunFolder) -> tuple[list[int], list[float]]:
    """(steps, peak bytes so far)."""
    return series(run.events, "train", "peak_bytes")


def clip_limit(run: RunFolder) -> float | None:
    """Gradient norm above which a step is clipped; None if clipping is off."""
    return number(run.config.get("optimizer.clip")) or None


def clipped(run: RunFolder) -> list[int]:
    """Steps whose gradient norm was above the limit."""
    limit, (steps, norms) = clip_limit(run), series(run.events, "train", "grad_norm")
    return [step for step, norm in zip(steps, norms, strict=True) if limit is not None and norm > limit]


def spikes(run: RunFolder) -> list[tuple[int, str]]:
    """List (step, words) of the spike guard (train/guards.py).

    Its words are in the `warning` field of the step's train event.
    """
    return [(event["step"], words) for event in run.train if (words := event.get("warning"))]


def broken(run: RunFolder) -> list[tuple[int, str]]:
    """(step, words) for steps with an error, or with a non-finite loss or gradient norm."""
    return [(event["step"], words) for event in run.train if (words := _broken(event))]


def _broken(event: TrainEvent) -> str:
    if error := event.get("error"):
        return error
    # only null counts: an older run may not have measured it
    values = {"loss": event.get("loss", 0.0), "gradient norm": event.get("grad_norm", 0.0)}
    names = [name for name, value in values.items() if value is None]
    return f"{' and '.join(names)} not finite" if names else ""


def unsupervised(run: RunFolder) -> list[int]:
    """Steps without a supervised token."""
    steps, counts = series(run.events, "train", "supervised_tokens")
    return [step for step, count in zip(steps, counts, strict=True) if count == 0]


def _plan(run: RunFolder) -> GuardRow | None:
    plan = run.plan
    if plan is None or "total" not in plan or "usable" not in plan:
        return None
    total, usable = plan["total"], plan["usable"]
    fits = plan.get("fits", total <= usable)
    process = plan["hardware"].get("process", 0) if "hardware" in plan else 0
    beside = f" beside the process's {format_bytes(process)}" if process else ""
    peaks = peak_memory(run)[1]
    measured = f", peak of all {format_bytes(max(peaks))}" if peaks else ""
    words = (
        f"planned {format_bytes(total)}{beside}{measured}"
        if fits
        else f"planned {format_bytes(total)}: refused"
    )
    state = "fault" if not fits else "look" if peaks and max(peaks) > usable + process else "ok"
    return GuardRow("Memory plan", state, f"{format_bytes(usable)} usable", words)


def _planned_peak(run: RunFolder) -> GuardRow | None:
    """Compare the planned bytes of a step with the measured peak.

    On a CPU the peak is that of the process: it includes earlier memory and up to COMPILED; on a GPU up to
    WORKSPACES. Less is fine.
    """
    plan, peaks = run.plan or {}, peak_memory(run)[1]
    if not peaks or "terms" not in plan or "hardware" not in plan:
        return None
    planned = sum(plan["terms"].values())
    lowest = highest = planned + plan["hardware"].get("process", 0)
    gpu = plan["hardware"].get("kind") == "cuda"
    highest += WORKSPACES if gpu else COMPILED
    measured = max(peaks)
    off = measured > highest * (1 + OFF_BYTES)
    expected = f"between {format_bytes(lowest)} and {format_bytes(highest)}"
    process = plan["hardware"].get("process", 0)
    parts = [f"{format_bytes(planned)} for a step"]
    parts += [f"{format_bytes(process)} for the process itself"] * (process > 0)
    parts += [BESIDE_ON_GPU if gpu else BESIDE]
    return GuardRow(
        "Planned peak",
        "look" if off else "ok",
        f"{expected}, at most {OFF_BYTES:.0%} more",
        f"peak {format_bytes(measured)}; planned {' + '.join(parts)}",
    )


def _planned_seconds(run: RunFolder) -> GuardRow | None:
    """Compare the planned seconds of a step with the median step, without the first, which compiles.

    The state is "look" only if the rates were measured on this machine.
    """
    plan, taken = run.plan or {}, series(run.events, "train", "seconds")[1][1:]
    each = plan.get("seconds_per_pass")
    if not each or not taken:
        return None
    planned = each * (number(run.config.get("memory.micro_batches")) or 1)
    measured, rates = statistics.median(taken), plan.get("rates", "")
    off = abs(planned / measured - 1) > OFF_SECONDS if measured else True
    compared = rates.startswith("measured on this machine")
    return GuardRow(
        "Planned seconds",
        "look" if off and compared else "ok",
        f"{OFF_SECONDS:.0%}, rates {rates}" if compared else f"not compared: rates {rates or 'unknown'}",
        f"planned {planned:.2f} s a step, measured {measured:.2f} s",
    )


def _data(run: RunFolder) -> GuardRow | None:
    account = last(run.events, DataEvent)
    if account is None:
        return None
    setting = ", ".join(
        f"{name} {run.config[name]}" for name in ("data.on_bad_row", "data.truncation") if name in run.config
    )
    counts = {name: account.get(name) for name in ("bad", "dropped", "truncated", "duplicates")}
    counted = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count is not None)
    words = f"{plural(account.get('rows', 0), 'row')}: {counted}"
    return GuardRow("Data rows", "look" if counts["bad"] else "ok", setting or "always", words)


def _receipt(run: RunFolder) -> GuardRow | None:
    if not run.groups:
        return (
            GuardRow("Receipt", "look", "always", "none: no gradient has moved a weight so far")
            if run.train
            else None
        )
    still, trained = (
        standing_still(run.groups),
        [name for name, group in run.groups.items() if group.get("trained")],
    )
    out = left_out(run.exceptions)
    faults = [*([f"requested but did not move: {', '.join(still)}"] if still else []), *out]
    words = "; ".join(faults) or f"every matrix that got a gradient moved: {', '.join(trained)}"
    return GuardRow("Receipt of the first step", "fault" if faults else "ok", "always", words)


def _expert_op(run: RunFolder) -> GuardRow | None:
    event = last(run.events, ReceiptEvent)
    compared = None if event is None else event.get("expert_op")
    if compared is None or "error" not in compared:
        return None
    error = compared["error"]
    off = "not finite" if error is None else f"off by {error:.1e} of the norm"
    words = (
        f"{plural(compared['rows'], 'row')} of {compared['layer']}: {off}, at most"
        f" {compared['limit']:g} is rounding"
    )
    state = "ok" if error is not None and error <= compared["limit"] else "fault"
    return GuardRow("Expert op against the reference", state, "always", words)


def _finite(run: RunFolder) -> GuardRow | None:
    if not run.train:
        return None
    faults = broken(run)
    words = _listed(faults) or f"finite in {plural(len(run.train), 'step')}"
    return GuardRow("Loss and gradients finite", "fault" if faults else "ok", "always", words)


def _spikes(run: RunFolder) -> GuardRow | None:
    if "watch.on_spike" not in run.config:
        return None
    messages = spikes(run)
    words = _listed(messages) or f"none in {plural(len(run.train), 'step')}"
    return GuardRow(
        "Loss and gradient spikes", "look" if messages else "ok", str(run.config["watch.on_spike"]), words
    )


def _policy_clipping(run: RunFolder) -> GuardRow | None:
    """Compare the share of tokens that the policy's bounds cut, over all updates after a rollout's first."""
    shares = [share for share in series(run.events, "train", "clip_fraction")[1] if share]
    if not shares:
        return None
    mean = statistics.mean(shares)
    state = "look" if mean > MANY_TOKENS else "ok"
    return GuardRow(
        "Clipped tokens", state, f"at most {MANY_TOKENS:.0%}", f"{mean:.0%} where any were clipped"
    )


def _clipping(run: RunFolder) -> GuardRow | None:
    norms = series(run.events, "train", "grad_norm")[1]
    if number(run.config.get("optimizer.clip")) is None or not norms:
        return None
    limit, count = clip_limit(run), len(clipped(run))
    if limit is None:
        return GuardRow("Gradient norm clipped", "ok", "off", f"largest {max(norms):.3g}")
    words = f"in {count:,} of {plural(len(norms), 'step')}, largest {max(norms):.3g}"
    # common in short runs; worth a look only if nearly every step is clipped and the loss does not fall
    warm = _warm_up(run)
    after = [step for step in series(run.events, "train", "grad_norm")[0] if step > warm]
    mostly = len([step for step in clipped(run) if step > warm]) > MOSTLY * len(after)
    judged = len(after) >= ENOUGH_STEPS  # with fewer steps the loss need not have fallen yet
    fell = training(run)
    if judged and mostly and fell is not None and not fell.clear:
        cut = f"{words}: nearly every update is cut, and the loss did not fall"
        return GuardRow("Gradient norm clipped", "look", f"at {limit:g}", cut)
    return GuardRow("Gradient norm clipped", "ok", f"at {limit:g}", words)


def _warm_up(run: RunFolder) -> int:
    """Last step before the learning rate reaches its peak."""
    steps, rates = series(run.events, "train", "learning_rate")
    return steps[rates.index(max(rates))] - 1 if rates else 0


def _supervised(run: RunFolder) -> GuardRow | None:
    counts = series(run.events, "train", "supervised_tokens")[1]
    if not counts:
        return None
    empty = unsupervised(run)
    words = (
        f"none in {len(empty):,} of {plural(len(counts), 'step')}, first step {empty[0]:,}"
        if empty
        else f"at least {min(counts):,.0f} in every step"
    )
    return GuardRow("Supervised tokens", "look" if empty else "ok", "always", words)


def _experts(run: RunFolder) -> GuardRow | None:
    balance = run.balance
    if balance is None:
        return None
    prefix = "expert load: "
    watched = [
        (step, words.removeprefix(prefix)) for step, words in warnings(run.events) if words.startswith(prefix)
    ]
    lines = [_listed(watched)] if watched else []
    lines += [balance.unused_words()] if balance.unused else []
    lines += [f"layer {balance.shown}: {balance.gone_words()}"] if balance.gone[balance.shown] else []
    look = bool(lines) or balance.has_risen
    lines = lines or ["no expert without tokens or with most of them"]
    lines += [f"max violation {balance.rise_words()}, mean of the layers"] if len(balance.columns) > 1 else []
    return GuardRow("Expert load", "look" if look else "ok", "always", "; ".join(lines))


def _gap(run: RunFolder) -> GuardRow | None:
    """The gap between sampler and trainer. In float32 they differ only by the order of sums.

    In bfloat16 rounding can hide a fault, so a large gap is only "look", not "fault".
    """
    gaps = series(run.events, "gap", "logprob_gap_max")[1]
    if not gaps:
        return None
    means = series(run.events, "gap", "logprob_gap_mean")[1]
    mean = f"mean {max(means):.1g}, " if means else ""
    times = "once" if len(gaps) == 1 else f"{len(gaps):,} times"
    words = f"{mean}at the worst token {max(gaps):.1g} nats; measured {times}"
    gap_events = of_kind(run.events, GapEvent)
    gap_warnings = [(event["step"], line) for event in gap_events if (line := event.get("warning"))]
    words += f"; {_listed(gap_warnings)}" if gap_warnings else ""
    if run.config.get("memory.dtype") == "float32":
        setting, state = (
            f"{GAP_FLOAT32:g} nats at a token (float32)",
            "fault" if max(gaps) > GAP_FLOAT32 else "ok",
        )
    else:
        on_average, at_one = GAP_BFLOAT16
        setting = f"mean {on_average:g}, {at_one:g} nats at a token (bfloat16)"
        state = "look" if max(gaps) > at_one or max(means, default=0.0) > on_average else "ok"
    return GuardRow("Sampler against trainer", "fault" if gap_warnings else state, setting, words)


def _trackers(run: RunFolder) -> GuardRow | None:
    names = run.config.get("watch.track")
    if not names:
        return None
    failures = [(step, words) for step, words in warnings(run.events) if words.startswith("track ")]
    return GuardRow(
        "Trackers",
        "look" if failures else "ok",
        ", ".join(map(str, names)),
        _listed(failures) or "no failure",
    )
