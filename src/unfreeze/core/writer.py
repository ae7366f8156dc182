"""Find the process that holds the lock of a run folder; train/run.py takes the lock."""

from __future__ import annotations

import fcntl
from pathlib import Path


def writer(folder: Path) -> str:
    """Return the id of the process that holds a run folder's lock, "" if none does.

    "unknown" if it hasn't written its id yet.
    """
    lock = folder / "lock"
    if lock.is_file():
        with lock.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "unknown"
    return ""
