"""lab.html: the answer of a study, its table, curves and commands, as one self-contained page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unfreeze.report.page import Figure, document, render, write_page
from unfreeze.report.pictures import MOST_LINES, Points, bands, points_json

WIDE, NARROW = (1100, 320), (350, 250)
FLOP_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


def write_lab(path: Path, page: Mapping[str, Any]) -> None:
    """Write the page atomically.

    page  question, sentence, cautions, head and rows of the table, settings, value (measure of the curves),
          across (their x; "": steps), curves: arm -> [[step, value], …] of each seed, flops: arm -> FLOPs of
          its first run, arms (name, about, commands) and spent, the time of all runs
    """
    body = render(
        "lab.html",
        **{
            name: page[name] for name in ("question", "sentence", "cautions", "head", "rows", "arms", "spent")
        },
        settings=page["settings"],
        figure_of=_figure(page),
    )
    write_page(path, document(page["question"], [body], "Written by unfreeze lab from lab.json"))


def _figure(page: Mapping[str, Any]) -> Figure | None:
    """Mean and band of every arm, over FLOPs if x is a step and all arms count them."""
    curves: Mapping[str, Sequence[Sequence[Sequence[float]]]] = page["curves"]
    shown = {name: mean_and_band(of) for name, of in curves.items() if of}
    shown = {name: of for name, of in shown.items() if len(of[0]) > 1}
    if not shown or len(shown) > MOST_LINES:
        return None
    x, scales = page["across"] or "step", dict.fromkeys(shown, 1.0)
    steps = [step for xs, *_ in shown.values() for step in (xs[0], xs[-1])]
    if not page["across"] and min(steps) >= 0 and all(page["flops"].get(name) for name in shown):
        most = max(page["flops"][name] for name in shown)
        unit, x = next((each for each in FLOP_UNITS if most >= 10 * each[0]), FLOP_UNITS[-1])
        scales = {name: page["flops"][name] / unit / shown[name][0][-1] for name in shown}
    drawn = {
        name: ([step * scales[name] for step in xs], mean, low, high)
        for name, (xs, mean, low, high) in shown.items()
    }
    words = f"Mean over seeds; the band is from the lowest seed to the highest. Across: {x}."
    alt = f"{page['value']} of {', '.join(drawn)} over {x}"
    pictures = [bands(list(drawn.values()), alt, size) for size in (WIDE, NARROW)]
    points: dict[str, Points] = {name: (xs, mean) for name, (xs, mean, _, _) in drawn.items()}
    title = f"{page['value']} of held-out rows" if page["value"].startswith("loss") else page["value"]
    return Figure(title, words, pictures, series=points_json(points), names=list(points), x=x)


def mean_and_band(
    seeds: Sequence[Sequence[Sequence[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """(steps that all seeds have, mean, lowest, highest) of [[step, value], …] of each seed."""
    by_step = [{step: value for step, value in seed if math.isfinite(value)} for seed in seeds]
    steps = sorted(set.intersection(*(set(each) for each in by_step)))
    values = [[each[step] for each in by_step] for step in steps]
    return (
        list(steps),
        [math.fsum(each) / len(each) for each in values],
        [min(each) for each in values],
        [max(each) for each in values],
    )
