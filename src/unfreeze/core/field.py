"""What stands at a field of a Config beside its type, default and limits: one call of `about`.

    rank: int = Field(default=16, json_schema_extra=about("Adapters", alias="rank"))

Help, flags, notes and records read it (config/names.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

Heading = Literal[
    "Teacher",
    "Preference",
    "Options",
    "What",
    "How long",
    "How much",
    "Learning",
    "Adapters",
    "Memory and machine",
    "Where",
    "Output",
    "When things go wrong",
    "Server",
]
"""The headings of --help-all, in their order there."""
HEADINGS: tuple[str, ...] = get_args(Heading)


class About(NamedTuple):
    """What is known of a field besides its type."""

    heading: str = "Options"
    alias: str = ""
    was: str = ""
    name: str = ""
    since: str = ""
    first: bool = False
    computes: bool = True
    of_run: bool = True


def about(
    heading: Heading = "Options",
    *,
    alias: str = "",
    was: str = "",
    name: str = "",
    since: str = "",
    first: bool = False,
    computes: bool = True,
    of_run: bool = True,
) -> JsonDict:
    """A field's own facts.

    heading   of --help-all.
    alias     a short name beside the dotted one, for what people type daily.
    was       names of earlier versions, with spaces between: they still run, with a note.
    name      its dotted name, where that is not the way to its attribute.
    since     the version it came with; "": there from the first on. At its default a record leaves it out, so
              that runs of earlier versions can be resumed.
    first     whether --help shows it; --help-all shows every field.
    computes  whether it changes what is computed: a run is resumed with another value of one that doesn't.
    of_run    whether a run has it; what asks a teacher, and trains nothing, is in no record.
    """
    return {"about": list(About(heading, alias, was, name, since, first, computes, of_run))}


def about_of(info: FieldInfo) -> About | None:
    """What `about` says at a field; None where it is not called there."""
    extra = info.json_schema_extra
    if isinstance(extra, dict) and "about" in extra:
        return About._make(cast(list[str], extra["about"]))  # pyright: ignore[reportArgumentType]
    return None
