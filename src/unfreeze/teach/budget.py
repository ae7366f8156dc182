"""Cost control for calls to a server: the worst case is shown first, and no call exceeds the budget.

Every attempt that was sent counts as billed, with or without an answer, and is recorded on disk before it is
sent. So an interrupted run that continues stays within the same budget (docs/why/trust.md R6).

    Budget   one number; for the teacher's answers and a judge
    Ledger   a line per attempt (teach/ledger.py); for synthesis
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from unfreeze.core.errors import ConfigError
from unfreeze.teach.address import is_own_network
from unfreeze.untrusted.json_object import read_object

FILE = "spent.json"


@dataclass(frozen=True)
class Price:
    """USD per million tokens read and written. None: unknown."""

    read: float | None = None
    written: float | None = None

    @property
    def said(self) -> bool:
        return self.read is not None and self.written is not None

    def of(self, read: int, written: int) -> float:
        return ((self.read or 0.0) * read + (self.written or 0.0) * written) / 1e6


class Ceiling(ABC):
    """At most `usd` for all calls; 0 refuses every call that has a price.

    flag: how the fields of the server are written on the command line
    more: what to do at the ceiling
    """

    usd: float
    price: Price
    flag = "--endpoint."
    more = "a larger --endpoint.budget-usd; the same command continues from here"

    @property
    @abstractmethod
    def spent(self) -> float:
        """USD counted so far."""

    def worst(self, url: str, read: int, written: int) -> str:
        """Return the maximum cost of that many tokens, as a line; "" if nothing is billed.

        Raises ConfigError, before any call, if a server outside of the own network has no price, or if the
        worst case exceeds the remaining budget.
        """
        if not self.price.said:
            if is_own_network(url):
                return ""
            raise ConfigError(
                f"{url} is not on this machine or in its network, and its price is unknown",
                next=f"{self.flag}price-read 0.5 {self.flag}price-written 1.5 (USD per million tokens; 0 and"
                f" 0 where it is free) and {self.flag}budget-usd",
            )
        cost = self.price.of(read, written)
        arithmetic = (
            f"{read:,} tokens read at ${self.price.read:g} and {written:,} written at"
            f" ${self.price.written:g} per million: at most ${cost:,.4f}"
        )
        if cost > self.usd - self.spent:
            before = f" (${self.spent:,.4f} already spent)" if self.spent else ""
            raise ConfigError(
                f"{arithmetic}; the budget is ${self.usd:,.4f}{before}",
                next=f"{self.flag}budget-usd {1.01 * (self.spent + cost):.4g}, or fewer rows",
            )
        return f"{arithmetic}; budget ${self.usd:,.4f}" if cost else ""

    def refused(self, cost: float) -> ConfigError:
        """Return the error for an attempt that might exceed the budget."""
        return ConfigError(
            f"${self.spent:,.4f} of the budget of ${self.usd:,.4f} is spent; the next call may cost"
            f" ${cost:,.4f}",
            next=self.more,
        )


class Budget(Ceiling):
    """A ceiling for all calls whose answers go into `folder`.

    of: the file in it that these answers belong to, if there may be several
    """

    def __init__(self, folder: Path, usd: float, price: Price, of: str = ""):
        self.path, self.usd, self.price = folder / (f"{of}.{FILE}" if of else FILE), usd, price
        known = read_object(self.path, ConfigError) if self.path.is_file() else {}
        self._spent = float(known.get("usd", 0.0))
        self._lock = threading.Lock()

    @property
    def spent(self) -> float:
        """USD counted so far, each attempt at its worst price."""
        return self._spent

    def reserve(self, read: int, written: int) -> None:
        """Count an attempt before it is sent. Raises ConfigError if it might exceed the budget."""
        if not (cost := self.price.of(read, written)):
            return
        with self._lock:
            if self._spent + cost > self.usd:
                raise self.refused(cost)
            self._spent += cost
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_name(f"{self.path.name}.partial")
            partial.write_text(json.dumps({"usd": self._spent}) + "\n", encoding="utf-8")
            os.replace(partial, self.path)
