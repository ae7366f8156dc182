"""`--help` lists the fields that most people set, in groups; `--help-all` lists every field.

The text is 80 columns wide.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from unfreeze.config.names import Known, fields
from unfreeze.core.field import HEADINGS

WIDTH, INDENT = 80, 26
KINDS = {int: "N", float: "X", str: "TEXT", bool: ""}


def text(config: type[BaseModel], command: str, description: str, *, everything: bool) -> str:
    """Help text of a command."""
    groups: dict[str, list[Known]] = {heading: [] for heading in HEADINGS}
    for known in fields(config).values():
        groups[known.about.heading].append(known)
    some = any(known.about.first for known in fields(config).values())
    lines, hidden = [*_wrapped(description.strip()), ""], 0
    for heading, group in groups.items():
        shown = [known for known in group if everything or known.about.first or not some]
        hidden += len(group) - len(shown)
        entries = [line for known in _commonest(shown) for line in _entry(known, everything)]
        lines += [f"{heading}:", *entries, ""] if entries else []
    if hidden > 0:
        lines += [
            f"{hidden} more: unfreeze {command} --help-all. Every flag is also a key of the TOML file, the"
            " first argument."
        ]
    if everything and any(known.about.alias for known in fields(config).values()):
        lines += ["[table.key] is the full name of a short flag; a file can use either."]
    lines += ["Also: --json (result as one JSON object)  --quiet  --traceback"]
    if {"epochs", "training.epochs"} & fields(config).keys():
        lines += ["      --plan (show the full memory plan, then train; `unfreeze plan` only plans)"]
        lines += ["      --sweep FIELD=A,B … (one run per combination, then a comparison)"]
    return "\n".join(lines)


def _commonest(group: Sequence[Known]) -> list[Known]:
    """Sort the fields of --help first, otherwise in the order of declaration."""
    return sorted(group, key=lambda known: not known.about.first)


def _wrapped(paragraphs: str) -> list[str]:
    parts = [" ".join(part.split()) for part in paragraphs.split("\n\n")]
    return [
        line for number, part in enumerate(parts) for line in [""] * (number > 0) + textwrap.wrap(part, WIDTH)
    ]


def _entry(known: Known, everything: bool) -> Iterator[str]:
    """`  --learning-rate X         peak learning rate (default 0.0002)`.

    A long flag gets its own line. everything: add the dotted name if the flag is a short one.
    """
    name, info = known.short, known.info
    # a positional argument
    placeholder = next((item.metavar for item in info.metadata if getattr(item, "metavar", None)), "")
    flag = (
        f"  {placeholder}"
        if placeholder
        else f"  --{name.replace('_', '-')} {kind_of(info.annotation)}".rstrip()
    )
    whole = f" [{known.name}]" if everything and name != known.name else ""
    body = textwrap.wrap(f"{info.description or ''}{default_of(info)}{whole}", WIDTH - INDENT)
    if len(flag) + 2 > INDENT:
        yield flag
    else:
        yield f"{flag:<{INDENT}}{body.pop(0)}" if body else flag
    yield from (" " * INDENT + line for line in body)


def kind_of(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in KINDS:
        return KINDS[annotation]
    if origin is Literal:
        return "|".join(str(value) for value in inner if value != "")  # "": unset
    if origin in (Union, UnionType):
        return "|".join(kind_of(kind) for kind in inner if kind is not NoneType)
    if origin is tuple:
        return f"{kind_of(inner[0])} …"
    return kind_of(inner[0]) if inner else ""  # Annotated


def default_of(info: FieldInfo) -> str:
    """ " (default 0.0002)", or "" if the description must say it.

    That is: an empty text or list, or no default value.
    """
    value = info.get_default(call_default_factory=True)
    if info.is_required() or value is PydanticUndefined:
        return " (required)"
    if value in (None, "", ()):
        return ""
    if isinstance(value, float):
        value = f"{value:g}"
    if isinstance(value, tuple):
        value = " ".join(map(str, cast(tuple[Any, ...], value)))
    return f" (default {value})"
