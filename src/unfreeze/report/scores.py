"""Scores of `unfreeze eval` as tables: for the terminal, its own page, and the report of a run.

They are read from evaluations.json (evaluate/table.py says what it holds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from unfreeze.core.errors import DataError
from unfreeze.core.units import plural
from unfreeze.report.page import document, render, write_page
from unfreeze.report.tables import ABSENT
from unfreeze.untrusted.json_object import read_object

RECORD, PAGE = "evaluations.json", "evaluations.html"
MANY = 10
"""Differences from which on some are expected to be chance."""
Record = Mapping[str, Any]


class Table(NamedTuple):
    """title, head and rows of cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def read_scores(folder: Path) -> dict[str, Any]:
    """Return the record of a folder; {} without one. Raises DataError if it is damaged."""
    path = folder / RECORD
    if not path.is_file():
        return {}
    record = read_object(path, DataError, next=f"remove {RECORD}, and run unfreeze eval again")
    if not isinstance(record.get("tasks"), list):
        raise DataError(f"{path} has no list of tasks", next=f"remove {RECORD}, and run unfreeze eval again")
    return record


def number(value: float | None, sign: str = "") -> str:
    """Return a score in words: three decimals, fewer for large ones."""
    if value is None:
        return ABSENT
    return format(
        value, f"{sign},.3f" if abs(value) < 100 else f"{sign},.5g" if abs(value) < 1e4 else f"{sign},.0f"
    )


def with_interval(one: Mapping[str, Any], sign: str = "") -> str:
    """Return '0.400 (0.250 to 0.550)'."""
    if one.get("value") is None:
        return ABSENT
    ends = f"{number(one['low'], sign)} to {number(one['high'], sign)}"
    return f"{number(one['value'], sign)} ({ends})"


def title_of(task: Record) -> str:
    """Return the name of a measure: its task, and what is measured if that does not say it."""
    name, measure = str(task["task"]), str(task.get("measure", ""))
    unit = f" ({task['unit']})" if task.get("unit") not in ("", "share", None) else ""
    return name if not measure or name.endswith(f":{measure}") else f"{name}, {measure}{unit}"


def scored(record: Record) -> list[Record]:
    return [task for task in record["tasks"] if "error" not in task]


def change_table(record: Record) -> Table | None:
    """Return one row for each measure and pair of models; None if no models are compared."""
    rows: list[tuple[str, ...]] = []
    pairs = {(each["before"], each["after"]) for task in scored(record) for each in task["changes"]}
    if not pairs:
        return None
    for task in scored(record):
        by_model = {each["model"]: each for each in task["scores"]}
        for each in task["changes"]:
            ends = [with_interval(by_model[each[side]]) for side in ("before", "after")]
            which = [f"{each['before']} → {each['after']}"] if len(pairs) > 1 else []
            lower = "" if task["higher_is_better"] else ", lower is better"
            cells = (f"{each['items']:,}", *ends, with_interval(each, "+"), each["verdict"])
            rows.append((f"{title_of(task)}{lower}", *which, *cells))
    which = ["models"] if len(pairs) > 1 else []
    return Table(
        "Before and after", ("task", *which, "items", "before", "after", "difference (95 %)", "verdict"), rows
    )


def score_table(record: Record) -> Table:
    """Return the scores, one column for each model."""
    models = [model["name"] for model in record["models"]]
    rows: list[tuple[str, ...]] = []
    for task in scored(record):
        by_model = {each["model"]: each for each in task["scores"]}
        cells = [with_interval(by_model.get(model, {})) for model in models]
        lower = "" if task["higher_is_better"] else ", lower is better"
        rows.append((f"{title_of(task)}{lower}", f"{task['items']:,}", *cells))
    return Table("Scores with 95 % intervals", ("task", "items", *models), rows)


def grid_tables(record: Record) -> list[Table]:
    """Return the grids of needle and recall: with one pair of models 'before → after' in each cell."""
    tables: list[Table] = []
    for task in scored(record):
        grid = task.get("grid") or {}
        models = [each["model"] for each in task["scores"]]
        together = len(models) == 2
        for shown in [models] if together else [[model] for model in models]:
            columns = list(dict.fromkeys(column for row in grid.values() for column in row))
            rows = [
                (
                    row,
                    *(
                        " → ".join(_cell(of.get(column, {}).get(model)) for model in shown)
                        for column in columns
                    ),
                )
                for row, of in grid.items()
            ]
            if rows:
                which = " → ".join(shown) if len(models) > 1 else ""
                title = f"{title_of(task)}{f', {which}' if which else ''}"
                tables.append(Table(title, ("", *columns), rows))
    return tables


def _cell(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.2f}"


def failures(record: Record) -> list[tuple[str, str]]:
    """(task, message) of the tasks without a score."""
    return [(str(task["task"]), str(task["error"])) for task in record["tasks"] if "error" in task]


def cautions(record: Record) -> list[str]:
    """Sentences for the reader: notes of tasks and of the whole, and how many differences may be chance."""
    notes = [f"{title_of(task)}: {note}" for task in scored(record) for note in task["notes"]]
    judged = [each for task in scored(record) for each in task["changes"] if each.get("value") is not None]
    if len(judged) >= MANY:
        notes.append(
            f"Of {len(judged)} such intervals, about {round(0.05 * len(judged))} would not hold 0 by chance."
        )
    return list(dict.fromkeys([*record.get("notes", []), *notes]))


def in_lines(record: Record) -> list[tuple[str, list[str]]]:
    """Return (measure, a line for each pair of models; without pairs, for each model), for a terminal."""
    groups: list[tuple[str, list[str]]] = []
    for task in scored(record):
        by_model = {each["model"]: each for each in task["scores"]}
        lines = [
            f"{each['before']} {number(by_model[each['before']].get('value'))} →"
            f" {each['after']} {number(by_model[each['after']].get('value'))},"
            f" {with_interval(each, '+')}: {each['verdict']}"
            for each in task["changes"]
        ]
        lines = lines or [f"{model} {with_interval(one)}" for model, one in by_model.items()]
        lower = "" if task["higher_is_better"] else ", lower is better"
        groups.append((f"{title_of(task)}, {plural(task['items'], 'item')}{lower}", lines))
    return [*groups, *((name, [f"no score: {why}"]) for name, why in failures(record))]


def score_lines(record: Record) -> list[str]:
    """Return a line for each measure and pair of models of a run's record; [] for an empty one."""
    return [f"{name}: {line}" for name, lines in in_lines(record) for line in lines] if record else []


def scores_section(record: Record) -> Markup:
    """Return the tables as a section of a page; "" for an empty record."""
    if not record:
        return Markup("")
    changed = change_table(record)
    table = changed or score_table(record)
    return render(
        "scores.html",
        title="Scores, before and after" if changed else "Scores",
        note=f"{record.get('time', '')}. Intervals: paired bootstrap over items, 95 %.",
        table=table,
        grids=grid_tables(record),
        failures=failures(record),
        cautions=cautions(record),
        command=str(record.get("command", "")),
        models=[(str(model["name"]), str(model.get("source", ""))) for model in record["models"]],
    )


def write_scores(path: Path, record: Record) -> Path:
    """Write the page of an evaluation atomically."""
    names = [str(model["name"]) for model in record["models"] if model.get("typed")]
    title = f"Scores of {', '.join(names)}"
    head = Markup("<header><h1>{}</h1></header>").format(title)
    return write_page(
        path, document(title, [head, scores_section(record)], f"Written by unfreeze eval from {RECORD}")
    )
