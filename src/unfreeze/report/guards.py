"""The guards of a run, how each was set, and what it said: computed from the run's own events and config."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unfreeze.core.units import format_bytes
from unfreeze.report.events import last, number, of_kind, series, warnings
from unfreeze.report.run import Run
from unfreeze.report.tables import standing_still

GUARD_HEAD = ("guard", "set to", "said")


class GuardRow(NamedTuple):
    """What watched, how it was set, what it said; alarm: something that the user should look at."""

    guard: str
    setting: str
    said: str
    alarm: bool = False


def guard_rows(run: Run) -> list[GuardRow]:
    """One row per guard that this run had."""
    parts: tuple[Callable[[Run], GuardRow | None], ...] = (
        _plan, _data, _receipt, _finite, _spikes, _clipping, _supervised, _experts, _gap, _trackers,
    )  # fmt: skip
    return [row for part in parts if (row := part(run)) is not None]


def _all_said(said: list[tuple[int, str]], shown: int = 3) -> str:
    more = f"; and {len(said) - shown} more, see events.jsonl" if len(said) > shown else ""
    return "; ".join(f"step {step:,}: {words}" for step, words in said[:shown]) + more


def _plan(run: Run) -> GuardRow | None:
    total, usable = number(run.plan.get("total")), number(run.plan.get("usable"))
    if total is None or usable is None:
        return None
    fits = bool(run.plan.get("fits", total <= usable))
    process = number((run.plan.get("hardware") or {}).get("process")) or 0
    beside = f" beside the process's {format_bytes(process)}" if process else ""
    peaks = series(run.events, "train", "peak_bytes")[1]
    measured = f", peak of all {format_bytes(max(peaks))}" if peaks else ""
    words = f"planned {format_bytes(total)}{beside}{measured}" if fits else f"planned {format_bytes(total)}: refused"
    return GuardRow("Memory plan", f"{format_bytes(usable)} usable", words, alarm=not fits)


def _data(run: Run) -> GuardRow | None:
    account = last(run.events, "data")
    if account is None:
        return None
    setting = ", ".join(f"{field} {run.config[field]}" for field in ("on_bad_row", "truncation") if field in run.config)
    counts = {field: int(number(account.get(field)) or 0) for field in ("bad", "dropped", "truncated", "duplicates")}
    said = ", ".join(f"{count:,} {field}" for field, count in counts.items() if field in account)
    return GuardRow("Data rows", setting or "always", f"{int(number(account.get('rows')) or 0):,} rows: {said}", alarm=bool(counts["bad"]))


def _receipt(run: Run) -> GuardRow | None:
    if not run.groups:
        return None
    still, asked = standing_still(run.groups), [name for name, group in run.groups.items() if group.get("trained")]
    said = f"asked for, and not moved: {', '.join(still)}" if still else f"all asked for moved: {', '.join(asked)}"
    return GuardRow("Receipt of the first step", "always", said, alarm=bool(still))


def _finite(run: Run) -> GuardRow | None:
    if not run.train:
        return None
    broken = [(event["step"], str(event["error"])) for event in run.train if event.get("error")]
    said = _all_said(broken) if broken else f"finite in all {len(run.train):,} steps"
    return GuardRow("Loss and gradients finite", "always", said, alarm=bool(broken))


def _spikes(run: Run) -> GuardRow | None:
    """The spike guard of train/guards.py: it speaks in the `warning` of the step's train event."""
    if "on_spike" not in run.config:
        return None
    said = [(event["step"], str(event["warning"])) for event in run.train if event.get("warning")]
    words = _all_said(said) or f"none in {len(run.train):,} steps"
    return GuardRow("Loss and gradient spikes", str(run.config["on_spike"]), words, alarm=bool(said))


def _clipping(run: Run) -> GuardRow | None:
    limit, norms = number(run.config.get("clip")), series(run.events, "train", "grad_norm")[1]
    if limit is None or not norms:
        return None
    if limit == 0:
        return GuardRow("Gradient norm clipped", "off", f"largest {max(norms):.3g}")
    clipped = sum(1 for norm in norms if norm > limit)
    return GuardRow("Gradient norm clipped", f"at {limit:g}", f"in {clipped:,} of {len(norms):,} steps, largest {max(norms):.3g}")


def _supervised(run: Run) -> GuardRow | None:
    steps, counts = series(run.events, "train", "supervised_tokens")
    if not counts:
        return None
    empty = [step for step, count in zip(steps, counts, strict=True) if count == 0]
    said = f"none in {len(empty):,} of {len(counts):,} steps, first step {empty[0]:,}" if empty else f"{min(counts):,.0f} at least in every step"
    return GuardRow("Supervised tokens", "always", said, alarm=bool(empty))


def _experts(run: Run) -> GuardRow | None:
    if not any(event.get("expert_load") for event in run.train):
        return None
    said = [(step, words.removeprefix("expert load: ")) for step, words in warnings(run.events) if words.startswith("expert load: ")]
    return GuardRow("Expert load", "always", _all_said(said) or "no expert found dead or overloaded", alarm=bool(said))


def _gap(run: Run) -> GuardRow | None:
    steps, gaps = series(run.events, "gap", "logprob_gap_max")
    if not gaps:
        return None
    said = [(event["step"], str(event["warning"])) for event in of_kind(run.events, "gap") if event.get("warning")]
    words = _all_said(said) or f"at most {max(gaps):.1g} nats, {len(steps):,} times measured"
    return GuardRow("Sampler against trainer", "1e-4 nats in float32; shown in bfloat16", words, alarm=bool(said))


def _trackers(run: Run) -> GuardRow | None:
    names = run.config.get("track")
    if not names:
        return None
    said = [(step, words) for step, words in warnings(run.events) if words.startswith("track ")]
    return GuardRow("Trackers", ", ".join(map(str, names)), _all_said(said) or "no failure", alarm=bool(said))
