"""Facts about a Config field besides its type, default and limits: one call of `about`.

    rank: int = Field(default=16, json_schema_extra=about("Adapters", alias="rank"))

Help, flags, notes and records use them (config/names.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, cast, get_args

from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

Heading = Literal[
    "Teacher",
    "Preference",
    "Options",
    "Model and data",
    "Reward",
    "Answers",
    "Policy",
    "How long",
    "How much",
    "Learning",
    "Adapters",
    "Memory and machine",
    "Hardware",
    "Output",
    "When things go wrong",
    "Server",
]
"""Headings of --help-all, in order."""
HEADINGS: tuple[str, ...] = get_args(Heading)


class About(NamedTuple):
    """Facts about a field besides its type."""

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
    """Declare the facts about a field.

    heading   heading in --help-all
    alias     short name for a frequent field, besides the dotted one
    was       names in earlier versions, separated by spaces, also the flat name of before there were tables;
              they still work, with a note
    name      dotted name, if it differs from the attribute path
    since     version that added the field; "": the first. A record leaves the field out at its default, so
              that runs of earlier versions can be resumed
    first     True if --help shows the field; --help-all shows all
    computes  True if the field affects results; the others can change when a run is resumed
    of_run    True if the field belongs in a run's record; fields for preparing a teacher do not
    """
    return {"about": list(About(heading, alias, was, name, since, first, computes, of_run))}


def about_of(info: FieldInfo) -> About | None:
    """Return the facts declared at a field; None if there are none."""
    extra = info.json_schema_extra
    if isinstance(extra, dict) and "about" in extra:
        return About._make(cast(list[str], extra["about"]))  # pyright: ignore[reportArgumentType]
    return None
