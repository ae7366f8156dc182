"""Reason: why a document is dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from unfreeze.data.clean.document import Document


class Reason(NamedTuple):
    """A ledger entry's name, such as "length.short", and the numbers: "31 words, at least 50"."""

    name: str
    why: str


Filter = Callable[[Document], Reason | None]
"""Returns why a document is dropped; None if it stays."""


def first_reason(document: Document, filters: list[Filter]) -> Reason | None:
    """Return the reason of the first filter that drops the document; the later ones are not asked."""
    for look in filters:
        if (reason := look(document)) is not None:
            return reason
    return None
