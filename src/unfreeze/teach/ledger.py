"""A budget with a line per attempt: who was asked, and how many tokens were booked.

FOLDER/ledger.jsonl   {"request": key, "read": tokens, "written": tokens}

An attempt is booked at its worst, all tokens that it may read and write, and the line is on disk before the
request is sent. So a request that was under way when the program was killed stays booked at its worst price.

    spent = price.read × Σ read + price.written × Σ written

Sums are of whole tokens, so that no order of the lines rounds another way.

A server's usage is only its own word, so by default it lowers nothing: what is booked is never less than a
bill of at most these tokens. `settle` lowers an attempt to its usage, for those who trust it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unfreeze.core.closing import Closing
from unfreeze.core.errors import ConfigError
from unfreeze.core.whole_lines import appending, whole_lines
from unfreeze.teach.budget import Ceiling, Price
from unfreeze.untrusted.json_object import parse_object

NAME = "ledger.jsonl"


class Booked(Ceiling):
    """The bookings of a folder, to be read.

    Raises ConfigError for a file that something else wrote.
    """

    flag = "--"
    more = "plan again with a larger --budget-usd and the same --out: answers that are there are kept"

    def __init__(self, folder: Path, usd: float, price: Price):
        self.path, self.usd, self.price = folder / NAME, usd, price
        self.read = self.written = 0
        self.tries: dict[str, int] = {}
        """Attempts of each request, in all runs."""
        self._booked: dict[str, tuple[int, int]] = {}
        for number, line in enumerate(whole_lines(self.path), 1):
            self._count(*self._parsed(line, number))

    @property
    def spent(self) -> float:
        """USD booked."""
        return self.price.of(self.read, self.written)

    def of(self, *keys: str) -> float:
        """USD booked for these requests."""
        booked = [self._booked.get(key, (0, 0)) for key in keys]
        return self.price.of(sum(read for read, _ in booked), sum(written for _, written in booked))

    def _count(self, key: str, read: int, written: int) -> None:
        before = self._booked.get(key, (0, 0))
        self._booked[key] = (before[0] + read, before[1] + written)
        self.read, self.written = self.read + read, self.written + written
        self.tries[key] = self.tries.get(key, 0) + (read > 0 or written > 0)

    def _parsed(self, line: bytes, number: int) -> tuple[str, int, int]:
        entry = parse_object(line, f"{self.path}, line {number}", ConfigError, next="plan again, elsewhere")
        key, read, written = (entry.get(name) for name in ("request", "read", "written"))
        if isinstance(key, str) and isinstance(read, int) and isinstance(written, int):
            return key, read, written
        raise ConfigError(f"{self.path}, line {number} is no booking", next="plan again, elsewhere")


class Ledger(Booked, Closing):
    """The bookings of a folder, and new ones. Threads may share it; processes may not."""

    def __init__(self, folder: Path, usd: float, price: Price):
        super().__init__(folder, usd, price)
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._lock = appending(self.path), threading.Lock()

    def close(self) -> None:
        """Close the file: nothing more can be booked."""
        with self._lock:
            self._file.close()

    def book(self, key: str, read: int, written: int) -> None:
        """Book an attempt at its worst, before it is sent. Raises ConfigError if the ceiling might break."""
        self.book_all([(key, read, written)])

    def book_all(self, attempts: Iterable[tuple[str, int, int]]) -> None:
        """Book attempts that are sent together, all or none."""
        attempts = list(attempts)
        read = sum(attempt[1] for attempt in attempts)
        written = sum(attempt[2] for attempt in attempts)
        with self._lock:
            cost = self.price.of(self.read + read, self.written + written)
            if cost > self.usd:
                raise self.refused(self.price.of(read, written))
            self._write(attempts)

    def settle(self, key: str, booked: tuple[int, int], usage: tuple[int, int]) -> None:
        """Lower one attempt from what was booked to its usage, both (read, written)."""
        with self._lock:
            self._write([(key, min(0, usage[0] - booked[0]), min(0, usage[1] - booked[1]))])

    def _write(self, attempts: list[tuple[str, int, int]]) -> None:
        lines = [json.dumps({"request": key, "read": r, "written": w}) + "\n" for key, r, w in attempts]
        try:
            self._file.write("".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:  # perhaps half a line is there: nothing may follow it
            with suppress(OSError):
                self._file.close()
            raise
        for attempt in attempts:
            self._count(*attempt)
