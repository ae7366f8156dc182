"""`unfreeze pretrain --help parts`: every part, its place, formula, options and source, 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from unfreeze.models.parts import LAYER, PARTS, Option, Part

WIDTH = 80
PLACES = {LAYER: "layers.*"}
"""Slot -> its place in words, where it is not layers.*.SLOT."""
HEAD = """An architecture is a list of parts. Each takes the place of the family's own
module; all else stays. Entries apply in their order.

  [shape]
  family = "llama"
  parts = [{ at = "layers.*.self_attn", part = "sliding_window", window = 64 }]

  --shape.parts '{"at": "layers.0-3", "part": "post_norm"}'   one or several

* stands for every layer, 2-5 for the layers 2 to 5, counted from 0."""


def place(slot: str) -> str:
    """ "layers.*.self_attn" for the slot of attention."""
    return PLACES.get(slot, f"layers.*.{slot}")


def text() -> str:
    """The whole listing."""
    lines = [HEAD]
    for slot in dict.fromkeys(part.slot for part in PARTS.values()):
        lines += ["", f"At {place(slot)}:"]
        for name, part in PARTS.items():
            lines += _of(name, part) if part.slot == slot else ()
    return "\n".join(lines)


def _of(name: str, part: Part) -> Iterator[str]:
    yield f"  {name}"
    yield from _indented(f"{part.formula}. Source: {part.source}", 6)
    for option, of in part.options.items():
        yield from _indented(f"{option} = {_value(of)}: {of.about}", 6)


def _value(option: Option) -> str:
    """'64 (at least 1)', '"mean" ("mean" or "max")'."""
    shown = str(option.default).lower() if isinstance(option.default, bool) else repr(option.default)
    if option.choices:
        return f"{shown} ({' or '.join(map(repr, option.choices))})"
    return f"{shown} (at least {option.least:g})" if option.least is not None else shown


def _indented(words: str, by: int) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=" " * by, subsequent_indent=" " * (by + 2))
