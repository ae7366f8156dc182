"""Events: one JSON line each in runs/<name>/events.jsonl. Everything the live progress, the report and later sinks know."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from unfreeze.core.errors import DataError

RESOLVED = "resolved_config.json"
"""The file in runs/<name>/ that says what was run: written by recipes, read by report, generate and demo."""

Event = dict[str, Any]
"""{"kind": "train", "step": 12, "time": 1790000000.0, …}. Kinds, fields, types and units: core/schema.py, in words docs/events.md."""

Listener = Callable[[Event], str | None]
"""Called with each event after it is written. A sentence it returns becomes a warning event: a sink that gives up says so this way."""


class EventLog:
    """Appends events to a file, a line each, unbuffered so that a killed run keeps its history; and calls listeners."""

    def __init__(self, path: Path | None, listeners: tuple[Listener, ...] = ()):
        self.path = path
        self.listeners = listeners
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def emit(self, kind: str, step: int, **fields: Any) -> Event:
        """Write one event. Fields must be plain JSON values. Raises OSError where the disk is full; the file then ends as before."""
        event: Event = {"kind": kind, "step": step, "time": round(time.time(), 3), **fields}
        if self._file is not None:
            _append(self._file, json.dumps(event, allow_nan=False, default=_refuse).encode() + b"\n")
        for listener in self.listeners:
            if said := listener(event):
                self.emit("warning", step, message=said)
        return event

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _append(file: FileIO, line: bytes) -> None:
    """The whole line or nothing: half of one would damage the file for all that come after it."""
    end = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
    except OSError:
        file.truncate(end)
        raise


def _refuse(value: object) -> Any:
    raise TypeError(f"event field of type {type(value).__name__} is not plain JSON: {value!r}")


def truncate_after(path: Path, step: int, *, ended: bool = False) -> None:
    """Drop the lines of a resumed run that lie after the step it resumes from, so that no step stands twice, and its end: it goes on.

    ended: its last step is behind it; the end stays.

    Raises DataError naming a damaged line; half a line at the very end is a killed run's, and dropped.
    """
    if not path.exists():
        return
    lines, kept = path.read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")  # json.loads would guess the encoding of bytes, and let half surrogate pairs pass
            event = json.loads(text) if text.strip() else {"step": step + 1}
            keep = event["step"] <= step and (ended or event["kind"] != "end")
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            if number == len(lines):  # an event is written with its newline: what follows the last one is the half line of a killed run
                continue
            next_command = f"restore the file, or remove its line {number}, then repeat the command"
            raise DataError(f"{path} line {number} is not an event: {error}", next=next_command) from None
        if keep:
            kept.append(text)
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)
