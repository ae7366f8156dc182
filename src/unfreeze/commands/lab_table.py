"""Table, page and results of a study, from the notes of its runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unfreeze.commands.lab_answer import Difference, difference, over_seeds, ranking, sentence, span
from unfreeze.commands.lab_cost import WITHIN, Cost
from unfreeze.commands.lab_runs import Run
from unfreeze.config.lab import Lab
from unfreeze.core.units import format_count, format_flops, format_seconds
from unfreeze.report.tables import ABSENT

SAME = "no difference"
Notes = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """The answer of a study, as far as its runs have finished.

    gaps      of each arm but the first, to the first
    ranking   arms, best first; [] where intervals overlap
    head      of the table; rows: cells of each arm
    cautions  sentences about the study
    left      runs that have not finished
    """

    sentence: str
    ranking: list[str]
    gaps: dict[str, Difference | None]
    head: list[str]
    rows: list[list[str]]
    curves: dict[str, list[list[list[float]]]]
    cautions: list[str] = field(default_factory=list[str])
    left: int = 0


def answer_of(
    lab: Lab,
    runs: Sequence[Run],
    notes: Mapping[str, Mapping[str, Any]],
    rates: Mapping[str, float],
    costs: Mapping[str, Cost],
) -> Answer:
    """Compare the arms by the seeds that all of them have finished."""
    names = [arm.name for arm in lab.arms]
    finished = {run.name for run in runs if notes.get(run.name, {}).get("finished")}
    seeds = [s for s in range(lab.seeds) if all(f"{name}/seed-{s}" in finished for name in names)]
    own = {name: [notes[f"{name}/seed-{s}"] for s in seeds] for name in names}
    failed = {name: count for name in names if (count := sum(note["value"] is None for note in own[name]))}
    gaps = {name: difference(own[names[0]], own[name]) for name in names[1:]}
    left = len(runs) - len(finished)
    if left:
        words = f"not finished: {left} of {len(runs)} runs are left"
    else:
        words = sentence(names, gaps, len(seeds), unit=lab.measured_in, equal=lab.equal, failed=failed)
    head, rows = _table(lab, own, gaps, rates, costs, _tries(notes))
    return Answer(
        sentence=words,
        ranking=[] if left else ranking(names, gaps, lab.better),
        gaps=gaps,
        head=head,
        rows=rows,
        curves={name: [note["curve"] for note in own[name] if note.get("curve")] for name in names},
        cautions=_cautions(lab, gaps, rates, left, len(seeds)) + _alike(own, gaps) + _uneven(lab, own),
        left=left,
    )


def _tries(notes: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for note in notes.values():
        if note["tuning"] and note["finished"]:
            by_arm.setdefault(note["arm"], []).append(note)
    return by_arm


def _table(
    lab: Lab,
    own: Mapping[str, Notes],
    gaps: Mapping[str, Difference | None],
    rates: Mapping[str, float],
    costs: Mapping[str, Cost],
    tries: Mapping[str, Notes],
) -> tuple[list[str], list[list[str]]]:
    """(head, a row per arm); columns without any value are left out."""
    unit = f", {lab.measured_in}" if lab.measured_in else ""
    more = list(dict.fromkeys(name for notes in own.values() for n in notes for name in n.get("more") or {}))
    head = ["arm", f"{lab.value}{unit}", f"minus {lab.arms[0].name}, 95 %", "rate", "steps"]
    head += ["FLOPs of a run", "active parameters", "parameters", "CPU time of a run", "FLOPs of tries"]
    head += ["CPU time of tries", *more]
    rows: list[list[str]] = []
    for arm in lab.arms:
        notes, cost, tried = own[arm.name], costs.get(arm.name), tries.get(arm.name, ())
        steps = {n.get("steps") or (cost.steps if cost else None) for n in notes}
        cells = [arm.name, _value(notes), _gap(gaps.get(arm.name)) if arm.name in gaps else ABSENT]
        cells += [f"{rates[arm.name]:g}" if arm.name in rates else ABSENT]
        cells += [f"{step:,}" if len(steps) == 1 and (step := steps.pop()) else ABSENT]
        cells += [_mean(notes, "flops", format_flops)]
        cells += [_mean(notes, name, format_count) for name in ("active", "total")]
        cells += [_time(notes), _total(tried), _time(tried, len(tried) or 1)]
        cells += [
            _mean_of([n["more"][name] for n in notes if name in (n.get("more") or {})]) for name in more
        ]
        rows.append(cells)
    shown = [i for i in range(len(head)) if i < 3 or any(row[i] != ABSENT for row in rows)]
    return [head[i] for i in shown], [[row[i] for i in shown] for row in rows]


def _value(notes: Notes) -> str:
    """Mean and interval over seeds."""
    values = [note["value"] for note in notes if note["value"] is not None]
    if len(values) < max(1, len(notes)):
        return f"diverged in {len(notes) - len(values)} of {len(notes)}" if notes else ABSENT
    one = over_seeds(values)
    if len(values) < 2:
        return f"{one.mean:.4g}"
    return f"{one.mean:.4g} ({one.low:.4g} to {one.high:.4g})"


def _gap(gap: Difference | None) -> str:
    if gap is None or not math.isfinite(gap.low):
        return ABSENT
    ends = span(gap.low, gap.high)
    return f"{gap.mean:+.3g} ({ends})" if gap.clear else f"{SAME} ({ends})"


def _mean(notes: Notes, name: str, words: Callable[[float], str]) -> str:
    values = [note[name] for note in notes if note.get(name) is not None]
    return words(sum(values) / len(values)) if values else ABSENT


def _total(notes: Notes) -> str:
    values = [note["flops"] for note in notes if note.get("flops") is not None]
    return format_flops(sum(values)) if values else ABSENT


def _time(notes: Notes, times: int = 1) -> str:
    """Mean CPU time of a run, times that many."""
    seconds = [note["cpu_seconds"] for note in notes]
    return format_seconds(times * sum(seconds) / len(seconds)) if seconds else ABSENT


def _mean_of(values: Sequence[float]) -> str:
    if not values:
        return ABSENT
    one = over_seeds(values)
    return f"{one.mean:.4g}" if len(values) < 2 else f"{one.mean:.4g} ({one.low:.4g} to {one.high:.4g})"


def _cautions(
    lab: Lab, gaps: Mapping[str, Difference | None], rates: Mapping[str, float], left: int, seeds: int
) -> list[str]:
    """Sentences that a reader needs before they believe the answer."""
    words: list[str] = []
    edges = {min(lab.learning_rates, default=0.0), max(lab.learning_rates, default=0.0)}
    if at_edge := [name for name, rate in rates.items() if rate in edges]:
        words.append(
            f"The best rate of {', '.join(at_edge)} is the lowest or highest one tried: a better one may lie"
            " beyond."
        )
    if gaps and all(gap and gap.low == gap.high for gap in gaps.values()):
        return words  # seeds changed nothing, which `_alike` says: an interval has nothing to cover
    if len(gaps) > 1:
        words.append(
            f"Each interval holds alone in 95 of 100 studies; of {len(gaps)} at once, one errs in up to"
            f" {min(100, 5 * len(gaps))} of 100."
        )
    by = {gap.by for gap in gaps.values() if gap}
    if by:
        extra = ", widened to cover other held-out rows" if "seeds and rows" in by else ""
        words.append(f"Intervals: Student's t over {seeds} seeds, paired by seed{extra}.")
    if not left and len(gaps) > 1 and all(gaps.values()):
        order = ranking([arm.name for arm in lab.arms], gaps, lab.better)
        words.append(f"Best first: {', '.join(order)}." if order else "No ranking: intervals overlap.")
    return words


def _alike(own: Mapping[str, Notes], gaps: Mapping[str, Difference | None]) -> list[str]:
    """Say so if a seed changed nothing, or if rows could not widen an interval."""
    words: list[str] = []
    same = [name for name, notes in own.items() if len(notes) > 1 and len({n["value"] for n in notes}) == 1]
    if same:
        words.append(
            f"All seeds of {', '.join(same)} have one value: their spread, and so an interval, says nothing."
        )
    rows = [all(note.get("rows") for note in notes) for notes in own.values() if notes]
    if any(rows) and any(gap and gap.by == "seeds" for gap in gaps.values()):
        words.append("Arms have other held-out rows, so an interval covers seeds alone.")
    return words


def _uneven(lab: Lab, own: Mapping[str, Notes]) -> list[str]:
    """Say so if the FLOPs of what was really trained are more than 5 % apart: steps are whole."""
    means = {
        name: sum(flops) / len(flops)
        for name, notes in own.items()
        if (flops := [note["flops"] for note in notes if note.get("flops") is not None])
    }
    least = min(means.values(), default=0.0)
    apart = max(means.values()) / least - 1 if least else 0.0
    if lab.equal != "flops" or apart <= WITHIN:
        return []
    return [f"FLOPs are up to {apart:.0%} apart: with so few steps whole ones cannot be more equal."]


def printed(lab: Lab, answer: Answer) -> None:
    """Print table, sentence and cautions."""
    from rich.table import Table
    from rich.text import Text

    from unfreeze.tracking.console import PipeConsole

    console = PipeConsole()
    table = Table(title=lab.question, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for head in ("", *(row[0] for row in answer.rows)):
        table.add_column(Text(head), overflow="fold")
    for i, head in enumerate(answer.head[1:], 1):
        table.add_row(*(Text(cell) for cell in (head, *(row[i] for row in answer.rows))))
    console.print(table)
    for line in (answer.sentence, *answer.cautions):
        console.print(Text(line))


def page_of(lab: Lab, answer: Answer, record: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the page (report/lab.py)."""
    notes: Mapping[str, Mapping[str, Any]] = record["runs"]
    commands = {
        arm.name: [note["command"] for note in notes.values() if note["arm"] == arm.name] for arm in lab.arms
    }
    flops = {
        name: [n.get("flops") for n in notes.values() if n["arm"] == name and not n["tuning"]]
        for name in commands
    }
    return {
        "question": lab.question,
        "sentence": answer.sentence,
        "cautions": answer.cautions,
        "head": answer.head,
        "rows": answer.rows,
        "settings": settings(lab),
        "value": lab.curve or f"{lab.value}{f', {lab.measured_in}' if lab.measured_in else ''}",
        "across": lab.across,
        "curves": answer.curves,
        "flops": {name: of[0] for name, of in flops.items() if of and of[0]},
        "arms": [{"name": arm.name, "about": arm.about, "commands": commands[arm.name]} for arm in lab.arms],
        "spent": format_seconds(sum(note["seconds"] for note in notes.values())),
    }


def settings(lab: Lab) -> list[tuple[str, str]]:
    """(name, value) of what holds for all arms."""
    rows = [
        ("run", " ".join((lab.run or f"python {lab.python}").split())),
        ("seeds", ", ".join(map(str, range(lab.seeds)))),
    ]
    rows += [("equal", lab.equal), ("better", lab.better)]
    if lab.expected:
        rows.append(("expected", " ".join(lab.expected.split())))
    if lab.learning_rates:
        rates = ", ".join(f"{rate:g}" for rate in lab.learning_rates)
        rows.append(("rates tried", f"{rates}; for each arm on a seed of its own"))
    return rows


def results_of(lab: Lab, answer: Answer, record: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The answer as JSON, with date and machine."""
    notes: Mapping[str, Mapping[str, Any]] = record["runs"]
    count, _, kind = str(record.get("machine", "")).partition(" ")
    gaps = {
        name: gap and {"mean": gap.mean, "low": gap.low, "high": gap.high}
        for name, gap in answer.gaps.items()
    }
    return {
        "study": Path(file).stem,
        "command": f"unfreeze lab {file}",
        "question": lab.question,
        "sentence": answer.sentence,
        "cautions": answer.cautions,
        "ranking": answer.ranking,
        "differences": gaps,
        "head": answer.head,
        "rows": answer.rows,
        "settings": [list(each) for each in settings(lab)],
        "arms": {arm.name: arm.flags for arm in lab.arms},
        "date": record.get("date", ""),
        "machine": f"{kind}, {count} CPUs" if count else "",
        "seconds": round(sum(note["seconds"] for note in notes.values()), 1),
        "runs": len(notes),
    }
