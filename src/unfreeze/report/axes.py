"""A pair of axes as inline SVG: scales, ticks, lines, dots, a bitmap.

Colours are CSS variables and text uses the page's font, so a picture works on light and dark backgrounds.
Positions are in SVG units from the top left; `values` are data values.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

INK, MUTED, LINE, ACCENT, SECOND, PAPER, BAD = (
    f"var(--{name})" for name in ("ink", "muted", "line", "accent", "second", "paper", "bad")
)
CHARACTER = 6.8  # SVG units: width of a digit at 11 pixels (style.css), in the widest font
TEXT = 11.0
GAP = 5.0  # between a label and the axis
NICE = (1.0, 2.0, 2.5, 5.0, 10.0)
WHOLE = (1.0, 2.0, 5.0, 10.0)

Ticks = Sequence[tuple[float, str]]
"""(value, label) pairs."""


class Axis(NamedTuple):
    """Values at both ends of an axis. log: True for a logarithmic axis."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Position between low and high, 0 to 1; 0.5 if they are equal."""
        if self.low == self.high:
            return 0.5
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def around(values: Sequence[float], margin: float, *, log: bool = False) -> Axis:
    """Make an axis that contains the values, with `margin` of their range on both sides."""
    low, high = min(values), max(values)
    if log:
        room = (high / low) ** margin if high > low else 2.0
        return Axis(low / room, high * room, log=True)
    room = (high - low) * margin if high > low else abs(low) * 0.05 or 0.5
    return Axis(low - room, high + room)


def round_ticks(axis: Axis, most: int, steps: Sequence[float] = NICE, least: float = 0.0) -> list[float]:
    """Ticks at multiples of a round number inside the axis: as many as possible, up to most + 1.

    least: smallest distance between two ticks. An axis without a range gets a tick at its value.
    """
    if axis.low == axis.high:
        return [axis.low]
    finest = max((axis.high - axis.low) / (most + 2), least)
    power = 10.0 ** math.floor(math.log10(finest))
    for step in (power * scale * nice for scale in (1.0, 10.0) for nice in steps):
        first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
        if step >= finest * (1 - 1e-9) and last - first <= most:
            return [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    raise AssertionError("a step ten times the finest has fewer ticks")


def log_ticks(axis: Axis, subs: Sequence[float], most: int) -> list[float]:
    """Ticks at `subs` times powers of ten inside the axis; only every n-th power if they exceed `most`.

    Round numbers if fewer than two are inside.
    """
    powers = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    for every in range(1, len(powers) + 1):
        ticks = [sub * 10.0**power for power in powers if power % every == 0 for sub in subs]
        inside = [float(f"{tick:.12g}") for tick in ticks if axis.low <= tick <= axis.high]
        if len(inside) <= most:
            break
        subs = (1.0,)
    return inside if len(inside) > 1 else round_ticks(axis, most)


class Frame(NamedTuple):
    """Sides of the plotting area, and size of the whole picture."""

    left: float
    top: float
    right: float
    bottom: float
    width: float
    height: float

    def x(self, share: float) -> float:
        return self.left + (self.right - self.left) * share

    def y(self, share: float) -> float:
        """Position of a share; 0 is the bottom."""
        return self.bottom - (self.bottom - self.top) * share


def frame(
    size: tuple[int, int], x: Ticks, y: Ticks, titles: tuple[str, str] = ("", ""), above: float = 0.0
) -> Frame:
    """Frame with room for labels, for titles below and left of them, and for `above` units on top."""
    width, height = size
    left = max((len(words) for _, words in y), default=0) * CHARACTER + GAP + bool(titles[1]) * (TEXT + GAP)
    right = max(len(x[-1][1]) * CHARACTER / 2 if x else 0.0, GAP)
    bottom = TEXT + 2 * GAP + bool(titles[0]) * (TEXT + GAP)
    return Frame(left, above + TEXT / 2 + 1, width - right, height - bottom, width, height)


def digits(value: float) -> str:
    """Format a position to a hundredth of a unit, less than any pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def svg_text(
    x: float, y: float, words: str, anchor: str, *, turned: bool = False, colour: str = MUTED
) -> str:
    """A label, vertically centred at y."""
    turn = f' transform="rotate(-90 {digits(x)} {digits(y)})"' if turned else ""
    place = f'x="{digits(x)}" y="{digits(y)}" dy="0.35em"{turn}'
    return f'<text {place} style="text-anchor: {anchor}; fill: {colour}">{escape(words)}</text>'


def axis_labels(field: Frame, x: Ticks, y: Ticks, titles: tuple[str, str] = ("", "")) -> str:
    """Labels along both axes; tick positions are shares of the axis."""
    below = field.bottom + GAP + TEXT / 2
    parts = [svg_text(field.x(share), below, words, "middle") for share, words in x]
    parts += [svg_text(field.left - GAP, field.y(share), words, "end") for share, words in y]
    if titles[0]:
        parts.append(svg_text(field.x(0.5), below + TEXT + GAP, titles[0], "middle"))
    if titles[1]:
        parts.append(svg_text(TEXT / 2, field.y(0.5), titles[1], "middle", turned=True))
    return "\n".join(parts)


def svg_path(points: Sequence[tuple[float, float]], style: str, title: str = "") -> str:
    """A line through the points. style: CSS of the stroke. title: shown on hover."""
    d = " L ".join(f"{digits(x)} {digits(y)}" for x, y in points)
    return _titled(f'<path d="M {d}" style="fill: none; {style}"', "path", title)


def _titled(opened: str, name: str, title: str) -> str:
    """Close the element; a browser shows its <title> on hover."""
    return f"{opened}><title>{escape(title)}</title></{name}>" if title else f"{opened}/>"


def circles(
    points: Sequence[tuple[float, float]], radius: float, style: str, titles: Sequence[str] = ()
) -> str:
    """A dot at each point. titles: one per dot, shown on hover."""
    dots = [
        f'<circle cx="{digits(x)}" cy="{digits(y)}" r="{digits(radius)}" style="{style}"' for x, y in points
    ]
    return "\n".join(
        _titled(dot, "circle", title) for dot, title in zip(dots, titles or [""] * len(dots), strict=True)
    )


def svg(field: Frame, alt: str, parts: Sequence[str], axes: tuple[Axis, Axis] | None = None) -> str:
    """One <svg role="img"> named `alt`.

    axes: written as data for page.js: left top right bottom (SVG units), the ends of x and y, then 1 or 0 for
    a logarithmic x axis and y axis.
    """
    data_axes = ""
    if axes is not None:
        ends = [end for axis in axes for end in (axis.low, axis.high)]
        numbers = (*field[:4], *ends, *(int(axis.log) for axis in axes))
        data_axes = f' data-axes="{" ".join(f"{number:.8g}" for number in numbers)}"'
    box = f"0 0 {digits(field.width)} {digits(field.height)}"
    inner = "\n".join(part for part in parts if part)
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(alt)}"{data_axes}>{inner}</svg>'


class Plot:
    """Lines and dots over one pair of axes that contains them all."""

    def __init__(self) -> None:
        self.xs: list[float] = []
        self.ys: list[float] = []
        self._marks: list[
            tuple[Sequence[float], Sequence[float], Callable[[list[tuple[float, float]]], str]]
        ] = []

    def line(self, xs: Sequence[float], ys: Sequence[float], style: str) -> None:
        """Add a line. style: CSS of the stroke."""
        ends = [f"{x:g}: {y:.4g}" for x, y in zip([*xs[:1], *xs[-1:]], [*ys[:1], *ys[-1:]], strict=True)]
        self._add(xs, ys, lambda points: svg_path(points, style, " → ".join(ends)))

    def area(self, xs: Sequence[float], ys: Sequence[float], style: str) -> None:
        """Add a closed area. style: CSS of the fill."""
        self._add(xs, ys, lambda points: svg_path(points, f"{style}; stroke: none"))

    def dots(self, xs: Sequence[float], ys: Sequence[float], radius: float, style: str) -> None:
        """Add dots. style: CSS of the circle."""
        titles = [f"{x:g}: {y:.4g}" for x, y in zip(xs, ys, strict=True)]
        self._add(xs, ys, lambda points: circles(points, radius, style, titles))

    def words(self, x: float, y: float, words: str) -> None:
        """Add a label above and right of a point."""
        self._add([x], [y], lambda at: svg_text(at[0][0] + GAP, at[0][1] - GAP, words, "start"))

    def _add(
        self, xs: Sequence[float], ys: Sequence[float], draw: Callable[[list[tuple[float, float]]], str]
    ) -> None:
        self.xs += xs
        self.ys += ys
        self._marks.append((xs, ys, draw))

    def svg(
        self,
        size: tuple[int, int],
        alt: str,
        axes: tuple[Axis, Axis],
        x: Ticks,
        y: Ticks,
        titles: tuple[str, str] = ("", ""),
        head: tuple[float, str] = (0.0, ""),
    ) -> str:
        """Draw the picture of `size` units, with a grid line at each tick of y and one below the field.

        head: (height, SVG) of a part above the field.
        """
        across, up = axes
        field = frame(size, x, y, titles, head[0])
        x_shares = [(across.share(value), words) for value, words in x]
        y_shares = [(up.share(value), words) for value, words in y]
        heights = dict.fromkeys([0.0, *(share for share, _ in y_shares)])  # without duplicates
        grid = [
            svg_path([(field.left, field.y(share)), (field.right, field.y(share))], f"stroke: {LINE}")
            for share in heights
        ]
        marks = [
            draw([(field.x(across.share(a)), field.y(up.share(b))) for a, b in zip(xs, ys, strict=True)])
            for xs, ys, draw in self._marks
        ]
        words = axis_labels(field, x_shares, y_shares, titles)
        return svg(field, alt, [head[1], *grid, words, *marks], axes)


def png(rows: Sequence[Sequence[Sequence[int]]]) -> bytes:
    """Encode a bitmap of (red, green, blue, alpha) bytes, top row first, as PNG with 8 bits per channel.

    Source: the PNG specification (W3C), sections 5 and 11.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 6, 0, 0, 0)  # 6: RGB and alpha
    lines = b"".join(b"\0" + bytes(byte for pixel in row for byte in pixel) for row in rows)  # 0: no filter
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines, 9)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bitmap(field: Frame, rows: Sequence[Sequence[Sequence[int]]]) -> str:
    """Draw the pixels over the whole field, without smoothing."""
    place = f'x="{digits(field.left)}" y="{digits(field.top)}"'
    size = f'width="{digits(field.right - field.left)}" height="{digits(field.bottom - field.top)}"'
    data = base64.b64encode(png(rows)).decode()
    sharp = 'preserveAspectRatio="none" style="image-rendering: pixelated"'
    return f'<image {place} {size} {sharp} href="data:image/png;base64,{data}"/>'
