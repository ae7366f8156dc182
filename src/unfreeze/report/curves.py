"""Scores of tasks while a run trained (--watch.eval): a curve with its interval for each measure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from unfreeze.core.schema import Event, ScoreEvent
from unfreeze.report.events import of_kind
from unfreeze.report.page import Figure, render
from unfreeze.report.pictures import bands, points_json

if TYPE_CHECKING:
    from unfreeze.report.run import RunFolder

SIZES = ((1100, 320), (350, 250))
HEAD = ("task", "items", "first", "last", "best")


def measure_name(event: ScoreEvent) -> str:
    """Return 'rows:test.jsonl, exact': the task, and what is measured if that does not say it."""
    task, measure = event["task"], event["measure"]
    return task if task.endswith(f":{measure}") else f"{task}, {measure}"


def score_value(event: ScoreEvent) -> str:
    """Return '0.425 (0.3 to 0.55)'; 'none' if no item has a score."""
    if event["value"] is None or event["low"] is None or event["high"] is None:
        return "none"
    return f"{event['value']:.4g} ({event['low']:.3g} to {event['high']:.3g})"


def by_measure(events: Sequence[Event]) -> dict[str, list[ScoreEvent]]:
    """Return measure -> its events with a value, in order."""
    measures: dict[str, list[ScoreEvent]] = {}
    for event in of_kind(events, ScoreEvent):
        if event["value"] is not None:
            measures.setdefault(measure_name(event), []).append(event)
    return measures


def best_score(events: Sequence[ScoreEvent]) -> ScoreEvent | None:
    """Return the best event of a measure after step 0, the first of equals; None without any."""
    sign = -1.0 if events and events[0]["higher_is_better"] else 1.0
    after = [event for event in events if event["step"] > 0]
    return min(after, key=lambda event: sign * (event["value"] or 0.0), default=None)


def chosen_by(events: Sequence[Event]) -> ScoreEvent | None:
    """Return the score that chose the best step; None if the held-out loss did."""
    return best_score([event for each in by_measure(events).values() for event in each if event["chooses"]])


def curves_section(run: RunFolder) -> Markup:
    """Section with a table and a picture for each measure; "" without scores."""
    measures = by_measure(run.events)
    if not measures:
        return Markup("")
    rows: list[tuple[str, ...]] = []
    figures: list[Figure] = []
    for name, events in measures.items():
        best = best_score(events)
        at = "–" if best is None else f"{score_value(best)} at step {best['step']:,}"
        lower = "" if events[0]["higher_is_better"] else ", lower is better"
        rows.append(
            (
                f"{name}{lower}",
                f"{events[-1]['items']:,}",
                score_value(events[0]),
                score_value(events[-1]),
                at,
            )
        )
        if len(events) > 1:
            figures.append(_figure(name, events))
    note = "Intervals: bootstrap over items, 95 %. They are wider than those of a difference: unfreeze eval."
    return render("curves.html", note=note, head=HEAD, rows=rows, figures=figures)


def _figure(name: str, events: Sequence[ScoreEvent]) -> Figure:
    steps = [float(event["step"]) for event in events]
    values, low, high = ([event[end] or 0.0 for event in events] for end in ("value", "low", "high"))
    words = f"{score_value(events[0])} at step {events[0]['step']:,}, {score_value(events[-1])} at the last."
    pictures = [bands([(steps, values, low, high)], f"{name} by step: {words}", size) for size in SIZES]
    return Figure(name, words, pictures, series=points_json({name: (steps, values)}))
