"""A line per attempt, on disk before it is sent; whole tokens, so that sums are exact in any order."""

from __future__ import annotations

import json
import os
import random
import threading
from fractions import Fraction

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.teach.budget import Price
from unfreeze.teach.ledger import NAME, Booked, Ledger

PRICE = Price(0.3, 1.7)


def test_bookings_add_up_and_are_found_again(tmp_path):
    draw = random.Random(0)
    attempts = [(f"k{draw.randrange(9)}", draw.randrange(1, 999), draw.randrange(1, 999)) for _ in range(200)]
    with Ledger(tmp_path, 1.0, PRICE) as ledger:
        for attempt in attempts:
            ledger.book(*attempt)
        spent = ledger.spent
    read, written = sum(r for _, r, _ in attempts), sum(w for _, _, w in attempts)
    exact = (Fraction(3, 10) * read + Fraction(17, 10) * written) / 10**6
    again = Booked(tmp_path, 1.0, PRICE)
    assert again.spent == spent == pytest.approx(float(exact), rel=1e-15)
    own = [each for each in attempts if each[0] == "k3"]
    assert again.of("k3") == PRICE.of(sum(r for _, r, _ in own), sum(w for *_, w in own))
    assert again.tries["k3"] == len(own) and again.of("unknown") == 0


def test_a_line_is_on_disk_when_book_returns(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Ledger(tmp_path, 1.0, PRICE) as ledger:
        ledger.book("a", 10, 20)
        assert len(synced) == 1 and json.loads((tmp_path / NAME).read_text()) == {
            "request": "a",
            "read": 10,
            "written": 20,
        }


def test_the_ceiling_holds_for_one_and_for_many_and_between_threads(tmp_path):
    with Ledger(tmp_path, PRICE.of(100, 100), PRICE) as ledger:
        with pytest.raises(ConfigError, match=r"the next call may cost \$0.0002"):
            ledger.book_all([("a", 50, 50), ("b", 51, 50)])
        assert ledger.spent == 0 and not (tmp_path / NAME).read_text()
        refused: list[ConfigError] = []

        def work():
            for _ in range(40):
                try:
                    ledger.book("t", 1, 1)
                except ConfigError as error:
                    refused.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ledger.spent == ledger.usd and len(refused) == 60
        assert "plan again with a larger --budget-usd" in refused[0].next


def test_a_cut_line_does_not_count_and_a_foreign_one_is_refused(tmp_path):
    with Ledger(tmp_path, 1.0, PRICE) as ledger:
        ledger.book("a", 10, 20)
    with (tmp_path / NAME).open("a") as file:
        file.write('{"request": "b", "read": 5')
    with Ledger(tmp_path, 1.0, PRICE) as ledger:
        assert (ledger.read, ledger.written) == (10, 20)
        ledger.book("c", 1, 1)
    assert Booked(tmp_path, 1.0, PRICE).read == 11
    (tmp_path / NAME).write_text('{"usd": 3}\n')
    with pytest.raises(ConfigError, match="line 1 is no booking"):
        Booked(tmp_path, 1.0, PRICE)


def test_settling_lowers_and_never_raises(tmp_path):
    with Ledger(tmp_path, 1.0, PRICE) as ledger:
        ledger.book("a", 100, 100)
        ledger.settle("a", (100, 100), (40, 7))
        assert (ledger.read, ledger.written, ledger.tries["a"]) == (40, 7, 1)
        ledger.settle("a", (100, 100), (400, 700))
        assert (ledger.read, ledger.written) == (40, 7)


def test_a_full_disk_books_nothing_more(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, 1.0, PRICE)
    ledger.book("a", 1, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        ledger.book("b", 1, 1)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="closed file"):  # nothing can be sent after half a line
        ledger.book("c", 1, 1)
