"""Pictures of a run as inline SVG: matplotlib draws, the page's style sheet colours.

Each picture is drawn with placeholder colours that become CSS variables, so that one SVG reads well on light
and on dark paper; text stays text in the page's own font. The same events give the same bytes: fixed hash
salt, no date. Only Figure objects, no pyplot state.
A picture is a pair of SVGs where its text would be too small on a phone: `wide` and `narrow`, one of them
hidden by the style sheet.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from unfreeze.core.errors import DataError
from unfreeze.core.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = tuple[Sequence[float], Sequence[float]]

# Placeholders: colours nobody would draw with. After drawing they become the variables of style.css.
INK, MUTED, LINE, ACCENT, SECOND, PAPER, BAD = (f"#a1000{i}" for i in range(1, 8))
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    ACCENT: "--accent",
    SECOND: "--second",
    PAPER: "--paper",
    BAD: "--bad",
}
HUES = tuple(f"#a1001{i}" for i in range(6))  # one per run or layer in a picture of several lines
VARIABLES |= {hue: f"--hue-{i}" for i, hue in enumerate(HUES)}
DASHES = ((0, ()), (0, (5, 2)))  # after the last hue the hues come again, dashed
MOST_LINES = len(HUES) * len(DASHES)
# heat is a bitmap: mid tones that stand out on light and on dark paper
HEAT_RGB, DEAD_RGB = ((0x3F, 0x8F, 0xD0), (0xD0, 0x49, 0x3F))
PX = 1 / 72  # one SVG unit, in matplotlib's inches
MOST_POINTS = 1200  # per line: about one per pixel of the widest picture; more only makes the page heavy


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Smooth by a centred mean over `window` (odd) values.

    Towards both ends the window shrinks on both sides alike, so that it stays centred.
    """
    prefix = [0.0]
    for value in values:
        prefix.append(prefix[-1] + value)
    means = []
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        means.append((prefix[i + reach + 1] - prefix[i - reach]) / (2 * reach + 1))
    return means


def smoothing_window(count: int) -> int:
    """Odd, about a twentieth of the run: a run of 60 steps is smoothed over 3, one of 1000 over 51."""
    return max(1, count // 20) | 1


def thin(
    xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[float], list[float]]:
    """At most `most` points that keep every peak: the lowest and the highest of each stretch."""
    if len(xs) <= most:
        return list(xs), list(ys)
    stretch = math.ceil(2 * len(xs) / most)
    kept: set[int] = {0, len(xs) - 1}
    for begin in range(0, len(xs), stretch):
        part = range(begin, min(begin + stretch, len(xs)))
        kept |= {min(part, key=lambda i: ys[i]), max(part, key=lambda i: ys[i])}
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def curve(
    name: str,
    points: Points,
    alt: str,
    size: tuple[int, int],
    *,
    smoothed: bool = False,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
    y_format: str = "number",
    dots: Points = ((), ()),
    rings: Collection[float] = (),
    level: float | None = None,
) -> str:
    """Draw one line over steps (or over tokens with log_x) as SVG of `size` units.

    smoothed: faint raw line, strong mean. dots: validation.
    log_y: equal distances are equal factors; every value must be above 0.
    rings: the x of points to be ringed. level: a dashed line across, left out where all points lie below it
    (it would flatten them).
    y_format: "number" | "count" | "bytes". `name` keeps the SVG's internal ids apart from other pictures' on
    the page.
    """
    figure, axes = _figure(size)
    xs, ys = points
    # the line, in the unit of the axis; smoothed: faint raw line below the strong mean
    unit, label = _unit(max(ys), y_format)
    ys = [value / unit for value in ys]
    if len(xs) == 1:
        axes.plot(xs, ys, "o", color=ACCENT, markersize=4)
    elif smoothed:
        axes.plot(*thin(xs, ys), color=ACCENT, alpha=0.35, linewidth=1)
        axes.plot(*thin(xs, smooth(ys, smoothing_window(len(ys)))), color=ACCENT, linewidth=2)
    else:
        axes.plot(*thin(xs, ys), color=ACCENT, linewidth=1.5)
    # on top of it: validation, the clip limit, rings around named steps
    if dots[0]:
        axes.plot(dots[0], [value / unit for value in dots[1]], "o-", color=SECOND, markersize=4, linewidth=1)
    if level is not None and level / unit <= max(ys):
        axes.axhline(level / unit, color=SECOND, linewidth=1, linestyle=DASHES[1])
    if ringed := [i for i, x in enumerate(xs) if x in rings]:
        at = [xs[i] for i in ringed], [ys[i] for i in ringed]
        axes.plot(*at, "o", color=BAD, markersize=7, markeredgewidth=1.5, fillstyle="none", clip_on=False)
    _scales(axes, size, xs, max(ys), label, log_x=log_x, log_y=log_y, from_zero=from_zero)
    return _svg(figure, name, alt, axes)


def points_json(named: Mapping[str, Points], y_format: str = "number") -> str:
    """Give the points of a picture's lines as JSON for page.js.

    [{"name", "unit", "x", "y"}], y in the axis' unit, six digits.
    """
    top = max((max(ys) for _, ys in named.values() if ys), default=0.0)
    unit, label = _unit(top, y_format)
    told = []
    for name, (xs, ys) in named.items():
        if ys:
            few_xs, few_ys = thin(xs, ys)
            told.append(
                {"name": name, "unit": label, "x": few_xs, "y": [float(f"{y / unit:.6g}") for y in few_ys]}
            )
    return json.dumps(told, ensure_ascii=False, separators=(",", ":"))


def lines(
    name: str,
    points: Sequence[Points],
    alt: str,
    size: tuple[int, int],
    *,
    smoothed: bool = False,
    from_zero: bool = False,
) -> str:
    """Draw several lines over steps on one pair of axes as SVG.

    The i-th has HUES[i % 6], from the seventh on dashed. An empty one is left out.
    smoothed: the mean of smooth() instead of the raw line (two dozen raw lines over one another show
    nothing).
    """
    figure, axes = _figure(size)
    for i, (xs, ys) in enumerate(points):
        colour, dash = HUES[i % len(HUES)], DASHES[i // len(HUES) % len(DASHES)]
        if len(xs) == 1:
            axes.plot(xs, ys, "o", color=colour, markersize=4)
        elif len(xs) > 1:
            shown = smooth(ys, smoothing_window(len(ys))) if smoothed else ys
            axes.plot(*thin(xs, shown), color=colour, linewidth=1.75, linestyle=dash)
    steps, values = [x for xs, _ in points for x in xs], [y for _, ys in points for y in ys]
    _scales(axes, size, steps, max(values), "", from_zero=from_zero)
    return _svg(figure, name, alt, axes)


def _scales(
    axes: Axes,
    size: tuple[int, int],
    xs: Sequence[float],
    top: float,
    label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    from_zero: bool = False,
) -> None:
    """Limits, ticks and their labels; top is the highest value drawn, label the unit behind each number."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    # y from zero with 12 % of room above, or a margin on both sides
    if from_zero:
        axes.set_ylim(0, top * 1.12 or 1)
        axes.spines["bottom"].set_visible(False)  # the grid line at zero stands there already
    else:
        axes.margins(y=0.08)
    # x: whole steps, or decades of tokens with ticks in between where there are few
    if log_x:
        axes.set_xscale("log")
        decades = math.log10(max(xs) / min(xs))
        subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.5 else (1.0, 2.0, 5.0)
        axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=max(3, size[0] // 90), integer=True))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: format_count(value) if value >= 10_000 or log_x else f"{value:,.0f}")
    )
    # y: round numbers of the unit, or decades likewise
    if log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        decades = math.log10(high / low)
        subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4 if size[1] < 220 else 6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value, label)))


def heat_map(
    name: str, load: Mapping[str, Sequence[int]], red: Sequence[Sequence[bool]], alt: str, width: int
) -> str:
    """Expert load, layers down and experts across, as SVG `width` units wide.

    Strength of colour = tokens / mean of the layer, full at FULL times the mean; red[layer][expert]: drawn
    in red.
    Raises DataError where layers have different numbers of experts.
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
    return heat(name, strength, red, alt, width, rows=layers, ticks=ticks, axes=("expert", "layer"))


def heat(
    name: str,
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

    Rows go downward and are named by `rows`; columns go across and are named at `ticks` (column, word).
    strength 0 to 1: 0 is the paper, 1 the full colour, more is drawn as 1. dead: cells in red. axes: what is
    across, what is down.
    """
    import numpy as np

    # a bitmap: colour in RGB, strength in alpha, so that it reads on light and dark paper
    strength_RC = np.array(strength, dtype=float)
    num_rows, num_columns = strength_RC.shape
    image = np.zeros((num_rows, num_columns, 4), dtype=np.uint8)
    image[..., :3] = HEAT_RGB
    image[..., 3] = np.rint(255 * np.clip(strength_RC, 0.0, 1.0))
    if dead is not None:
        image[np.array(dead, dtype=bool)] = (*DEAD_RGB, 255)

    height = min(max(18 * num_rows, 40), 460) + 40
    figure, plot = _figure((width, height))
    plot.imshow(
        image, aspect="auto", interpolation="none", extent=(-0.5, num_columns - 0.5, num_rows - 0.5, -0.5)
    )
    plot.grid(False)
    # paper-coloured gaps between cells, where cells are large enough to have them
    if num_columns <= width // 10 and num_rows <= 40:
        plot.vlines(
            [i + 0.5 for i in range(num_columns - 1)], -0.5, num_rows - 0.5, color=PAPER, linewidth=1.5
        )
        plot.hlines(
            [i + 0.5 for i in range(num_rows - 1)], -0.5, num_columns - 0.5, color=PAPER, linewidth=1.5
        )
    # a name about every 16 units downward
    every = math.ceil(num_rows / max(1, (height - 40) // 16))
    plot.set_yticks(range(0, num_rows, every), [rows[i] for i in range(0, num_rows, every)], parse_math=False)
    plot.set_xticks([column for column, _ in ticks], [word for _, word in ticks])
    plot.set_xlabel(axes[0])
    plot.set_ylabel(axes[1])
    plot.spines["bottom"].set_visible(False)
    return _svg(figure, name, alt)


# a load of three times the layer's mean has full colour: twice as much as a well balanced layer ever shows
FULL = 3.0


def _round_up(value: float) -> int:
    """The next of 1, 2, 4, 8, 16, 32, 64: ticks on the boundaries that counts of experts have."""
    return 1 << max(0, math.ceil(math.log2(max(value, 1))))


def _unit(top: float, y_format: str) -> tuple[float, str]:
    """Give (size, name) of the unit in which the axis is drawn.

    Chosen so that its ticks are round numbers of that unit.
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


def _figure(size: tuple[int, int]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * PX, size[1] * PX), dpi=72, layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.grid(axis="y", color=LINE, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)
    axes.tick_params(labelsize=11, labelcolor=MUTED, pad=5)
    axes.xaxis.label.set(color=MUTED, fontsize=11)
    axes.yaxis.label.set(color=MUTED, fontsize=11)
    return figure, axes


def _svg(figure: Figure, name: str, alt: str, axes: Axes | None = None) -> str:
    """Give the figure as one <svg role="img"> named `alt`, colours as CSS variables.

    Without prolog, metadata, style rules or unused ids.
    axes: those of a curve; where they lie and what they measure goes along for page.js.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    # keep what a browser needs: no metadata, no style rules, no ids, coordinates to a hundredth
    text = out.getvalue()
    box = re.search(r'viewBox="([^"]+)"', text)
    body = re.search(r"<svg[^>]*>(.*)</svg>", text, flags=re.DOTALL)
    assert box and body, "matplotlib wrote no SVG"
    inner = re.sub(
        r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->|<defs>\s*</defs>",
        "",
        body[1],
        flags=re.DOTALL,
    )
    inner = re.sub(
        r'<g id="[^"]*"/>|(?<=base64,)\s+| transform="rotate\(-0 [^"]*"|font-size: [^;]*; font-family:'
        r" [^;]*; ",
        "",
        inner,
    )
    inner = re.sub(r'<g id="[^"]*">', "<g>", inner)
    # Coordinates to a hundredth of a unit, below any screen's pixel; the numbers of the labels, outside the
    # attributes, stay as they are.
    inner = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), inner)
    inner = re.sub(r"\s*\n\s*", "\n", inner)
    for colour, variable in VARIABLES.items():
        inner = inner.replace(colour, f"var({variable})")
    told = f' data-axes="{_place(figure, axes)}"' if axes else ""
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(alt)}"{told}>{inner.strip()}</svg>'


def _place(figure: Figure, axes: Axes) -> str:
    """Give where an axis lies and what it measures, as page.js reads it.

    left top right bottom (SVG units), x and y limits (units of the labels), then 1 for a logarithmic axis x,
    y, or 0.
    """
    width, height = (inches / PX for inches in figure.get_size_inches())
    box = axes.get_position()
    sides = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
    scales = (int(scale == "log") for scale in (axes.get_xscale(), axes.get_yscale()))
    return " ".join(f"{value:.8g}" for value in (*sides, *axes.get_xlim(), *axes.get_ylim(), *scales))
