"""The picture of `unfreeze plan --sweep`: one dot per plan that fits, as an SVG file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from unfreeze.commands.planned import Planned
from unfreeze.core.errors import ConfigError
from unfreeze.report.axes import CHARACTER, GAP, INK, TEXT, Axis, Plot, around, circles, round_ticks, text
from unfreeze.report.pictures import HUES

SIZE = (760, 460)
LINE = TEXT + GAP


def write_picture(plans: Sequence[Planned], path: Path) -> None:
    """Tokens per second against dollars per million tokens (without a price: against bytes a device).

    Raises ConfigError unless it is to be an .svg file.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"out = {str(path)!r} is no .svg file", next="--out plan.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture(plans), encoding="utf-8")


def picture(plans: Sequence[Planned]) -> str:
    """The SVG: a colour for each machine, each dot with its rank."""
    priced = plans[0].usd_per_hour is not None
    plot, shown = Plot(), list[tuple[str, str]]()
    for name in dict.fromkeys(planned.fleet.name for planned in plans):
        style = f"fill: {HUES[len(shown) % len(HUES)]}"
        points = [point(planned) for planned in plans if planned.fleet.name == name and planned.fits]
        for x, y, rank in filter(None, points):
            plot.dots([x], [y], 3, style)
            plot.words(x, y, f"r{rank}")
            if (name, style) not in shown:
                shown.append((name, style))
    title = f"{plans[0].model}: what fits"
    across, up = (around(values, 0.06) if values else Axis(0.0, 1.0) for values in (plot.xs, plot.ys))
    drawn = plot.svg(
        SIZE,
        title,
        (across, up),
        [(value, f"{value:,.6g}") for value in round_ticks(across, 8)],
        [(value, f"{value:,.6g}") for value in round_ticks(up, 6)],
        ("USD per million tokens" if priced else "GB a device", "tokens/s, predicted"),
        legend(title, shown),
    )
    return standalone(drawn)


def point(planned: Planned) -> tuple[float, float, int] | None:
    """(dollars per million tokens or GB a device, tokens per second, rank); None where no speed is known."""
    rate, size = planned.choice.tokens_per_second, sum(planned.choice.places.device.values()) / 1e9
    return (planned.usd_per_million_tokens or size, rate, planned.rank) if rate else None


def legend(title: str, shown: Sequence[tuple[str, str]]) -> tuple[float, str]:
    """(height, SVG) of the title and the machines below it, in as many lines as they need."""
    parts, x, y = [text(SIZE[0] / 2, TEXT, title, "middle", colour=INK)], 0.0, TEXT + LINE
    for name, style in shown:
        width = len(name) * CHARACTER + 6 * GAP
        if x and x + width > SIZE[0]:
            x, y = 0.0, y + LINE
        parts += [circles([(x + GAP, y)], 3, style), text(x + 3 * GAP, y, name, "start")]
        x += width
    return y + LINE, "\n".join(parts)


def standalone(svg: str) -> str:
    """A file of its own: with the page's colours, on its paper, in its font."""
    sheet = files("unfreeze.report").joinpath("templates", "style.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root") : sheet.index("* {")]
    style = f"{colours}text {{ font: 11px system-ui, sans-serif; }}"
    width, height = SIZE
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    paper = f'<style>{style}</style><rect width="{width}" height="{height}" style="fill: var(--paper)"/>'
    begin = svg.index(">") + 1
    return f"{svg[:begin].replace('<svg', head, 1)}{paper}{svg[begin:]}\n"
