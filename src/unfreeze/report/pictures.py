"""Pictures of a run as inline SVG: curves, lines of several runs, grids of cells.

The same events give the same bytes. If a picture's text would be too small on a phone, there are two SVGs,
`wide` and `narrow`; the style sheet hides one.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from unfreeze.core.errors import DataError
from unfreeze.core.units import format_count
from unfreeze.report.axes import (
    ACCENT,
    BAD,
    PAPER,
    SECOND,
    WHOLE,
    Axis,
    Plot,
    Ticks,
    around,
    axis_labels,
    bitmap,
    frame,
    log_ticks,
    round_ticks,
    svg,
    svg_path,
)

Points = tuple[Sequence[float], Sequence[float]]

HUES = tuple(f"var(--hue-{i})" for i in range(6))  # colours of lines in a picture with several
DASHES = ("", "; stroke-dasharray: 5, 2")  # after the last colour, colours repeat with dashes
MOST_LINES = len(HUES) * len(DASHES)
# heat maps are bitmaps: mid tones are visible on light and dark backgrounds
HEAT_RGB, DEAD_RGB = ((0x3F, 0x8F, 0xD0), (0xD0, 0x49, 0x3F))
MOST_POINTS = 1200  # per line: about one per pixel of the widest picture; more only makes the page larger


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Smooth by a centred median over `window` (odd) values; unlike a mean, it ignores spikes.

    Near the ends the window shrinks on both sides equally, so that it stays centred.
    """
    medians, held, low, high = [], list[float](), 0, 0
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        while high < i + reach + 1:
            insort(held, values[high])
            high += 1
        while low < i - reach:
            held.pop(bisect_left(held, values[low]))
            low += 1
        medians.append(held[len(held) // 2])
    return medians


def smoothing_window(count: int) -> int:
    """Odd window of about a twentieth of the run: 3 for 60 steps, 51 for 1000."""
    return max(1, count // 20) | 1


def thin(
    xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """Reduce to at most `most` points but keep peaks: the lowest and highest point of each range."""
    if len(xs) <= most:
        return list(xs), list(ys)
    stretch = math.ceil(2 * len(xs) / most)
    places: set[int] = {0, len(xs) - 1}
    for begin in range(0, len(xs), stretch):
        part = range(begin, min(begin + stretch, len(xs)))
        places |= {min(part, key=lambda i: ys[i]), max(part, key=lambda i: ys[i])}
    order = sorted(places)
    return [xs[i] for i in order], [ys[i] for i in order]


class Axes(NamedTuple):
    """Options of axes. log_x, log_y: logarithmic; log_y needs values above 0. from_zero: y starts at 0."""

    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False


PLAIN = Axes()


def curve(
    points: Points,
    alt: str,
    size: tuple[int, int],
    *,
    smoothed: bool = False,
    axes: Axes = PLAIN,
    y_format: str = "number",
    dots: Points = ((), ()),
    rings: Collection[float] = (),
    level: float | None = None,
) -> str:
    """Draw one line over steps (or over tokens with axes.log_x) as SVG of `size` units.

    smoothed: faint raw line, strong median. dots: validation.
    rings: the x of points to ring. level: a dashed horizontal line, left out if all points are below it, as
    it would flatten them. y_format: "number" | "count" | "bytes".
    """
    plot = Plot()
    xs, ys = points
    # the line, in the axis's unit; if smoothed, a faint raw line below the strong median
    unit, label = _unit(max(ys), y_format)
    ys = [value / unit for value in ys]
    if len(xs) == 1:
        plot.dots(xs, ys, 2.5, f"fill: {ACCENT}")
    elif smoothed:
        plot.line(*thin(xs, ys), f"stroke: {ACCENT}; stroke-opacity: 0.35")
        plot.line(*thin(xs, smooth(ys, smoothing_window(len(ys)))), f"stroke: {ACCENT}; stroke-width: 2")
    else:
        plot.line(*thin(xs, ys), f"stroke: {ACCENT}; stroke-width: 1.5")
    # on top of it: validation, the clip limit, rings around named steps
    if dots[0]:
        at = dots[0], [value / unit for value in dots[1]]
        plot.line(*at, f"stroke: {SECOND}")
        plot.dots(*at, 2.5, f"fill: {SECOND}")
    if level is not None and level / unit <= max(ys):
        plot.line([min(xs), max(xs)], [level / unit] * 2, f"stroke: {SECOND}{DASHES[1]}")
    if ringed := [i for i, x in enumerate(xs) if x in rings]:
        at = [xs[i] for i in ringed], [ys[i] for i in ringed]
        plot.dots(*at, 3.5, f"fill: none; stroke: {BAD}; stroke-width: 1.5")
    return _scaled(plot, alt, size, label, axes)


def points_json(named: Mapping[str, Points], y_format: str = "number") -> str:
    """Points of a picture's lines as JSON for page.js.

    [{"name", "unit", "x", "y"}], y in the axis's unit with six digits.
    """
    top = max((max(ys) for _, ys in named.values() if ys), default=0.0)
    unit, label = _unit(top, y_format)
    series = []
    for name, (xs, ys) in named.items():
        if ys:
            few_xs, few_ys = thin(xs, ys)
            series.append(
                {"name": name, "unit": label, "x": few_xs, "y": [float(f"{y / unit:.6g}") for y in few_ys]}
            )
    return json.dumps(series, ensure_ascii=False, separators=(",", ":"))


def lines(
    points: Sequence[Points],
    alt: str,
    size: tuple[int, int],
    *,
    smoothed: bool = False,
    from_zero: bool = False,
) -> str:
    """Draw several lines over steps on one pair of axes as SVG.

    Line i has HUES[i % 6], dashed from the seventh on. Empty lines are left out.
    smoothed: draw the median of smooth() instead of the raw line, as many raw lines are unreadable.
    """
    plot = Plot()
    for i, (xs, ys) in enumerate(points):
        colour, dash = HUES[i % len(HUES)], DASHES[i // len(HUES) % len(DASHES)]
        if len(xs) == 1:
            plot.dots(xs, ys, 2.5, f"fill: {colour}")
        elif len(xs) > 1:
            shown = smooth(ys, smoothing_window(len(ys))) if smoothed else ys
            plot.line(*thin(xs, shown), f"stroke: {colour}; stroke-width: 1.75{dash}")
    return _scaled(plot, alt, size, "", Axes(from_zero=from_zero))


def bands(
    lines: Sequence[tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]],
    alt: str,
    size: tuple[int, int],
) -> str:
    """Draw lines with a band around each as SVG. A line is xs, ys, and the band's ends at each x."""
    plot = Plot()
    for i, (xs, _, low, high) in enumerate(lines):
        plot.area(
            [*xs, *reversed(xs)], [*low, *reversed(high)], f"fill: {HUES[i % len(HUES)]}; fill-opacity: 0.15"
        )
    for i, (xs, ys, _, _) in enumerate(lines):
        colour, dash = HUES[i % len(HUES)], DASHES[i // len(HUES) % len(DASHES)]
        plot.line(*thin(xs, ys), f"stroke: {colour}; stroke-width: 1.75{dash}")
    return _scaled(plot, alt, size, "", PLAIN)


def _scaled(plot: Plot, alt: str, size: tuple[int, int], label: str, axes: Axes) -> str:
    """Draw the plot with fitted axes, ticks and labels. label: the unit after each number."""
    # x: whole steps, or decades of tokens, with ticks in between if they are few
    across = around(plot.xs, 0.05, log=axes.log_x)
    if axes.log_x:
        at = log_ticks(across, _subs(across, 1.5), 6)
    else:
        at = round_ticks(across, max(3, size[0] // 90), WHOLE, least=1.0)
    x = [(value, format_count(value) if value >= 10_000 or axes.log_x else f"{value:,.0f}") for value in at]
    # y: round numbers of the unit from zero with 12 % of room above, or a margin on both sides; or decades
    up = Axis(0.0, max(plot.ys) * 1.12 or 1.0) if axes.from_zero else around(plot.ys, 0.08, log=axes.log_y)
    if axes.log_y:
        at = log_ticks(up, _subs(up, 1), 9)
    else:
        at = round_ticks(up, 4 if size[1] < 220 else 6)
    y: Ticks = [(value, _tick(value, label)) for value in at]
    return plot.svg(size, alt, (across, up), x, y)


def _subs(axis: Axis, few: float) -> tuple[float, ...]:
    """Multiples of powers of ten that get ticks. few: with at most this many decades, three per decade."""
    decades = math.log10(axis.high / axis.low)
    return (1.0,) if decades > 3 else (1.0, 3.0) if decades > few else (1.0, 2.0, 5.0)


def heat_map(load: Mapping[str, Sequence[int]], red: Sequence[Sequence[bool]], alt: str, width: int) -> str:
    """Draw expert load, layers down and experts across, as SVG `width` units wide.

    Colour strength = tokens / mean of the layer, full at FULL times the mean. red[layer][expert]: draw in
    red. Raises DataError if layers have different numbers of experts.
    """
    layers, num_experts = list(load), len(next(iter(load.values())))
    if any(len(counts) != num_experts for counts in load.values()):
        raise DataError(
            "layers have different numbers of experts: "
            + ", ".join(f"{layer}: {len(load[layer])}" for layer in layers)
        )
    means = [max(sum(counts) / num_experts, 1e-12) for counts in load.values()]
    strength = [
        [count / mean / FULL for count in counts] for counts, mean in zip(load.values(), means, strict=True)
    ]
    across = _round_up(num_experts * 34 / width)
    ticks = [(i, str(i)) for i in range(0, num_experts, across)]
    return heat(strength, red, alt, width, rows=layers, ticks=ticks, axes=("expert", "layer"))


def heat(
    strength: Sequence[Sequence[float]],
    dead: Sequence[Sequence[bool]] | None,
    alt: str,
    width: int,
    *,
    rows: Sequence[str],
    ticks: Sequence[tuple[int, str]],
    axes: tuple[str, str],
) -> str:
    """Draw a grid of cells as SVG `width` units wide.

    `rows` names the rows; `ticks` (column, word) names columns.
    strength: 0 is the background, 1 the full colour, more is drawn as 1. dead: cells in red. axes: names of
    the horizontal and the vertical axis.
    """
    # a bitmap with colour in RGB and strength in alpha, for light and dark backgrounds
    num_rows, num_columns = len(strength), len(strength[0])
    pixels = [[(*HEAT_RGB, round(255 * min(max(value, 0.0), 1.0))) for value in cells] for cells in strength]
    for row, cells in enumerate(dead or ()):
        for column, red in enumerate(cells):
            if red:
                pixels[row][column] = (*DEAD_RGB, 255)

    height = min(max(18 * num_rows, 40), 460) + 40
    # a name about every 16 units downward
    every = math.ceil(num_rows / max(1, (height - 40) // 16))
    x = [((column + 0.5) / num_columns, word) for column, word in ticks]
    y = [(1 - (i + 0.5) / num_rows, rows[i]) for i in range(0, num_rows, every)]
    field = frame((width, height), x, y, axes)
    parts = [bitmap(field, pixels), axis_labels(field, x, y, axes)]
    # gaps between cells, if cells are large enough
    if num_columns <= width // 10 and num_rows <= 40:
        style = f"stroke: {PAPER}; stroke-width: 1.5"
        for share in (i / num_columns for i in range(1, num_columns)):
            parts.append(svg_path([(field.x(share), field.top), (field.x(share), field.bottom)], style))
        for share in (i / num_rows for i in range(1, num_rows)):
            parts.append(svg_path([(field.left, field.y(share)), (field.right, field.y(share))], style))
    return svg(field, alt, parts)


# three times the layer's mean has full colour: about twice the maximum of a well-balanced layer
FULL = 3.0


def _round_up(value: float) -> int:
    """Round up to a power of two, as expert counts usually are multiples of one."""
    return 1 << max(0, math.ceil(math.log2(max(value, 1))))


def _unit(top: float, y_format: str) -> tuple[float, str]:
    """Return (size, name) of the axis's unit.

    It is chosen so that ticks are round numbers in it.
    """
    if y_format == "bytes":
        power = min(4, int(math.log2(max(top, 1)) // 10))
        return 1024.0**power, " " + ("B", "KiB", "MiB", "GiB", "TiB")[power]
    if y_format == "count" and top >= 10_000:
        return (1e6, " M") if top >= 1e7 else (1e3, " K")
    return 1.0, ""


def _tick(value: float, label: str) -> str:
    if value == 0:
        return "0"
    words = f"{value:,.6g}" if abs(value) >= 1e-3 else f"{value:.3g}".replace("e-0", "e-")
    return words + label
