"""Rows: what they must hold, and that a file of them reads back."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from benchmarks.harness.rows import ROOT, SPEEDS, Stamp, append, commit, machine, read, where
from unfreeze.core.errors import DataError
from unfreeze.kernels.choice.choose import device_key

GOOD = {"tokens_per_second": 100.0, "peak_bytes": 10, "correctness": {"loss against float64": 1e-3}}


@pytest.fixture
def stamp():
    return Stamp.now("moe", "unfreeze dev bench moe", "cpu", threads=2)


def test_a_row_says_where_and_with_what_it_was_measured(stamp):
    row = stamp.row("unfreeze", {"rank": 8}, GOOD)
    assert (
        row.machine.device == device_key(torch.device("cpu"))
        and row.machine.threads == 2
        and row.machine.cores >= 1
    )
    assert row.machine.versions["torch"] == torch.__version__ and row.machine.versions["transformers"]
    assert row.machine.name and row.benchmark == "moe" and row.side == "unfreeze"
    assert json.loads(row.model_dump_json()) == row.model_dump()


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("missing", ["peak_bytes", "correctness"])
def test_a_speed_without_memory_or_correctness_is_refused(stamp, speed, missing):
    results = {speed: 1.0, "peak_bytes": 1, "correctness": {"loss": 0.0}}
    stamp.row("a", {}, results)
    del results[missing]
    with pytest.raises(ValidationError, match=f"{speed} without {missing}"):
        stamp.row("a", {}, results)


def test_a_row_without_results_must_say_why(stamp):
    assert stamp.row("liger", {}, not_run="needs CUDA").not_run == "needs CUDA"
    for results, reason in (({}, ""), (GOOD, "needs CUDA")):
        with pytest.raises(ValidationError, match="says in not_run why"):
            stamp.row("a", {}, results, not_run=reason)
    with pytest.raises(ValidationError, match="correctness is empty"):
        stamp.row("a", {}, GOOD | {"correctness": {}})
    with pytest.raises(ValidationError):
        stamp.row("a", {"scale": float("nan")}, GOOD).model_validate(
            stamp.row("a", {}, GOOD).model_dump() | {"run": "yesterday"}
        )


def test_rows_read_back_and_a_bad_line_is_named(stamp, tmp_path):
    rows = [stamp.row("a", {"n": 1}, GOOD), stamp.row("b", {"n": 1}, not_run="needs CUDA")]
    path = tmp_path / "deep" / "cpu.jsonl"
    append(rows[:1], path)
    append(rows[1:], path)
    assert read(path) == rows
    path.write_text(path.read_text() + '{"benchmark": "moe"}\n')
    with pytest.raises(DataError, match=r"cpu\.jsonl:3: run: Field required"):
        read(path)


def test_rows_go_to_the_repository_or_where_they_are_asked_to():
    root = Path(__file__).resolve().parents[2]
    assert root == ROOT and commit()
    assert where("x.jsonl") == Path("x.jsonl")
    assert where("") == root / "benchmarks" / "results" / f"{device_key(torch.device('cpu'))}.jsonl"


def test_every_committed_row_is_whole():
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):
        rows = read(path)
        assert rows and {row.machine.device for row in rows} == {path.stem}, path


def test_the_machine_is_this_one():
    assert machine("cpu").threads == torch.get_num_threads() and machine("cpu", 3).threads == 3
