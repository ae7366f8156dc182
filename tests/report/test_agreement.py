"""A guard's words and the report's picture of the same thing hold one number: the picture is measured, the
sentence is read, they are compared.

Measured means: points, rings and levels from the paths of the SVG, cells from its bitmap (Pillow). Nothing is
taken from the code that drew.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unfreeze.report import guards
from unfreeze.report.guards import guard_rows
from unfreeze.report.html import page
from unfreeze.report.pictures import DEAD_RGB, FULL
from unfreeze.report.run import RunFolder, read_run

STEPS = 120  # two in each of 60 columns
CONFIG = {"clip": 1.0, "on_spike": "warn", "dtype": "bfloat16"}
PLAN = {"kind": "plan", "step": 0, "total": 2**20, "usable": 2**30, "fits": True}
RECEIPT = {
    "kind": "receipt",
    "step": 1,
    "groups": {"mlp": {"parameters": 8, "trained": 8, "moved": 0.1}},
    "exceptions": [],
}


def step_event(step: int) -> dict[str, Any]:
    """Expert 0 of layer 1 never gets a token (60 columns); 3 and 5 of layer 2 and 7 of layer 10 get none for
    a while (4 + 5 + 4 whole columns).

    Busiest over mean, minus 1, in the first and last two steps: 40 / 35, 40 / 35, 41.5 / 40.2 and 40 / 35, 1,
    159.5 / 54.9, of layers 1, 2, 10.
    """
    away = 30 <= step < 40
    event = {
        "kind": "train",
        "step": step,
        "time": 1.0,
        "loss": 4.0 / step + 0.01 * (step % 3),
        "tokens": 100,
        "seconds": 1.0,
        "supervised_tokens": 0 if step == 50 else 40,
        "grad_norm": 2.0 / step + 0.9 * (step % 2),
        "peak_bytes": 2**29 + step * 2**20,
        "expert_load": {
            "1": [0] + [40] * 7,
            "2": [40, 40, 40, 0 if away else 40, 40, 0 if step < 12 else 40, 40, 40],
            "10": [40 + step] + [40] * 6 + [0 if away else 40],
        },
    }
    if step in (60, 90):
        event |= {"warning": f"loss {step} is above 3", "applied": True}
    if step == 70:
        event |= {"loss": None, "grad_norm": None, "error": "the loss is nan"}
    return event


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return run_of(tmp_path, [step_event(step) for step in range(1, STEPS + 1)])


def run_of(folder: Path, events: list[dict[str, Any]]) -> RunFolder:
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in [PLAN, RECEIPT, *events])
    )
    (folder / "resolved_config.json").write_text(json.dumps(CONFIG))
    return read_run(folder)


def drawn(source: str, title: str) -> list[str]:
    """The SVGs of one figure: one, or its wide and its narrow form, or these on an even and on a logarithmic
    axis."""
    figure = next(
        part
        for part in re.findall(r"<figure.*?</figure>", source, re.DOTALL)
        if re.search(f"<strong>{title}[^<]*</strong>", part)
    )
    return re.findall(r"<svg.*?</svg>", figure, re.DOTALL)


def path(svg: str, style: str) -> list[tuple[float, float]]:
    """The points of the line with this style."""
    (d,) = re.findall(rf'<path d="([^"]*)"[^>]*style="fill: none; [^"]*{style}', svg)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", d)]


def points(svg: str) -> list[tuple[float, float]]:
    """One for each step: the faint line where there is a smoothed one too, else the only one."""
    return path(
        svg,
        (
            "stroke: var\\(--accent\\); stroke-opacity"
            if "stroke-opacity" in svg
            else "stroke: var\\(--accent\\); stroke-width: 1.5"
        ),
    )


def rings(svg: str) -> int:
    return len(re.findall(r"<circle [^>]*stroke: var\(--bad\)", svg))


def highest(svg: str) -> float:
    """The largest value drawn, by the axis: labels and grid lines are in the same order, the lowest label is
    0."""
    labels = [
        float(words.split()[0].replace(",", ""))
        for words in re.findall(r"text-anchor: end;[^>]*>([^<]+)<", svg)
    ]
    grid = [
        float(y) for y in re.findall(r'<path d="M [-\d.]+ ([-\d.]+) L[^"]*"[^>]*stroke: var\(--line\)', svg)
    ][: len(labels)]
    top = min(y for _, y in points(svg))
    return labels[-1] * (grid[0] - top) / (grid[0] - grid[-1])


def cells(svg: str) -> list[list[tuple[int, ...]]]:
    from PIL import Image

    data = re.search(r'base64,([^"]+)', svg)
    assert data
    image = Image.open(io.BytesIO(base64.b64decode(data[1]))).convert("RGBA")
    return [[image.getpixel((x, y)) for x in range(image.width)] for y in range(image.height)]


def red(svg: str) -> int:
    return sum(pixel[:3] == DEAD_RGB for row in cells(svg) for pixel in row)


def said(words: str, pattern: str) -> int:
    """The number before `pattern`; 0 where a guard has none to tell."""
    found = re.search(rf"([\d,]+) {pattern}", words)
    return int(found[1].replace(",", "")) if found else 0


def check_memory(source: str, words: str, state: str) -> None:
    (svg,) = drawn(source, "Peak memory")
    shown = float(re.search(r"peak of all ([\d.]+) MiB", words)[1])  # type: ignore[index]
    assert highest(svg) == pytest.approx(shown, rel=2e-3) and state == "ok"


def check_finite(source: str, words: str, state: str) -> None:
    found = len(re.findall(r"step \d+:", words))
    for svg in [*drawn(source, "Training loss by step"), *drawn(source, "Gradient norm")]:
        assert len(points(svg)) == STEPS - found
        assert said(svg, "steps? without a finite value") == found
    assert state == ("fault" if found else "ok")


def check_spikes(source: str, words: str, state: str) -> None:
    found = len(re.findall(r"step \d+:", words))
    assert [
        rings(svg) for svg in [*drawn(source, "Training loss by step"), *drawn(source, "Gradient norm")]
    ] == [found] * 5
    assert state == ("look" if found else "ok")


def check_clipping(source: str, words: str, state: str) -> None:
    (svg,) = drawn(source, "Gradient norm")
    (_, level), _ = path(svg, "stroke-dasharray")
    above = sum(y < level - 0.02 for _, y in points(svg))  # coordinates are cut to hundredths
    assert above == said(words, "of [0-9]+ steps") == said(svg, "steps?[.]")
    assert state == ("look" if above > len(points(svg)) / 2 else "ok")


def check_supervised(source: str, words: str, state: str) -> None:
    (svg,) = drawn(source, "Training loss by supervised tokens")
    empty = said(words, "of [0-9]+ steps, first step")
    assert len(points(svg)) == STEPS - 1 - empty  # 1: the step without a loss
    assert state == ("look" if empty else "ok")


def check_experts(source: str, words: str, state: str) -> None:
    whole, over_time = (
        drawn(source, "Tokens per expert, whole run"),
        drawn(source, r"Tokens per expert of layer \d+ over time"),
    )
    layer = re.search(r"Tokens per expert of layer (\d+) over time", source)
    assert layer
    never, gone = said(words, "of 24 experts got no token"), said(words, "times? an expert got no token")
    assert [red(svg) for svg in whole] == [never, never] and [red(svg) for svg in over_time] == [gone, gone]
    assert not gone or f"layer {layer[1]}: {gone} time" in words
    numbers = re.search(r"max violation ([\d.]+) .*, ([\d.]+) in steps", words)
    assert numbers
    for svg in drawn(source, "Max violation per layer over time"):
        picture = cells(svg)
        for column, number in ((0, numbers[1]), (-1, numbers[2])):
            mean = sum(row[column][3] for row in picture) / len(picture) / 255 * (FULL - 1)
            # a cell has 255 shades, the number two digits
            assert mean == pytest.approx(float(number), abs=0.01)
    assert state == ("look" if never or gone else "ok")


CHECKS: dict[str, Callable[[str, str, str], None]] = {
    "Memory plan": check_memory,
    "Loss and gradients finite": check_finite,
    "Loss and gradient spikes": check_spikes,
    "Gradient norm clipped": check_clipping,
    "Supervised tokens": check_supervised,
    "Expert load": check_experts,
}


def disagreements(run: RunFolder, told: RunFolder) -> list[str]:
    """The guards whose words, made from `told`, are not what the pictures of `run` show."""
    source, rows, found = page(run), {row.guard: row for row in guard_rows(told)}, []
    for guard, check in CHECKS.items():
        try:
            check(source, rows[guard].result, rows[guard].state)
        except AssertionError:
            found.append(guard)
    return found


def test_the_words_of_every_guard_with_a_picture_are_the_pictures_numbers(run: RunFolder):
    source, rows = page(run), {row.guard: row for row in guard_rows(run)}
    for guard, check in CHECKS.items():
        check(source, rows[guard].result, rows[guard].state)
    assert disagreements(run, run) == []
    assert (
        rows["Expert load"].result
        == "1 of 24 experts got no token; layer 1: 60 times an expert got no token over 2 steps where 10 or"
        " more were due (expert 0), 13 more in 2 other layers; max violation 0.11 in steps 1 to 2, 0.68 in"
        " steps 119 to 120, mean of the layers"
    )
    assert {guard: rows[guard].state for guard in CHECKS} == {
        "Memory plan": "ok",
        "Loss and gradients finite": "fault",
        "Loss and gradient spikes": "look",
        "Gradient norm clipped": "ok",
        "Supervised tokens": "look",
        "Expert load": "look",
    }


def test_nothing_to_see_in_the_pictures_and_nothing_said(tmp_path: Path):
    even = {str(layer): [40] * 8 for layer in (1, 2, 10)}
    calm = [
        {
            **step_event(step),
            "expert_load": even,
            "loss": 4.0 / step,
            "grad_norm": 1.1 / step,
            "supervised_tokens": 40,
        }
        for step in range(1, STEPS + 1)
    ]
    for event in calm:
        event.pop("warning", None), event.pop("error", None)
    assert {row.state for row in guard_rows(run_of(tmp_path, calm))} == {"ok"}


EVEN = [[40] * 8] * 60
COUNTS: dict[
    str, tuple[str, Any]
    # the words made from something else than the picture: a function of guards.py -> (guard, what it gives)
] = {
    "peak_memory": ("Memory plan", ([1], [600.0 * 2**20])),
    "broken": ("Loss and gradients finite", []),
    "spikes": ("Loss and gradient spikes", []),
    "clipped": ("Gradient norm clipped", []),
    "unsupervised": ("Supervised tokens", []),
}
BALANCES: dict[str, dict[str, Any]] = {  # the same of the expert guard: the fields of its Balance
    "never used": {"whole": {"1": [40] * 8, "2": [40] * 8, "10": [40] * 8}},
    "red cells": {"cells": {"1": EVEN, "2": EVEN, "10": EVEN}},
    "violation": {"violation": {"1": [0.0] * 60}},
}


@pytest.mark.parametrize("name", COUNTS)
def test_control_a_count_from_elsewhere_disagrees(run: RunFolder, monkeypatch: pytest.MonkeyPatch, name: str):
    guard, instead = COUNTS[name]
    monkeypatch.setattr(guards, name, lambda _: instead)
    assert disagreements(run, run) == [guard]


@pytest.mark.parametrize("name", BALANCES)
def test_control_another_balance_disagrees(run: RunFolder, name: str):
    told = read_run(run.path)
    assert told.balance is not None
    vars(told)["balance"] = replace(told.balance, **BALANCES[name])
    assert disagreements(run, told) == ["Expert load"]
