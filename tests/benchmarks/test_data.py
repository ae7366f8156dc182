"""bench data: the sides encode the same rows, the peer's ids are ours, and a side that fails is said."""

import pytest

from benchmarks.cases import data
from benchmarks.harness.rows import read
from unfreeze.core.command import Common


def test_the_whole_on_few_rows(tmp_path):
    pytest.importorskip("datasets", reason="the peer's library, extra [data]")
    kept = tmp_path / "kept.jsonl"
    data.measure(data.Config(append=str(kept), rows=250, pairs=1), Common(quiet=True))
    made = {row.side: row.results for row in read(kept)}
    assert list(made) == ["unfreeze", "one process", "datasets + transformers", "second start"]
    peer = made["datasets + transformers"]
    assert peer["equal_rows"] == peer["compared_rows"] == data.COMPARED
    assert peer["first_side_rate"] == made["unfreeze"]["rows_per_second"] / peer["rows_per_second"]
    assert made["unfreeze"]["tokens_per_row"] == made["one process"]["tokens_per_row"] > 100
    assert made["second start"]["seconds"] < made["unfreeze"]["seconds"]


def test_a_side_that_fails_is_said(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)encode ended with 1.*no tokenizer"):
        given = {"files": [], "model": str(tmp_path), "length": 8, "processes": 1}
        data.run("benchmarks.harness.encode_side:encode", given, tmp_path)


def test_rows_are_the_same_every_time(tmp_path):
    for name in ("one", "two"):
        data.write_rows(tmp_path / name, 20)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
