"""A file of lines that is only appended to: a line that was cut by an interruption does not count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines; none without the file."""
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def appending(path: Path) -> TextIO:
    """Open the file for appending after its last complete line."""
    whole = sum(len(line) + 1 for line in whole_lines(path))
    if path.is_file():
        os.truncate(path, whole)
    return path.open("a", encoding="utf-8")
