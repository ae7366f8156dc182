"""The table of an evaluation as plain JSON: scores with intervals, and differences paired by item.

    {"models": ["base", "runs/mine"],
     "tasks": [{"task": "rows:test.jsonl:exact", "measure": "exact", "unit": "share", "items": 40,
                "higher_is_better": true,
                "scores": [{"model": "base", "value": 0.4, "low": 0.25, "high": 0.55, "items": 40}, …],
                "changes": [{"before": "base", "after": "runs/mine", "items": 40, "value": 0.2, "low": 0.05,
                             "high": 0.35, "verdict": "better"}], "grid": …, "notes": […]},
               {"task": "…", "error": "…"}]}

report/scores.py shows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unfreeze.core.errors import ConfigError
from unfreeze.evaluate.bootstrap import FEWEST, Interval, Items, difference, interval, items_of
from unfreeze.evaluate.tasks import Scores

BETTER, WORSE, SAME = "better", "worse", "no difference"


def measure_record(
    task: str, by_model: Mapping[str, Scores], pairs: Sequence[tuple[str, str]], *, draws: int, seed: int
) -> dict[str, Any]:
    """Return one measure of one task. pairs: (before, after) of models that are compared."""
    one = next(iter(by_model.values()))
    scores: list[dict[str, Any]] = []
    for model, each in by_model.items():
        items = _items(each, range(len(each.items)))
        scores.append({"model": model, **_interval(items, draws, seed), "failed": dict(each.failed)})
    changes = [
        {
            "before": before,
            "after": after,
            **change(by_model[before], by_model[after], draws=draws, seed=seed),
        }
        for before, after in pairs
        if before in by_model and after in by_model
    ]
    notes = {
        f"{model}: {note}" if len(by_model) > 1 else note: None
        for model, each in by_model.items()
        for note in [*each.notes, *_copies(each), *_not_finite(each)]
    }
    return {
        "task": task,
        "measure": one.measure,
        "unit": one.unit,
        "higher_is_better": one.higher_is_better,
        "items": max(len(each.items) for each in by_model.values()),
        "scores": scores,
        "changes": changes,
        "grid": grid_of(by_model),
        "notes": list(notes),
    }


def change(before: Scores, after: Scores, *, draws: int, seed: int) -> dict[str, Any]:
    """Return after - before over the items that both have a value for, with its interval and a verdict.

    verdict  "better" or "worse" where the interval does not hold 0, "no difference" where it does; else why
             nothing can be said
    """
    if before.basis != after.basis:
        return {"items": 0, "verdict": "not comparable: other tokens"}
    of_before = {name: i for i, name in enumerate(before.items) if _finite(before.values[i])}
    both = [(of_before[name], i) for i, name in enumerate(after.items) if name in of_before]
    both = [(first, second) for first, second in both if _finite(after.values[second])]
    if not both:
        return {"items": 0, "verdict": "no item in common"}
    earlier = _items(before, [first for first, _ in both])
    later = _items(after, [second for _, second in both])
    gap = difference(earlier, later, draws=draws, seed=seed)
    fields = {"items": len(both), "value": gap.value, "low": gap.low, "high": gap.high}
    return {**fields, "verdict": verdict(gap, len(later.values_R), higher_is_better=after.higher_is_better)}


def verdict(gap: Interval, items: int, *, higher_is_better: bool) -> str:
    """Return the words for a difference over so many items that differ."""
    if items < FEWEST:
        return f"too few items ({items})"
    if gap.holds_zero:
        return SAME
    return BETTER if (gap.value > 0) == higher_is_better else WORSE


def grid_of(by_model: Mapping[str, Scores]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return row -> column -> model -> mean of the cell; {} for a task without cells."""
    grid: dict[str, dict[str, dict[str, float | None]]] = {}
    for model, each in by_model.items():
        for row, columns in each.grid.items():
            for column, numbers in columns.items():
                values = [value for i in numbers if (value := each.values[i]) is not None]
                mean = math.fsum(values) / len(values) if values else None
                grid.setdefault(row, {}).setdefault(column, {})[model] = mean
    return grid


def same_measures(task: str, by_model: Mapping[str, Sequence[Scores]]) -> list[dict[str, Scores]]:
    """Turn the measures of each model into the models of each measure. Raises ConfigError if they differ."""
    names = {model: [each.measure for each in several] for model, several in by_model.items()}
    if len({tuple(each) for each in names.values()}) > 1:
        raise ConfigError(f"{task}: models have other measures: {names}", next="score them one by one")
    count = len(next(iter(names.values()), []))
    return [{model: several[i] for model, several in by_model.items()} for i in range(count)]


def _not_finite(scores: Scores) -> list[str]:
    """Return a sentence if some values are no finite numbers, which no mean holds."""
    count = sum(value is not None and not math.isfinite(value) for value in scores.values)
    return [f"{count} of {len(scores.items)} items are left out: their score is not finite"] if count else []


def _copies(scores: Scores) -> list[str]:
    """Return a sentence if items ask the same."""
    count, differ = len(scores.contents), len(set(scores.contents))
    return [f"of {count} items only {differ} differ: intervals count copies as one"] if differ < count else []


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _items(scores: Scores, numbers: Sequence[int]) -> Items:
    """Return those of the items that have a value, copies as one item with the sum of their weights."""
    groups: dict[str | int, list[int]] = {}
    for i in numbers:
        if _finite(scores.values[i]):
            groups.setdefault(scores.contents[i] if scores.contents else i, []).append(i)
    weights = [[scores.weights[i] if scores.weights else 1.0 for i in group] for group in groups.values()]
    values = [
        math.fsum(w * (scores.values[i] or 0.0) for w, i in zip(each, group, strict=True))
        / (math.fsum(each) or 1.0)
        for each, group in zip(weights, groups.values(), strict=True)
    ]
    return items_of(values, [math.fsum(each) for each in weights], exponent=scores.exponent)


def _interval(items: Items, draws: int, seed: int) -> dict[str, Any]:
    if not len(items.values_R):
        return {"value": None, "low": None, "high": None, "items": 0}
    one = interval(items, draws=draws, seed=seed)
    return {"value": one.value, "low": one.low, "high": one.high, "items": len(items.values_R)}
