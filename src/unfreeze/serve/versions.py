"""Adapters of a server, each by its name: taken up at the start, and again when their files change.

A run that trains writes its adapter anew from time to time. The weights and their config are two files, each
replaced at once; a version is taken up when two looks saw the same files, so never a mixture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from unfreeze.config.adapter import CONFIG, weight_files
from unfreeze.core.errors import UserError
from unfreeze.core.events import RESOLVED
from unfreeze.core.writer import writer

LOOK = 2.0  # seconds between two looks
FOLDERS = ("adapter", "adapter-best")
"""Where a run writes its adapter: at its end or interruption, and after a validation that was the best."""

Seen = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of each file of an adapter."""


class Adapters(Protocol):
    """The loaded adapters of one model (adapters/several.py)."""

    @property
    def names(self) -> list[str]: ...
    def load(self, name: str, folder: Path) -> object: ...
    def replace(self, name: str, folder: Path) -> object: ...


class Versions:
    """The adapters of a server and the files they come from.

    places  name -> a run's folder or an adapter's
    say     called with a line for each version that is taken up or refused
    """

    def __init__(self, adapters: Adapters, places: Mapping[str, Path], say: Callable[[str], None]):
        self.adapters, self.places, self.say = adapters, dict(places), say
        self.counts = dict.fromkeys(places, 0)
        """Versions taken up so far."""
        self._before: dict[str, Seen | None] = {}
        self._taken: dict[str, Seen | None] = {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Take up every adapter that is there, then look for new ones in a thread.

        Raises AdapterError as load_adapter does.
        """
        for name, place in self.places.items():
            folder = folder_of(place)
            if (files := files_of(folder)) is not None:
                self._take(name, folder, files)
            else:
                self.say(f"{name}: {place} has no adapter yet; it is taken up when one is written")
        self._thread = threading.Thread(target=self._run, name="unfreeze-versions", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Take up each adapter whose files changed, and were the same at the last look."""
        for name, place in self.places.items():
            folder = folder_of(place)
            files, before = files_of(folder), self._before.get(name)
            self._before[name] = files
            if files is None or files != before or files == self._taken.get(name):
                continue
            try:
                self._take(name, folder, files)
            except (UserError, OSError) as error:  # OSError: it is being written this moment
                words = error.message if isinstance(error, UserError) else str(error)
                self._taken[name] = files
                stays = "the version before stays" if self.counts[name] else "it is not served"
                self.say(f"warning: {name}: the new adapter is not taken up, {stays}: {words}")
            else:
                self.say(f"{name}: version {self.counts[name]} is taken up; answers that run keep theirs")

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _take(self, name: str, folder: Path, files: Seen) -> None:
        (self.adapters.replace if self.counts[name] else self.adapters.load)(name, folder)
        self.counts[name] += 1
        self._taken[name] = files

    def _run(self) -> None:
        while not self._end.wait(LOOK):
            self.look()


def folder_of(place: Path) -> Path:
    """Return the folder of a run's adapter, while it trains that of the newest; any other is its own."""
    if not (place / RESOLVED).is_file():
        return place
    there = [place / name for name in FOLDERS if (place / name / CONFIG).is_file()]
    if len(there) > 1 and writer(place):
        return max(there, key=lambda folder: (folder / CONFIG).stat().st_mtime_ns)
    return there[0] if there else place / FOLDERS[0]


def files_of(folder: Path) -> Seen | None:
    """Return what tells one version from another; None if the adapter is not whole."""
    try:
        names = [folder / CONFIG, *weight_files(folder)]
        stats = [(path, path.stat()) for path in names]
    except (OSError, UserError):
        return None
    return tuple((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats)
