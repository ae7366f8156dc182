"""Facts about one release that its chat template does not contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkMarks:
    """Text the model writes before and after its reasoning, including white space."""

    opening: str
    closing: str


@dataclass(frozen=True)
class Release:
    """Facts about one release.

    name        for messages; "" if the release is unknown
    signature   texts that must all occur in the source of its chat template
    source      where these facts come from
    think       marks around reasoning, for turns in which the template drops it. None: reasoning is trained
                on only where the template writes it
    call_id     (function name, index of the call in the conversation, from 0) -> the id the model writes.
                None: ids are kept
    id_form     the same in words, for the note
    turn_end    the token that ends an answer if the template writes none; call_end: the same after tool
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
