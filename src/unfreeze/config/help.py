"""`--help` in our own words: the fields most people set, in groups.

All of them with `--help-all`. 80 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from unfreeze.config.names import leaves, places

WIDTH, INDENT = 80, 26
KINDS = {int: "N", float: "X", str: "TEXT", bool: ""}


def text(config: type[BaseModel], command: str, description: str, *, everything: bool) -> str:
    """The help of a command.

    config may have HELP (heading -> field names, all of them) and FIRST (the names that --help shows).
    """
    fields = dict(_flat(config))
    groups: dict[str, tuple[str, ...]] = getattr(config, "HELP", {"Options": tuple(fields)})
    first = getattr(config, "FIRST", tuple(fields))
    shown = tuple(fields) if everything else first
    lines = [*_wrapped(description.strip()), ""]
    for heading, names in groups.items():
        entries = [
            line for name in names if name in fields and name in shown for line in _entry(name, fields[name])
        ]
        lines += [f"{heading}:", *entries, ""] if entries else []
    hidden = len(fields) - len(shown)
    if hidden > 0:
        lines += [
            f"{hidden} more: unfreeze {command} --help-all. Every flag is also a key of a TOML file, the"
            " first argument."
        ]
    lines += ["Also: --json (result as one JSON object)  --quiet  --traceback"]
    if "epochs" in fields:
        lines += ["      --plan (shows the whole memory plan, then trains; `unfreeze plan` only plans)"]
        lines += ["      --sweep FIELD=A,B … (a run for each combination, then their comparison)"]
    return "\n".join(lines)


def _flat(config: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """(flat name, field): what a flag is called."""
    infos = dict(leaves(config))
    return ((name, infos[place]) for name, place in places(config).items())


def _wrapped(paragraphs: str) -> list[str]:
    parts = [" ".join(part.split()) for part in paragraphs.split("\n\n")]
    return [
        line for number, part in enumerate(parts) for line in [""] * (number > 0) + textwrap.wrap(part, WIDTH)
    ]


def _entry(name: str, info: FieldInfo) -> Iterator[str]:
    """`  --learning-rate X         peak learning rate (default 0.0002)`.

    The flag alone on its line where it is long.
    """
    # a positional argument
    placeholder = next((item.metavar for item in info.metadata if getattr(item, "metavar", None)), "")
    flag = (
        f"  {placeholder}"
        if placeholder
        else f"  --{name.replace('_', '-')} {_kind(info.annotation)}".rstrip()
    )
    body = textwrap.wrap(f"{info.description or ''}{_default(info)}", WIDTH - INDENT)
    if len(flag) + 2 > INDENT:
        yield flag
    else:
        yield f"{flag:<{INDENT}}{body.pop(0)}" if body else flag
    yield from (" " * INDENT + line for line in body)


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in KINDS:
        return KINDS[annotation]
    if origin is Literal:
        return "|".join(map(str, inner))
    if origin in (Union, UnionType):
        return "|".join(_kind(kind) for kind in inner if kind is not NoneType)
    if origin is tuple:
        return f"{_kind(inner[0])} …"
    return _kind(inner[0]) if inner else ""  # Annotated


def _default(info: FieldInfo) -> str:
    """ " (default 0.0002)", or nothing where the description has to say it.

    Nothing for an empty text or list, or a default that is not given.
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
