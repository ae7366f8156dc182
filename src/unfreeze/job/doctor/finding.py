"""Finding: one line of the doctor's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fault", "skip"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output."""

    check: str
    level: Level
    line: str
    remedy: str = ""
