"""Events: one JSON line each in runs/<name>/events.jsonl. Everything the live progress, the report and later sinks know."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESOLVED = "resolved_config.json"
"""The file in runs/<name>/ that says what was run: written by recipes, read by report, generate and demo."""

Event = dict[str, Any]
"""{"kind": "train", "step": 12, "time": 1790000000.0, …}. Kinds, fields, types and units: core/schema.py, in words docs/events.md."""

Listener = Callable[[Event], str | None]
"""Called with each event after it is written. A sentence it returns becomes a warning event: a sink that gives up says so this way."""


class EventLog:
    """Appends events to a file, a line each, flushed at once so that a killed run keeps its history; and calls listeners."""

    def __init__(self, path: Path | None, listeners: tuple[Listener, ...] = ()):
        self.path = path
        self.listeners = listeners
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")

    def emit(self, kind: str, step: int, **fields: Any) -> Event:
        """Write one event. Fields must be plain JSON values."""
        event: Event = {"kind": kind, "step": step, "time": round(time.time(), 3), **fields}
        if self._file is not None:
            self._file.write(json.dumps(event, allow_nan=False, default=_refuse) + "\n")
            self._file.flush()
        for listener in self.listeners:
            if said := listener(event):
                self.emit("warning", step, message=said)
        return event

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _refuse(value: object) -> Any:
    raise TypeError(f"event field of type {type(value).__name__} is not plain JSON: {value!r}")


def truncate_after(path: Path, step: int) -> None:
    """Drop the lines of a resumed run that lie after the step it resumes from, so that no step stands twice."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # the half line of a killed run
            continue
        if event.get("step", 0) <= step and event["kind"] != "end":
            kept.append(line)
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)
