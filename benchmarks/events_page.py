"""The tables of docs/reference/events.md, made from the types in core/schema.py.

    python benchmarks/events_page.py [--write docs/reference/events.md]

--write puts them into the page, between the lines that name this script; tests/core/test_schema.py holds the
two together.
"""

from __future__ import annotations

import argparse
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

from unfreeze.core.schema import (
    KINDS,
    Change,
    CommonFields,
    Device,
    ExpertBalance,
    ExpertOpCompared,
    GroupReceipt,
    KernelChoice,
    LeftOut,
    Metric,
    NotedRow,
    PlannedRollout,
)
from unfreeze.core.schema_beside import NGram

MARKS = tuple(f"<!-- made by benchmarks/events_page.py: {end} -->" for end in ("begin", "end"))
INSIDE = {
    "Row": NotedRow,
    "N-gram": NGram,
    "Device": Device,
    "Planned rollout": PlannedRollout,
    "Metric": Metric,
    "Kernel": KernelChoice,
    "Balance": ExpertBalance,
    "Change": Change,
    "Group": GroupReceipt,
    "Left out": LeftOut,
    "Expert op": ExpertOpCompared,
}
"""Heading -> objects that stand inside events."""


def type_name(kind: Any) -> str:
    """int, float or null, object of list of int: the type of a field in JSON's words."""
    if is_typeddict(kind):
        headings = [heading for heading, inside in INSIDE.items() if inside is kind]
        if not headings:
            raise KeyError(
                f"{kind.__name__} stands inside an event: give it a heading in INSIDE, in {__file__}"
            )
        return headings[0]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_name, inner))
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in inner)
    if origin is list:
        return f"list of {type_name(inner[0])}"
    if origin is dict:
        return f"object of {type_name(inner[1])}"
    return {str: "text", type(None): "null"}.get(kind) or kind.__name__


def table(kind: Any, fields: set[str]) -> str:
    """A row per field: its type, unit and meaning."""
    plain, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    lines = ["| field | type | unit | meaning |", "|---|---|---|---|"]
    for name in (name for name in plain if name in fields):
        notes = [note for note in annotations(annotated[name]) if getattr(note, "title", None)]
        unit, meaning = notes[-1].title, notes[-1].description
        absent = "" if name in kind.__required_keys__ else "may be absent"
        words = "; ".join(filter(None, [meaning, absent]))
        lines.append(f"| `{name}` | `{type_name(plain[name])}` | {unit} | {words} |")
    return "\n".join(lines)


def annotations(kind: Any) -> list[Any]:
    """The notes of Annotated, inside Required and NotRequired too."""
    inner = get_args(kind)
    return [*getattr(kind, "__metadata__", ()), *(annotations(inner[0]) if inner else [])]


def page() -> str:
    """Every table with its heading and its words."""
    common = set(CommonFields.__annotations__)
    words = "Beside `kind`, which names one of the kinds below."
    parts = [f"## Every event\n\n{words}\n\n{table(CommonFields, common)}"]
    for heading, kind in {**KINDS, **INSIDE}.items():
        fields = set(kind.__annotations__) - (common | {"kind"} if heading in KINDS else set())
        words = " ".join((kind.__doc__ or "").split())
        parts.append(f"## {heading}\n\n{words}\n\n{table(kind, fields)}")
    return "\n\n".join(parts)


def inserted(text: str) -> str:
    """The page with its tables made anew."""
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return f"{before}{MARKS[0]}\n{page()}\n{MARKS[1]}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", type=Path)
    file = parser.parse_args().write
    if file:
        file.write_text(inserted(file.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(page())


if __name__ == "__main__":
    main()
