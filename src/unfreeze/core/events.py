"""Events: one JSON line each in runs/<name>/events.jsonl.

Live progress, report and trackers read only these events.
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
"""File in runs/<name>/ with the resolved config. Recipes write it; report, generate and demo read it."""

Listener = Callable[[Event], str | None]
"""Called with each event after it is written. A returned sentence becomes a warning event, so a listener that
gives up can say why."""


class EventLog:
    """Append events to a file, one per line, and call listeners.

    Writes are unbuffered, so that a killed run keeps its history.
    """

    strict: ClassVar[bool] = False
    """If True, emit raises ValueError for an event that does not conform to core/schema.py. Tests set it."""

    def __init__(self, path: Path | None, listeners: tuple[Listener, ...] = ()):
        self.path = path
        self.listeners = listeners
        self._file = None
        self._reported: set[tuple[str, int | str]] = set()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def emit(self, kind: str, step: int, **fields: Any) -> Event:
        """Write one event. Raises OSError if the disk is full; the file is then unchanged.

        A field that does not conform is a programming error, but no reason to lose a run at step 9,999. The
        event is written without it, and a warning event names kind, field and value, once per field.
        """
        event = {"kind": kind, "step": step, "time": round(time.time(), 3), **fields}
        faults = violations(event)
        if faults and self.strict:
            raise ValueError("; ".join(fault.words for fault in faults))
        wrong = {fault.path[0] if fault.path else "kind" for fault in faults if not fault.absent}
        if wrong & {"kind", "step"}:  # without kind and step the event cannot be written
            step = step if type(step) is int else 0
        else:
            self._write({name: value for name, value in event.items() if name not in wrong})
        for fault in faults:
            self._say(kind, step, fault)
        return cast(Event, event)

    def _write(self, event: dict[str, Any]) -> None:
        """Append the event, then call the listeners."""
        if self._file is not None:
            _append(self._file, json.dumps(event, allow_nan=False).encode() + b"\n")
        for listener in self.listeners:
            if words := listener(cast(Event, event)):
                self.emit("warning", event["step"], message=words)

    def _say(self, kind: str, step: int, fault: Violation) -> None:
        key = (kind, fault.path[0] if fault.path else "kind")
        if key not in self._reported:
            self._reported.add(key)
            message = (
                f"a bug in unfreeze, please report it; training continues without this value: {fault.words}"
            )
            self.emit("warning", step, message=message)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _append(file: FileIO, line: bytes) -> None:
    """Append the whole line or nothing: a partial line would damage the file for all later ones."""
    end = file.seek(0, os.SEEK_END)
    try:
        while line:  # the second write of a file at its limit raises the system's own reason
            if not (count := file.write(line)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
            line = line[count:]
    except OSError:
        file.truncate(end)
        raise


def truncate_after(path: Path, step: int, *, ended: bool = False) -> int:
    """Drop the events after the step from which a run resumes, so that no step is in the file twice.

    -> number of steps dropped. The run's end event is dropped too, because the run continues.
    ended: the run had finished its last step, so its end event is kept.
    Raises DataError naming a damaged line. A partial last line is left by a killed run and is dropped.
    """
    if not path.exists():
        return 0
    lost = 0
    lines = path.read_bytes().split(b"\n")
    lines_to_keep: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            # json.loads would guess the encoding of bytes, and let half surrogate pairs pass
            text = line.decode("utf-8")
            event = json.loads(text) if text.strip() else {"step": step + 1}
            keep = event["step"] <= step and (ended or event["kind"] != "end")
            lost += not keep and event.get("kind") == "train" and "error" not in event
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            # events end with a newline: text after the last one is the partial line of a killed run
            if number == len(lines):
                continue
            next_command = f"restore the file, or remove its line {number}, then repeat the command"
            raise DataError(f"{path} line {number} is not an event: {error}", next=next_command) from None
        if keep:
            lines_to_keep.append(text)
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(line + "\n" for line in lines_to_keep), encoding="utf-8")
    temporary.replace(path)
    return lost
