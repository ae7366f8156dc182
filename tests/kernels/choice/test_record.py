"""Files of records: what replaces what, that others stay, that a file is never half written."""

import json
import os

import pytest
import torch

from unfreeze.kernels.choice import record
from unfreeze.kernels.choice.op import Candidate, Case, Op

QUICK = Candidate(lambda: lambda x: x * 2, lambda device, dtype: "")
DOUBLE = Op("double", lambda x: x + x, {"quick": QUICK}, (Case("any", lambda *_: ()),), {torch.bfloat16: 0})


def row(**changes):
    return {
        "op": "double",
        "dtype": "bfloat16",
        "bucket": "any",
        "candidate": "quick",
        "median_us": 50.0,
        **changes,
    }


@pytest.fixture(autouse=True)
def fresh():
    record.read.cache_clear()


def rows(path):
    record.read.cache_clear()
    return {record.identity(r)[1:]: r["median_us"] for r in record.read(path)}


def test_only_the_rows_of_what_was_measured_are_replaced(tmp_path):
    path, ops = tmp_path / "new folder" / "cpu.json", {"double": DOUBLE}
    record.write(path, [row(), row(dtype="float32"), row(op="halve", candidate="x")], ops)
    record.write(path, [row(median_us=7.0)], ops)
    assert rows(path) == {
        ("bfloat16", "any", "quick"): 7.0,
        ("float32", "any", "quick"): 50.0,
        ("bfloat16", "any", "x"): 50.0,
    }
    assert json.loads(path.read_text()) and len(path.read_text().splitlines()) == 3 + 2  # a row per line
    assert os.stat(path).st_mode & 0o777 == 0o644 and os.listdir(path.parent) == ["cpu.json"]


def test_rows_of_a_candidate_or_bucket_that_is_gone_go_with_the_next_measurement_of_their_op(tmp_path):
    path = tmp_path / "cpu.json"
    record.write(path, [row(candidate="gone"), row(bucket="gone"), row(op="halve", candidate="gone")], {})
    record.write(path, [row()], {"double": DOUBLE})
    assert set(rows(path)) == {("bfloat16", "any", "quick"), ("bfloat16", "any", "gone")}


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "cpu.json"
    record.write(path, [row()], {})
    before = path.read_bytes()
    with pytest.raises(ValueError):
        record.write(path, [row(median_us=float("inf"))], {})  # JSON has no infinity
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["cpu.json"]


def test_user_records_follow_the_platforms_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert record.user_folder() == tmp_path / "unfreeze" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert record.user_folder() == tmp_path / ".cache" / "unfreeze" / "kernels"
