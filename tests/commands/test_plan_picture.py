"""The picture of a sweep: a dot for each plan that fits, where its numbers say, in a file of its own."""

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest

from unfreeze.commands import plan_picture
from unfreeze.core.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Part:
    """What the picture reads of a plan, and of what is inside of it."""

    name: str = ""
    tokens_per_second: float | None = None
    places: object = None
    device: object = None


@dataclass
class Plan:
    fleet: Part
    choice: Part
    rank: int
    fits: bool = True
    model: str = "a & b"
    usd_per_hour: float | None = None
    usd_per_million_tokens: float | None = None


def a_plan(name: str, size: int, rate: float | None, rank: int, **more) -> Plan:
    places = Part(device={"weights": size, "moments": 0})
    return Plan(Part(name), Part(tokens_per_second=rate, places=places), rank, **more)


PLANS = [
    a_plan("1xH100", 40 * 10**9, 1000.0, 8),
    a_plan("1xH100", 60 * 10**9, 2000.0, 16),
    a_plan("8xH200", 20 * 10**9, 4000.0, 8),
    a_plan("8xH200", 20 * 10**9, 9000.0, 32, fits=False),
    a_plan("4xRTX4090", 10**9, None, 8),  # fits, of unknown speed
]


def drawn(plans) -> tuple[list[tuple[float, float, str]], list[str]]:
    """(x, y, style) of each dot, legend first; and every word."""
    root = ElementTree.fromstring(plan_picture.picture(plans))
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}style") is not None
    dots = [
        (float(dot.get("cx")), float(dot.get("cy")), dot.get("style")) for dot in root.iter(f"{SVG}circle")
    ]
    return dots, [text.text for text in root.iter(f"{SVG}text")]


def test_a_dot_for_each_plan_that_fits_where_its_numbers_say():
    dots, words = drawn(PLANS)
    assert len(dots) == 2 + 3  # two machines in the legend
    (_, _, h100), (_, _, h200), a, b, c = dots
    assert [style for *_, style in (a, b, c)] == [h100, h100, h200] and h100 != h200
    assert (b[0] - a[0]) == pytest.approx(a[0] - c[0], abs=0.02)  # 60, 40 and 20 GB
    assert (a[1] - c[1]) == pytest.approx(3 * (a[1] - b[1]), abs=0.05)  # 1000, 2000 and 4000 tokens/s
    assert {"a & b: what fits", "1xH100", "8xH200", "GB a device", "r8", "r16"} <= set(words)
    assert "r32" not in words and "4xRTX4090" not in words


def test_with_a_price_it_is_dollars():
    plans = [
        a_plan("x", 10**9, 10.0, 8, usd_per_hour=2.0, usd_per_million_tokens=dollars)
        for dollars in (3.0, 5.0)
    ]
    dots, words = drawn(plans)
    assert "USD per million tokens" in words and {"3", "5"} <= set(words) and dots[1][0] < dots[2][0]


def test_where_nothing_fits_it_is_empty_axes():
    dots, words = drawn([PLANS[3]])
    assert dots == [] and "a & b: what fits" in words


def test_many_machines_take_several_lines_of_legend():
    few, many = (
        plan_picture.legend("t", [("8xH200", "")]),
        plan_picture.legend("t", [("8xH200 SXM", "")] * 12),
    )
    assert many[0] > few[0]


def test_what_is_no_svg_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"plan\.png.* is no \.svg file"):
        plan_picture.write_picture(PLANS, tmp_path / "plan.png")
    plan_picture.write_picture(PLANS, tmp_path / "in" / "plan.svg")
    assert (tmp_path / "in" / "plan.svg").read_text(encoding="utf-8") == plan_picture.picture(PLANS)
