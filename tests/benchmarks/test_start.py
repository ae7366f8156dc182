"""bench start: the clock ends at the run's first step, and a run that fails is said."""

import json

import pytest

from benchmarks.cases import start
from benchmarks.harness.rows import read
from unfreeze.core.command import Common


@pytest.mark.nightly
def test_a_warm_start_finds_what_the_first_compiled(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "One?", "completion": "Two."}) + "\n")
    kept = tmp_path / "kept.jsonl"
    config = start.Config(append=str(kept), pairs=1, threads=1, dtype="float32")
    start.measure(config, Common(quiet=True), str(rows))
    first, warm = read(kept)
    assert (first.side, warm.side) == ("first", "warm")
    assert 0 < warm.results["seconds"] < first.results["seconds"]


def test_a_run_that_fails_is_said(tmp_path):
    config = start.Config(append=str(tmp_path / "kept.jsonl"), pairs=1)
    with pytest.raises(RuntimeError, match=r"ended with 2.*nowhere\.jsonl"):
        start.first_step(tmp_path, "first", "nowhere.jsonl", config)
