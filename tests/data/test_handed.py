"""Windows that one process hands to others: the same documents, account and order; parallel/test_torchrun.py trains
on them."""

from __future__ import annotations

import json

import pytest

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import DataError
from unfreeze.data import Batches, Tokenizer, load_tokenizer
from unfreeze.data.packing.windows import InWindows
from unfreeze.data.store import streamed
from unfreeze.data.store.handed import Taken, handed, opening


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY_K2)


def open_stream(path, tokenizer, monkeypatch, rows, **options):
    for name, value in {"HEAD": 10, "WINDOW": 300, "FULL": 1}.items():
        monkeypatch.setattr(streamed, name, value)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return streamed.streamed_files(
        [path], tokenizer, 64, least=0, tokens_per_step=64, seed=3, workers=0, **options
    )


def rows(count):
    return [
        json.dumps({"question": f"What is {n}?", "answer": f"{n}, it is. " * (1 + n % 4)})
        for n in range(count)
    ]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_others_have_the_batches_and_cursors_of_process_0(tmp_path, tokenizer, monkeypatch):
    stream = open_stream(tmp_path / "rows.jsonl", tokenizer, monkeypatch, rows(80), validation_fraction=0.1)
    sent: list[bytes] = []
    stream.hand = lambda found: sent.append(handed(found))
    taken = Taken(opening(stream), lambda: sent.pop(0))
    assert taken.stats() == stream.stats() and len(taken.rows) == 80 and taken.windows > 3
    for ours, theirs in ((taken.head, stream.head), (taken.validation, stream.validation)):
        assert ours.fingerprint() == theirs.fingerprint() and len(ours) == len(theirs) > 0
    first, second = (Batches(InWindows(each), 64, each.seed) for each in (stream, taken))
    for _ in range(40):
        ((batch,), cursor), ((other,), place) = next(first), next(second)
        assert (
            cursor == place
            and batch.tokens_T.equal(other.tokens_T)
            and batch.weights_T.equal(other.weights_T)
        )
    assert cursor["window"] > 1 and not sent  # each window was taken once
    example, same = stream.head[0], taken.head[0]
    assert list(same.tokens) == list(example.tokens) and same.checksum == example.checksum


def test_a_row_that_is_bad_is_bad_for_all(tmp_path, tokenizer, monkeypatch):
    stream = open_stream(tmp_path / "rows.jsonl", tokenizer, monkeypatch, rows(80))
    sent: list[bytes] = []
    stream.hand = lambda found: sent.append(handed(found))
    taken = Taken(opening(stream), lambda: sent.pop(0))
    error = DataError("rows.jsonl: row 2 is broken", next="mend it")
    monkeypatch.setattr(stream, "_wait", lambda epoch, number: (_ for _ in ()).throw(error))
    for each in (stream, taken):
        with pytest.raises(DataError, match="row 2 is broken") as said:
            each.window(0, 1)
        assert said.value.next == "mend it"
