"""The ledger adds up to the byte, and a run whose ledger does not writes nothing."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.data.clean.planted import planted
from unfreeze.data.clean.ledger import Ledger, check


def rows_of_all_kinds():
    texts, _ = planted(chinese=False, documents=60, near=20, unlike=20)
    rows = [{"text": text, "licence": "CC0", "id": i} for i, text in enumerate(texts)]
    return [
        *map(json.dumps, rows),
        "",
        "{broken",
        '{"no": "text"}',
        json.dumps(rows[3]),
        '{"text":"short"}',
        "",
    ]


def sums(ledger):
    dropped = ledger["dropped"].values()
    return {
        name: ledger["kept"][name] + sum(entry[name] for entry in dropped) for name in ("documents", "bytes")
    }


@pytest.mark.parametrize("packed", [False, True])
def test_bytes_in_are_bytes_kept_and_dropped(cleaned, tmp_path, packed):
    lines = rows_of_all_kinds()
    content = "\ufeff".encode() + "\r\n".join(lines).encode()
    name = "in.jsonl.gz" if packed else "in.jsonl"
    (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    ledger, kept = cleaned(
        None, name=name, data={"on_bad_row": "skip"}, length={"enabled": True, "min_words": 5}
    )
    parts = sums(ledger)
    assert ledger["in"] == {"documents": 64, "bytes": len(content)}
    assert parts["documents"] == 64 and parts["bytes"] + ledger["between_rows"] == len(content)
    assert ledger["between_rows"] == 3 + 2  # byte order mark, one blank line; the last has no bytes
    assert {reason: entry["documents"] for reason, entry in ledger["dropped"].items()} == {
        "bad_row": 2,
        "duplicate.exact": 1,
        "duplicate.near": 20,
        "length.short": 1,
    }
    assert ledger["dropped"]["length.short"]["bytes"] == len('{"text":"short"}') + 2
    # what is written: a line feed in place of carriage return and line feed
    assert ledger["written"]["documents"] == len(kept) == 40
    assert ledger["written"]["bytes"] == ledger["kept"]["bytes"] + ledger["rewritten"]
    assert ledger["rewritten"] == -40
    text = (tmp_path / "out" / "ledger.json").read_text(encoding="utf-8")
    assert json.loads(text) == ledger


@pytest.mark.parametrize("form", ["text", "csv", "array"])
def test_other_formats_add_up_too(cleaned, tmp_path, form):
    content = {
        "text": "one document\nof two lines\n\n\nanother\n",
        "csv": 'text,licence\n"one, two",CC0\nthree,MIT\n',
        "array": json.dumps([{"text": "one"}, {"text": "two"}], indent=2),
    }[form]
    name = {"text": "in.txt", "csv": "in.csv", "array": "in.json"}[form]
    (tmp_path / name).write_text(content)
    ledger, kept = cleaned(None, name=name)
    assert len(kept) == 2
    assert ledger["in"]["bytes"] == len(content) == sums(ledger)["bytes"] + ledger["between_rows"]


PLANTED_FAULTS = {
    "a dropped document that is not counted": ("drop", lambda self, *facts: None),
    "kept bytes that are not counted": (
        "keep",
        lambda self, size, *facts, keep=Ledger.keep: keep(self, size - 1, *facts),
    ),
}


@pytest.mark.parametrize("fault", PLANTED_FAULTS)
def test_control_arm_a_miscount_stops_the_run_before_anything_is_written(
    cleaned, tmp_path, monkeypatch, fault
):
    monkeypatch.setattr(Ledger, *PLANTED_FAULTS[fault])
    with pytest.raises(RuntimeError, match="does not add up"):
        cleaned([{"text": "one"}, {"text": "one"}, {"text": "two"}])
    assert not (tmp_path / "out").exists()


def test_control_arm_a_lost_line_is_seen(cleaned, monkeypatch):
    from unfreeze.data.clean.shards import Shards

    write = Shards.write
    monkeypatch.setattr(Shards, "write", lambda self, line: write(self, line) if b"two" not in line else None)
    with pytest.raises(RuntimeError, match="documents written 1, its parts 2"):
        cleaned([{"text": "one"}, {"text": "two"}])


def test_check_names_the_sum():
    empty = Ledger().as_dict([], 0)
    check(empty)
    with pytest.raises(RuntimeError, match="bytes in 7, its parts 0"):
        check({**empty, "in": {"documents": 0, "bytes": 7}})
