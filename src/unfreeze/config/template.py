"""Inputs of a chat template besides the messages: its variables and today's date."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any


def template_values(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse ("thinking=true", "effort=high") -> {"thinking": True, "effort": "high"}."""
    values: dict[str, Any] = {}
    for item in assignments:
        name, equals, text = item.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(
                f"template_variables has {item!r}; expected NAME=VALUE, such as enable_thinking=false"
            )
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def template_time(text: str) -> datetime | None:
    """Parse ISO text as a time; None for "", which means now."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        raise ValueError(
            f"template_date is {text!r}; expected a date such as 2026-11-22 or 2026-11-22T18:30"
        ) from None
