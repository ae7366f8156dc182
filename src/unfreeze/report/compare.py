"""Compare two or more runs: config differences, curves in one picture, a table of results.

Reads only run folders. Losses are comparable between runs with the same tokenizer and data; if model or data
differ, the page says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_bytes, format_seconds
from unfreeze.report.events import evals_of, sample_pairs, series
from unfreeze.report.page import Figure, document, render
from unfreeze.report.pictures import MOST_LINES, lines, points_json
from unfreeze.report.run import RunFolder, flatten, read_run, result_words
from unfreeze.report.tables import ABSENT

WIDE, NARROW, SMALL = (1100, 380), (350, 260), (360, 220)
# fields about the run itself, its trackers or other fields, and hashes of the data (see `other_data`)
OWN = ("out", "watch.track", "effective.given", "effective.contents")
GIVEN = ("data.template_date",)  # fields that a run fills in itself: shown only if a user set one


@dataclass(frozen=True)
class Result:
    """Result of a run; None for unknown values.

    best_validation  the lowest held-out loss; of a run with rewards minus its highest held-out reward
    """

    name: str
    state: str
    steps: int
    loss_last: float | None
    best_validation: float | None
    best_validation_step: int | None
    tokens_per_second: float | None
    peak_bytes: float | None
    seconds: float
    rewarded: bool = False

    def cells(self) -> tuple[str, ...]:
        """Table cells in RESULT_HEAD's order."""
        best = (
            ABSENT
            if self.best_validation is None
            else f"reward {-self.best_validation:.4f} (step {self.best_validation_step:,})"
            if self.rewarded
            else f"{self.best_validation:.4f} (step {self.best_validation_step:,})"
        )
        return (
            self.name,
            "finished" if self.state == "done" else self.state,
            f"{self.steps:,}",
            ABSENT if self.loss_last is None else f"{self.loss_last:.4f}",
            best,
            ABSENT if self.tokens_per_second is None else f"{self.tokens_per_second:,.0f}",
            ABSENT if self.peak_bytes is None else format_bytes(self.peak_bytes),
            format_seconds(self.seconds),
        )


RESULT_HEAD = (
    "run",
    "state",
    "steps",
    "final loss",
    "best validation",
    "tokens/s",
    "peak memory",
    "training time",
)


def read_runs(folders: Sequence[str | Path]) -> list[RunFolder]:
    """Read the runs, in the given order.

    Raises ConfigError for fewer than two, for one given twice, or for more than a picture can distinguish.
    """
    paths = [Path(folder).resolve() for folder in folders]
    if not 2 <= len(paths) <= MOST_LINES:
        raise ConfigError(
            f"{len(paths)} {'run' if len(paths) == 1 else 'runs'} given: give 2 to {MOST_LINES}",
            next="unfreeze compare runs/a runs/b",
        )
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is given twice", next="unfreeze compare runs/a runs/b")
    return [read_run(folder) for folder in folders]


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Names of the folders, with as many parents as needed to make them unique.

    For example a/x and b/x for two runs named x.
    """
    parts = [run.path.resolve().parts for run in runs]
    depth = next(
        depth
        for depth in range(1, max(map(len, parts)) + 1)
        if len({path[-depth:] for path in parts}) == len(parts)
    )
    return ["/".join(path[-depth:]).replace("//", "/") for path in parts]


def result(run: RunFolder, name: str) -> Result:
    """Compute a run's row of the table from its events."""
    losses = series(run.events, "train", "loss")[1]
    validation = [
        (loss, event["step"]) for event in evals_of(run.events) if (loss := event.get("loss")) is not None
    ]
    best, at = min(validation, default=(None, None))
    peaks = series(run.events, "train", "peak_bytes")[1]
    return Result(
        name=name,
        state=run.state,
        steps=run.steps_done,
        loss_last=losses[-1] if losses else None,
        best_validation=best,
        best_validation_step=at,
        tokens_per_second=run.tokens_per_second,
        peak_bytes=max(peaks, default=None),
        seconds=run.seconds,
        rewarded=run.config.get("recipe") == "grpo",
    )


class Ranking(NamedTuple):
    """Criterion of a ranking: a field of Result, and words. "" if the runs cannot be ranked."""

    field: Literal["best_validation", "loss_last", ""]
    words: str


def ranking(runs: Sequence[RunFolder]) -> Ranking:
    """Rank by best validation loss if every run that trained has one, else by last training loss."""
    results = [result(run, "") for run in runs]
    if not any(each.loss_last is not None for each in results):
        return Ranking("", "not ranked: no run has a loss")
    if other_losses(runs):
        return Ranking("", "not ranked: different loss functions")
    validated = all(each.best_validation is not None for each in results if each.steps)
    if validated and len(prints := _held_out(runs)) > 1 and "" not in prints:
        return Ranking("", "not ranked: different held-out rows")
    # with one validation file, the training data can differ
    if other_data(runs) and not (validated and _one_validation(runs)):
        return Ranking("", "not ranked: different data")
    if validated:
        of = "held-out reward" if any(each.rewarded for each in results) else "validation loss"
        return Ranking("best_validation", f"best first by best {of}")
    if any(each.rewarded for each in results):
        return Ranking("", "not ranked: no prompts were held out, and a policy's loss compares nothing")
    why = "because not all runs have validation; with --validation-fraction 0.1 they rank by held-out rows"
    return Ranking("loss_last", f"best first by final training loss, {why}")


def other_data(runs: Sequence[RunFolder]) -> bool:
    """True if the runs' data files differ, by hash, or by name if a run recorded no hashes."""
    effective = [run.config.get("effective") for run in runs]
    contents = [each.get("contents") if isinstance(each, dict) else None for each in effective]
    return len({str(each) for each in (contents if all(contents) else map(_data, runs))}) > 1


PREFERENCE = ("loss", "beta", "gamma", "nll", "label_smoothing", "desirable_weight", "undesirable_weight")


def other_losses(runs: Sequence[RunFolder]) -> bool:
    """True if the runs have different loss functions: preference losses of another kind, other rewards."""
    kinds = set[tuple[str, ...]]()
    for run in runs:
        of_pairs = run.config.get("recipe") == "prefer"
        kind = [f"preference.{name}" for name in PREFERENCE] if of_pairs else ["reward", "env", "agent"]
        kinds.add(tuple(str(run.config.get(name)) for name in kind))
    return len(kinds) > 1


def _data(run: RunFolder) -> str:
    return run.source("data")


def _held_out(runs: Sequence[RunFolder]) -> set[str]:
    """Fingerprints of the runs' held-out rows; "" for runs of earlier versions."""
    return {event.get("fingerprint", "") for run in runs for event in evals_of(run.events)[-1:]}


def _one_validation(runs: Sequence[RunFolder]) -> bool:
    """True if all runs measured the held-out loss on the same file."""
    files = {str(run.config.get("data.validation") or "") for run in runs}
    return len(files) == 1 and "" not in files


def ranked(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Sort runs by loss, lowest first. Runs without loss come last; ties keep the given order."""
    field = ranking(runs).field

    def loss(run: RunFolder) -> float:
        value = getattr(result(run, ""), field) if field else None
        return math.inf if value is None else value

    return sorted(runs, key=loss)


def differences(runs: Sequence[RunFolder]) -> dict[str, list[str]]:
    """Return fields that differ between runs, with the value in each run.

    Field names are dotted, as for flags; a dash stands for a missing value.
    """
    configs = [flatten(run.config) for run in runs]
    set_fields = {name for run in runs for name in _given(run)}
    own = {*OWN, *(field for field in GIVEN if field not in set_fields)}
    fields = dict.fromkeys(field for config in configs for field in config if field not in own)
    values = {field: [config.get(field, ABSENT) for config in configs] for field in fields}
    return {field: row for field, row in values.items() if len(set(row)) > 1}


def _given(run: RunFolder) -> list[str]:
    """Fields that were not at their default, as recorded by the run."""
    effective = run.config.get("effective")
    names = effective.get("given") if isinstance(effective, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def caution(runs: Sequence[RunFolder]) -> str:
    """Warning that the losses of these runs may not be comparable, or ""."""
    models = ["different models"] if len({run.source("model") for run in runs}) > 1 else []
    losses = ["different loss functions"] if other_losses(runs) else []
    changed = " and ".join([*models, *(["different data"] if other_data(runs) else []), *losses])
    return f"{changed[0].upper()}{changed[1:]}: the losses may not be comparable." if changed else ""


def as_dict(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the comparison as plain JSON.

    runs (one Result each), ranked_by (a field of Result), differences (field -> values in the same order),
    caution.
    """
    rows = [vars(result(run, name)) for run, name in zip(runs, run_names(runs), strict=True)]
    by = ranking(runs).field or None
    return {"runs": rows, "ranked_by": by, "differences": differences(runs), "caution": caution(runs)}


def comparison_page(runs: Sequence[RunFolder]) -> str:
    """The comparison as one self-contained HTML page."""
    labels = run_names(runs)
    large, *small = _curves(runs, labels)
    fields = [(field, *values) for field, values in differences(runs).items()]
    title = " · ".join(labels)
    body = render(
        "compare.html",
        title=title,
        runs=[(label, f"{result_words(run)}: {run.path}") for label, run in zip(labels, runs, strict=True)],
        caution=caution(runs),
        order=ranking(runs).words,
        head=RESULT_HEAD,
        results=[result(run, name).cells() for run, name in zip(runs, labels, strict=True)],
        large=large,
        small=[figure for figure in small if figure],
        silent=[label for label, run in zip(labels, runs, strict=True) if not run.config],
        labels=labels,
        fields=fields,
        answers=answers(runs),
        shown=SHOWN_ANSWERS,
    )
    footer = "Written by unfreeze compare from each run's events.jsonl"
    return document(f"{title} · compared", [body], footer)


SHOWN_ANSWERS = 4  # prompts shown; the others are folded


def answers(runs: Sequence[RunFolder]) -> list[tuple[str, list[str | None]]]:
    """(prompt, each run's answer after training or None), prompts with most answers first."""
    every = [{prompt: now for prompt, _, now in sample_pairs(run.events)} for run in runs]
    prompts = dict.fromkeys(
        prompt for by_prompt in every for prompt, now in by_prompt.items() if now is not None
    )
    rows = [(prompt, [by_prompt.get(prompt) for by_prompt in every]) for prompt in prompts]
    return sorted(rows, key=lambda row: row[1].count(None))


def _curves(runs: Sequence[RunFolder], labels: Sequence[str]) -> list[Figure | None]:
    """Figures: training loss (large), validation, learning rate, gradient norm; None without numbers."""
    wanted = [  # title, kind and field of the events, sizes, smoothed, from zero
        ("Training loss by step", "train", "loss", (WIDE, NARROW), True, False),
        ("Validation loss", "eval", "loss", (SMALL,), False, False),
        ("Learning rate", "train", "learning_rate", (SMALL,), False, True),
        ("Gradient norm", "train", "grad_norm", (SMALL,), True, True),
    ]
    figures = []
    for title, kind, field, sizes, smoothed, from_zero in wanted:
        points = dict(
            zip(
                labels,
                (series(evals_of(run.events) if kind == "eval" else run.events, kind, field) for run in runs),
                strict=True,
            )
        )
        ends = [f"{label} {ys[-1]:.4g}" for label, (_, ys) in points.items() if ys]
        words = f"Last: {', '.join(ends)}."
        words += " Smoothed." if smoothed and max(len(xs) for xs, _ in points.values()) >= 40 else ""
        alt = f"{title}, one line per run. {words}"
        drawn = [
            lines(list(points.values()), alt, size, smoothed=smoothed, from_zero=from_zero)
            for size in sizes
            if ends
        ]
        named = labels if len(sizes) == 2 else ()  # beside the large picture only
        figure = Figure(title, words, drawn, series=points_json(points), names=named)
        figures.append(figure if ends else None)
    return figures
