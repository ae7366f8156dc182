"""life.html: every stage of a life with its scores, as one self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unfreeze.report.page import Figure, document, render, write_page
from unfreeze.report.pictures import lines, points_json
from unfreeze.report.tables import ABSENT

WIDE, NARROW = (1100, 300), (350, 240)


def write_life(path: Path, page: Mapping[str, Any]) -> None:
    """Write the page atomically.

    page  title, seconds, left (names of stages to come), stages (name, about, command, time, begins_at,
          report, scores: name -> value, low, high), scores (name, lower: True if lower is better) and groups
          (start, rows) of stages that begin at one model
    """
    stages: Sequence[Mapping[str, Any]] = page["stages"]
    names = [score["name"] for score in page["scores"]]
    rows = [
        (stage["name"], stage["begins_at"] or ABSENT, stage["time"], *(_cell(stage, name) for name in names))
        for stage in stages
    ]
    body = render(
        "life.html",
        title=page["title"],
        note=_note(page),
        head=("stage", "begins at", "time", *(_head(score) for score in page["scores"])),
        rows=rows,
        stages=stages,
        figures=[figure for score in page["scores"] if (figure := _figure(score, stages))],
        groups=page["groups"],
        group_head=("stage", *names),
    )
    write_page(path, document(page["title"], [body], "Written by unfreeze life from life.json"))


def _note(page: Mapping[str, Any]) -> str:
    left = page["left"]
    return f"{page['seconds']} for all stages so far." + (
        f" Still to come: {', '.join(left)}." if left else ""
    )


def _head(score: Mapping[str, Any]) -> str:
    return f"{score['name']} ({'lower' if score['lower'] else 'higher'} is better)"


def _cell(stage: Mapping[str, Any], name: str) -> str:
    one = stage["scores"].get(name)
    return f"{one['value']:.3f} ({one['low']:.3f} to {one['high']:.3f})" if one else ABSENT


def _figure(score: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> Figure | None:
    """One score along the stages, with the ends of its interval."""
    scored = [stage for stage in stages if score["name"] in stage["scores"]]
    if len(scored) < 2:
        return None
    ones = [stage["scores"][score["name"]] for stage in scored]
    xs = list(range(1, len(ones) + 1))
    points = {end: (xs, [one[end] for one in ones]) for end in ("value", "low", "high")}
    order = ", ".join(f"{place} {stage['name']}" for place, stage in enumerate(scored, 1))
    words = f"Stages in order: {order}."
    pictures = [lines(list(points.values()), f"{score['name']}. {words}", size) for size in (WIDE, NARROW)]
    return Figure(_head(score), words, pictures, series=points_json(points), names=list(points), x="stage")
