"""Events: one JSON line each in runs/<name>/events.jsonl.

They are everything that the live progress, the report and the trackers know.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, ClassVar, cast

from unfreeze.core.conform import Violation, violations
from unfreeze.core.errors import DataError
from unfreeze.core.schema import Event

RESOLVED = "resolved_config.json"
"""The file in runs/<name>/ that says what was run: written by recipes, read by report, generate and demo."""

Listener = Callable[[Event], str | None]
"""Called with each event after it is written. If it returns a sentence, that becomes a warning event: so a
listener that gives up can say why."""


class EventLog:
    """Appends events to a file, a line each, and calls listeners.

    Unbuffered, so that a killed run keeps its history.
    """

    strict: ClassVar[bool] = False
    """Whether emit raises ValueError for an event that does not conform to core/schema.py. Tests set it."""

    def __init__(self, path: Path | None, listeners: tuple[Listener, ...] = ()):
        self.path = path
        self.listeners = listeners
        self._file = None
        self._said: set[tuple[str, int | str]] = set()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def emit(self, kind: str, step: int, **fields: Any) -> Event:
        """Write one event. Raises OSError where the disk is full; the file is then as it was before.

        A field that does not conform is a programming error, and no reason to lose a run at step 9,999: the
        event is written without it, and a warning event names kind, field and value, once for each field.
        """
        event = {"kind": kind, "step": step, "time": round(time.time(), 3), **fields}
        found = violations(event)
        if found and self.strict:
            raise ValueError("; ".join(fault.words for fault in found))
        wrong = {fault.path[0] if fault.path else "kind" for fault in found if not fault.absent}
        if wrong & {"kind", "step"}:  # nothing can be said of the rest
            step = step if type(step) is int else 0
        else:
            self._write({name: value for name, value in event.items() if name not in wrong})
        for fault in found:
            self._say(kind, step, fault)
        return cast(Event, event)

    def _write(self, event: dict[str, Any]) -> None:
        """Append it, then tell the listeners."""
        if self._file is not None:
            _append(self._file, json.dumps(event, allow_nan=False).encode() + b"\n")
        for listener in self.listeners:
            if said := listener(cast(Event, event)):
                self.emit("warning", event["step"], message=said)

    def _say(self, kind: str, step: int, fault: Violation) -> None:
        key = (kind, fault.path[0] if fault.path else "kind")
        if key not in self._said:
            self._said.add(key)
            message = (
                f"a fault of unfreeze, please report it; training goes on without the value: {fault.words}"
            )
            self.emit("warning", step, message=message)

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


def truncate_after(path: Path, step: int, *, ended: bool = False) -> int:
    """Drop a resumed run's lines after the step it resumes from, so that no step is in the file twice.

    -> how many steps these were. The run's end event is dropped too, because the run goes on.
    ended: the run had finished its last step, so its end event is kept.
    Raises DataError naming a damaged line; half a line at the very end is a killed run's, and dropped.
    """
    if not path.exists():
        return 0
    lost = 0
    lines = path.read_bytes().split(b"\n")
    kept: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            # json.loads would guess the encoding of bytes, and let half surrogate pairs pass
            text = line.decode("utf-8")
            event = json.loads(text) if text.strip() else {"step": step + 1}
            keep = event["step"] <= step and (ended or event["kind"] != "end")
            lost += not keep and event.get("kind") == "train" and "error" not in event
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            # an event is written with its newline: what follows the last one is the half line of a killed run
            if number == len(lines):
                continue
            next_command = f"restore the file, or remove its line {number}, then repeat the command"
            raise DataError(f"{path} line {number} is not an event: {error}", next=next_command) from None
        if keep:
            kept.append(text)
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)
    return lost
