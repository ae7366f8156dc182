"""Who holds a run folder: train/run.py takes its lock."""

from __future__ import annotations

import fcntl
from pathlib import Path


def writer(folder: Path) -> str:
    """Give the id of the process that holds a run folder's lock, "" where none does.

    "unknown" where it hasn't written its id yet.
    """
    lock = folder / "lock"
    if lock.is_file():
        with lock.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "unknown"
    return ""
