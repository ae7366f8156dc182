"""Axes: ticks are round numbers inside of them, labels stay inside the picture, a bitmap is a PNG."""

import io
import math
import re

import pytest
from PIL import Image

from unfreeze.report.axes import (
    CHARACTER,
    NICE,
    WHOLE,
    Axis,
    Plot,
    around,
    frame,
    log_ticks,
    png,
    round_ticks,
)


@pytest.mark.parametrize("low", [0.0, -3.7, 0.0123, 99_999.0])
@pytest.mark.parametrize("span", [1e-6, 0.3, 1.0, 7.7, 12.5, 4096.0])
@pytest.mark.parametrize("most", [3, 4, 6])
def test_round_ticks_are_few_multiples_of_a_nice_step(low: float, span: float, most: int):
    axis = Axis(low, low + span)
    ticks = round_ticks(axis, most)
    assert 2 <= len(ticks) <= most + 1
    assert all(axis.low - span * 1e-6 <= tick <= axis.high + span * 1e-6 for tick in ticks)
    rough = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
    power = 10 ** math.floor(math.log10(rough) + 1e-3)
    (step,) = {power * nice for nice in NICE if power * nice == pytest.approx(rough, rel=1e-2)}
    assert ticks == pytest.approx([round(tick / step) * step for tick in ticks], rel=1e-9)


def test_one_value_is_a_tick_in_the_middle():
    """A run whose only step has its number at both ends."""
    axis = Axis(3.0, 3.0)
    assert round_ticks(axis, 6) == [3.0] and axis.share(3.0) == 0.5
    assert log_ticks(Axis(3.0, 3.0, log=True), (1.0, 2.0), 6) == [3.0]


def test_steps_of_a_run_have_whole_ticks():
    assert round_ticks(around([1, 2], 0.05), 8, WHOLE, least=1.0) == [1, 2]
    assert round_ticks(around([1], 0.05), 8, WHOLE, least=1.0) == [1]
    assert round_ticks(around([1, 370], 0.05), 4, WHOLE, least=1.0) == [0, 100, 200, 300]


@pytest.mark.parametrize(
    ("low", "high", "subs", "most", "ticks"),
    [
        (1e3, 4e5, (1, 3), 6, [1e3, 3e3, 1e4, 3e4, 1e5, 3e5]),
        (1e-3, 9.0, (1,), 9, [1e-3, 1e-2, 0.1, 1]),
        (1.0, 1e12, (1,), 6, [1, 1e3, 1e6, 1e9, 1e12]),  # every third power
        (2.1, 4.6, (1, 3), 4, [2.5, 3, 3.5, 4, 4.5]),  # 3 alone would not show the scale
    ],
)
def test_log_ticks(low: float, high: float, subs: tuple[float, ...], most: int, ticks: list[float]):
    assert log_ticks(Axis(low, high, log=True), subs, most) == ticks


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], [-1.0, 3.0], [1e-9, 1e9]])
@pytest.mark.parametrize("log", [False, True])
def test_all_values_lie_inside_with_room_on_both_sides(values: list[float], log: bool):
    if log and min(values) <= 0:
        return
    axis = around(values, 0.05, log=log)
    assert all(0 < axis.share(value) < 1 for value in values)
    assert axis.share(axis.low) == 0 and axis.share(axis.high) == pytest.approx(1)


def test_labels_stay_inside_of_the_picture():
    x, y = [(0.0, "0"), (1.0, "1,000,000")], [(0.0, "0"), (1.0, "1,234,567 MiB")]
    plot = Plot()
    plot.line([0, 1], [0, 1], "")
    svg = plot.svg((300, 200), "alt", (Axis(0, 1), Axis(0, 1)), x, y)
    for at, anchor, words in re.findall(r'<text x="([\d.]+)".*?text-anchor: (\w+);[^>]*>([^<]+)<', svg):
        width = len(words) * CHARACTER
        left = float(at) - {"end": width, "middle": width / 2}[anchor]
        assert left >= -0.01 and left + width <= 300.01, words
    narrow = frame((300, 200), x, [])  # control arm: without its room the widest label would not fit
    assert narrow.left < len(y[1][1]) * CHARACTER


def test_words_are_escaped():
    plot = Plot()
    plot.dots([0], [0], 1, "")
    svg = plot.svg((300, 200), "<b>", (Axis(-1, 1), Axis(-1, 1)), [(0, "<i>")], [])
    assert "<i>" not in svg and "&lt;i&gt;" in svg and 'aria-label="&lt;b&gt;"' in svg


def test_a_pointer_over_a_dot_or_a_line_is_told_the_values():
    plot = Plot()
    plot.dots([1, 2], [3.0, 4.5], 1, "")
    plot.line([1, 2, 3], [6.573, 3, 2.554], "")
    svg = plot.svg((300, 200), "", (Axis(0, 4), Axis(0, 7)), [], [])
    assert re.findall("<title>(.*?)</title>", svg) == ["1: 3", "2: 4.5", "1: 6.573 → 3: 2.554"]


def test_a_png_is_what_pillow_reads():
    rows = [[(1, 2, 3, 4), (255, 0, 9, 128)], [(0, 0, 0, 0), (7, 7, 7, 255)], [(5, 6, 7, 8), (9, 9, 9, 9)]]
    image = Image.open(io.BytesIO(png(rows)))
    image.load()
    assert (image.mode, image.size) == ("RGBA", (2, 3))
    assert [[image.getpixel((x, y)) for x in range(2)] for y in range(3)] == rows
