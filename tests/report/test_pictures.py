"""Pictures: what is drawn is the data, the same data give the same bytes, and no fixed colour keeps them from
dark paper."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import statistics
from importlib.resources import files
from itertools import pairwise

import pytest

from unfreeze.core.errors import DataError
from unfreeze.report.pictures import (
    DEAD_RGB,
    HUES,
    Axes,
    curve,
    heat_map,
    points_json,
    smooth,
    smoothing_window,
    thin,
)

RED = [[False, False], [False, True]]
POINTS = (list(range(1, 41)), [3.0 / step for step in range(1, 41)])


def test_smooth_is_the_median_keeps_a_straight_line_and_leaves_spikes_out():
    line = [float(i) for i in range(50)]
    assert smooth(line, 9) == pytest.approx(line)  # a lagging or leaning one would not
    noisy = [math.sin(i) + (9.0 if i in (7, 30) else 0.0) for i in range(50)]
    wanted = [
        statistics.median(noisy[i - reach : i + reach + 1])
        for i, reach in ((i, min(4, i, 49 - i)) for i in range(50))
    ]
    assert smooth(noisy, 9) == wanted and max(wanted) < 2  # a mean of 9 would climb by 1 around a spike
    assert smooth([2.5], smoothing_window(1)) == [2.5]
    assert [smoothing_window(n) for n in (1, 60, 1000)] == [1, 3, 51]


def test_thin_keeps_the_peaks():
    ys = [0.0] * 50_000
    ys[31_234] = 9.0
    xs, kept = thin(range(50_000), ys)
    assert len(xs) <= 1300 and xs[kept.index(9.0)] == 31_234 and (xs[0], xs[-1]) == (0, 49_999)
    assert thin([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_same_data_same_bytes_and_no_ids_that_could_meet_on_a_page():
    svg = curve(POINTS, "alt", (300, 200), smoothed=True)
    assert svg == curve(POINTS, "alt", (300, 200), smoothed=True) and " id=" not in svg


def test_colours_are_variables_of_the_style_sheet_and_text_is_text():
    svg = curve(POINTS, 'alt "quoted"', (300, 200), smoothed=True, dots=([20], [0.4]), rings={2}, level=1.0)
    svg += heat_map({"1": [1, 2], "2": [3, 0]}, RED, "alt", 350)
    style = files("unfreeze.report").joinpath("templates/style.css").read_text()
    used = set(re.findall(r"var\((--[\w-]+)\)", svg + "".join(HUES)))
    assert used >= {"--accent", "--second", "--bad", "--paper"} and used <= set(
        re.findall(r"(--[\w-]+):", style)
    )
    assert re.findall(r"#[0-9a-f]{6}\b|rgb", re.sub(r"base64,[^\"]*", "", svg)) == []
    assert "<text" in svg and ">0</text>" in svg and "<style" not in svg
    assert 'aria-label="alt &quot;quoted&quot;"' in svg


def test_labels_keep_their_digits():
    svg = curve(([1, 2], [0.0005, 0.001]), "alt", (280, 190), axes=Axes(from_zero=True))
    assert re.findall(r">([\d.e-]+)</text>", svg)[-1] in ("0.001", "0.0010") and ">0.00<" not in svg


def test_memory_axis_has_round_numbers_of_its_unit():
    svg = curve(
        ([1, 2], [400 * 2**20, 410 * 2**20]), "alt", (280, 190), axes=Axes(from_zero=True), y_format="bytes"
    )
    assert ">200 MiB<" in svg and ">400 MiB<" in svg


@pytest.mark.parametrize("log_x", [False, True])
def test_one_point_and_constant_series_can_be_drawn(log_x: bool):
    assert "<circle" in curve(
        ([1], [2.0]), "alt", (300, 200), smoothed=True, axes=Axes(log_x=log_x, from_zero=True)
    )
    assert "<path" in curve(
        ([1, 2, 3], [0.0, 0.0, 0.0]), "alt", (300, 200), axes=Axes(log_x=log_x, from_zero=True)
    )


def test_heat_map_bitmap_is_the_load():
    """Decoded with Pillow: alpha is load over three times the mean, an expert that is to be red is red."""
    from PIL import Image

    svg = heat_map(
        {"1": [4, 4, 4, 4], "2": [0, 1, 3, 12]}, [[False] * 4, [True, False, False, False]], "alt", 350
    )
    data = re.search(r"base64,([^\"]+)", svg)
    assert data
    image = Image.open(io.BytesIO(base64.b64decode(data[1]))).convert("RGBA")
    assert image.size == (4, 2)
    rows = [[image.getpixel((x, y)) for x in range(4)] for y in range(2)]
    assert [pixel[3] for pixel in rows[0]] == [85] * 4
    assert rows[1][0] == (*DEAD_RGB, 255)
    assert [pixel[3] for pixel in rows[1][1:]] == [21, 64, 255]


def test_layers_with_different_numbers_of_experts_are_refused():
    with pytest.raises(DataError, match="1: 2, 2: 3"):
        heat_map({"1": [1, 2], "2": [1, 2, 3]}, RED, "alt", 350)


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    svg = curve(
        (list(range(1, 6)), [10.0 ** (2 - step) for step in range(1, 6)]),
        "alt",
        (300, 200),
        axes=Axes(log_y=True),
    )
    (d,) = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--accent\)', svg)
    ys = [float(y) for y in re.findall(r"[ML] [-\d.]+ ([-\d.]+)", d)]
    gaps = [after - before for before, after in pairwise(ys)]
    assert gaps == pytest.approx([gaps[0]] * 4, abs=0.03) and gaps[0] > 20


def placed(svg: str, x: float, y: float) -> tuple[float, float]:
    """Where page.js puts a value: a share of the way between the axes' ends, of logarithms on a logarithmic
    axis."""
    place = re.search(r'data-axes="([^"]+)"', svg)
    assert place
    left, top, right, bottom, x0, x1, y0, y1, x_log, y_log = map(float, place[1].split())

    def share(value: float, low: float, high: float, log: float) -> float:
        return math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)

    return left + (right - left) * share(x, x0, x1, x_log), bottom - (bottom - top) * share(y, y0, y1, y_log)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"axes": Axes(log_x=True)},
        {"axes": Axes(log_y=True)},
        {"axes": Axes(from_zero=True), "y_format": "bytes"},
    ],
)
def test_what_is_told_under_the_pointer_lies_on_the_line(form: dict):
    points = ([1, 2, 5, 9, 12], [3e9, 1e9, 2e9, 5e8, 4e9])
    svg = curve(points, "alt", (760, 320), **form)
    (told,) = json.loads(points_json({"memory": points, "absent": ([], [])}, form.get("y_format", "number")))
    (d,) = re.findall(r'<path d="([^"]*)"[^>]*style="fill: none; stroke: var\(--accent\)', svg)
    drawn = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", d)]
    assert told["x"] == points[0] and told["unit"] == (" GiB" if "y_format" in form else "")
    for (x, y), at in zip(drawn, zip(told["x"], told["y"], strict=True), strict=True):
        assert placed(svg, *at) == pytest.approx((x, y), abs=0.02)  # coordinates are cut to hundredths


def test_control_arm_a_place_without_its_unit_is_off_the_line():
    svg = curve(([1, 2], [1e9, 2e9]), "alt", (760, 320), y_format="bytes")
    assert placed(svg, 1, 1e9)[1] != pytest.approx(placed(svg, 1, 1e9 / 2**30)[1], abs=100)
