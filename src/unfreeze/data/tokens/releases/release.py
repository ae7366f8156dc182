"""The facts of one release that its chat template does not hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkMarks:
    """What the model writes before and behind its reasoning, white space included."""

    opening: str
    closing: str


@dataclass(frozen=True)
class Release:
    """What is known of one release.

    name        for messages; "" where the release is not known
    signature   texts that all stand in the source of its chat template
    source      where these facts were read
    think       marks around reasoning, for turns in which the template itself drops it; None: reasoning is
    taught only
                where the template writes it
    call_id     (function name, number of the call in the conversation from 0) -> the id the model itself
    writes; None:
                ids stay as they are
    id_form     the same in words, for the note
    turn_end    the token that ends an answer where the template writes none; call_end: likewise behind tool
    calls
    """

    name: str
    signature: tuple[str, ...]
    source: str
    think: ThinkMarks | None = None
    call_id: Callable[[str, int], str] | None = None
    id_form: str = ""
    turn_end: str = ""
    call_end: str = ""
