"""Forecast of a run's time from the events of its first steps, and what became of it.

With p the mean cycle of a plain step, v a validation (with the answers to the user's prompts), s a save:

    left = p · steps to come + v · validations to come + s · saves to come + the answers at the end

A cycle is the time between two train events. It is plain if nothing else was reported in between. The first
two cycles of a session are left out: they compile. What was slow before the forecast is in the time that has
passed, and not expected again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unfreeze.core.schema import (
    EndEvent,
    EvalEvent,
    Event,
    ForecastEvent,
    GapEvent,
    PlanEvent,
    SaveEvent,
    StartEvent,
    TrainEvent,
)
from unfreeze.core.units import format_seconds
from unfreeze.report.events import E, last, of_kind

WARM = 2  # cycles of a session that may compile
SECONDS_PER_BYTE = 2e-9
"""Of a save that was not measured yet: 0.5 GB/s, as of a disk on a network."""


@dataclass(frozen=True)
class Rhythm:
    """When a run validates and saves. steps: of the whole run; every, minutes: 0 is never."""

    steps: int
    validate_every: int = 0
    save_every: int = 0
    save_minutes: float = 0.0
    validates: bool = False

    def validations(self, step: int) -> int:
        """Validations after `step`; the last step has one."""
        if not self.validates:
            return 0
        between = self._multiples(step, self.validate_every)
        at_last = self.validate_every and self.steps % self.validate_every == 0
        return between + (0 if at_last else 1) if step < self.steps else 0

    def saves(self, step: int, seconds: float) -> int:
        """Saves from `step` on in so many seconds; its own is still to come, and the last step has one.

        A validation saves too, if its loss is the lowest so far: of a model that learns, each.
        """
        by_step = self._multiples(step - 1, self.save_every)
        by_time = int(seconds / (60 * self.save_minutes)) if self.save_minutes else 0
        return max(1, by_step, by_time) + self.validations(step)

    def _multiples(self, step: int, every: int) -> int:
        return self.steps // every - step // every if every else 0


@dataclass(frozen=True)
class Forecast:
    """seconds: from the session's start event to the end event; left: from the last event on."""

    seconds: float
    left: float
    per_step: float
    validation: float
    saving: float


def forecast(events: Sequence[Event], rhythm: Rhythm) -> Forecast | None:
    """Forecast from the events of the session so far. None with fewer than WARM + 2 steps in it."""
    session = session_of(events)
    trained = of_kind(session, TrainEvent)
    plain = plain_cycles(session)
    if not plain:
        return None
    per_step, step = sum(plain) / len(plain), trained[-1]["step"]
    during = [event for event in of_kind(events, GapEvent) if event["when"] == "during"]
    validation = _mean(events, EvalEvent) + (_mean(during, GapEvent) if during else 0.0)
    validations = rhythm.validations(step) * validation
    steps = (rhythm.steps - step) * per_step
    saving = rhythm.saves(step, steps + validations) * _save(events)
    answers = [event.get("seconds", 0.0) for event in of_kind(events, GapEvent) if event["when"] == "before"]
    left = steps + validations + saving + sum(answers[:1])
    passed = session[-1]["time"] - session[0]["time"]
    return Forecast(passed + left, left, per_step, validations, saving)


def session_of(events: Sequence[Event]) -> Sequence[Event]:
    """Events from the last start event on."""
    starts = [place for place, event in enumerate(events) if event["kind"] == "start"]
    return events[starts[-1] :] if starts else []


def plain_cycles(session: Sequence[Event]) -> list[float]:
    """Seconds between neighbouring train events with nothing between them, without the first WARM."""
    follows = [*(event["kind"] for event in session[2:]), ""]
    cycles = [
        after["time"] - before["time"]
        for (before, after), then in zip(pairwise(session), follows, strict=False)
        # a step that met a new kind of inputs compiled, and reports its kernels
        if before["kind"] == "train" and after["kind"] == "train" and then != "kernels"
    ]
    trained = sum(event["kind"] == "train" for event in session)
    # cycles with something between are no longer in the list: those of the first steps report a receipt
    early = max(0, WARM - (trained - 1 - len(cycles)))
    return cycles[early:]


def _mean(events: Sequence[Event], kind: type[E]) -> float:
    """Mean seconds of events of a kind, without the first if there are more: it may compile. 0.0: none."""
    seconds = [float(event.get("seconds") or 0.0) for event in of_kind(events, kind)]
    later = seconds[1:] or seconds
    return sum(later) / len(later) if later else 0.0


def _save(events: Sequence[Event]) -> float:
    """Seconds of a save: measured, else by its bytes in the plan."""
    if of_kind(events, SaveEvent):
        return _mean(events, SaveEvent)
    plan = last(events, PlanEvent)
    return SECONDS_PER_BYTE * (plan.get("save_bytes", 0) if plan else 0)


def forecast_words(event: ForecastEvent) -> str:
    """'forecast at step 50: 12 min in all, 9 min to go (0.42 s a step); 0.35 USD'."""
    usd = event.get("usd")
    price = f"; {usd:,.2f} USD" if usd is not None else ""
    return (
        f"forecast at step {event['step']:,}: {format_seconds(event['seconds'])} in all,"
        f" {format_seconds(event['left'])} to go ({format_seconds(event['per_step'])} a step){price}"
    )


def forecast_and_actual(events: Sequence[Event]) -> str:
    """'12 min; it took 12 min 20 s, 3 % more', once the session of the forecast ended; "" without one."""
    known = last(events, ForecastEvent)
    if known is None:
        return ""
    words = format_seconds(known["seconds"])
    actual = actual_seconds(events)
    if actual is None or not known["seconds"]:
        return f"{words}; made at step {known['step']:,}"
    off = actual / known["seconds"] - 1
    more = "as forecast" if abs(off) < 0.005 else f"{abs(off):.0%} {'more' if off > 0 else 'less'}"
    return f"{words}; made at step {known['step']:,}. It took {format_seconds(actual)}, {more}"


def actual_seconds(events: Sequence[Event]) -> float | None:
    """Seconds from start event to end event of the session that made the forecast.

    None if it did not come to the run's end.
    """
    places = [place for place, event in enumerate(events) if event["kind"] == "forecast"]
    if not places:
        return None
    begun = last(events[: places[-1]], StartEvent)
    later = events[places[-1] :]
    end = last(later, EndEvent)
    if begun is None or end is None or end.get("reason") != "done" or last(later, StartEvent) is not None:
        return None
    return end["time"] - begun["time"]
