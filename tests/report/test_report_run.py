"""The facts of a run folder, each worked out by hand from three steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from unfreeze.core.errors import DataError
from unfreeze.report.run import (
    decimal_bytes,
    expert_balance,
    facts,
    first_event_time,
    load_words,
    read_run,
    result_words,
)


def made(folder: Path, *more: dict) -> Path:
    steps = [
        {"kind": "train", "step": step, "time": 60.0 * step, "loss": loss, "peak_bytes": peak}
        | {"tokens": 1000, "seconds": 2.0, "supervised_tokens": 250}
        for step, loss, peak in ((1, 3.0, 2**20), (2, 2.0, 2**21), (3, 1.0, 2**20))
    ]
    steps[0]["expert_load"] = {"1": [0, 0, 0], "0": [1, 2, 9]}
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*steps, *more]))
    return folder


def test_facts(tmp_path: Path):
    run = read_run(made(tmp_path))
    assert dict(facts(run)) == {
        "Loss": "3.000 → 1.000; first and last step",
        "Steps": "3",
        "Time": "2 min 00 s; steps 6.0 s, other 1 min 54 s",
        "Tokens per second": "500; without compiling",
        "Peak memory": "2.0 MiB",
        "Tokens": "3 K",
        "Supervised tokens": "750; 25% of all",
    }
    assert expert_balance(run) == [("0", 12, 2.25, 0), ("1", 0, 0.0, 3)]
    assert first_event_time(run) == "1970-01-01 00:01 UTC" and run.loaded == "" and run.name == tmp_path.name


def test_time_and_memory_say_what_they_count(tmp_path: Path):
    start, end = {"kind": "start", "step": 0}, {"kind": "end", "step": 3, "time": 160.0}
    plan = {"kind": "plan", "step": 0, "total": 2**20, "hardware": {"kind": "cpu", "process": 2**20}}
    found = dict(facts(read_run(made(tmp_path, start, plan, end))))
    # from the first event, at 60 s, to the last
    assert found["Time"] == "1 min 40 s; steps 6.0 s, other 1 min 34 s"
    assert found["Peak memory"] == "2.0 MiB; whole process (planned: 2.0 MiB to 821.2 MiB)"
    plan["hardware"] = {"kind": "cuda"}
    found = dict(facts(read_run(made(tmp_path, start, plan, start, end))))
    assert found["Time"] == "6.0 s; steps 6.0 s"  # control arm: two sessions, with a pause between them
    assert found["Peak memory"] == "2.0 MiB; GPU (planned: 1.0 MiB)"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ([], "unfinished: 3 of 5 steps so far"),
        ([{"kind": "end", "step": 3, "reason": "interrupted"}], "interrupted after step 3 of 5"),
        ([{"kind": "end", "step": 3, "reason": "done"}], "finished"),
    ],
)
def test_result(tmp_path: Path, end: list[dict], words: str):
    assert result_words(read_run(made(tmp_path, {"kind": "start", "step": 0, "steps": 5}, *end))) == words


def test_the_speed_is_that_of_all_steps_whatever_the_last_session_says(tmp_path: Path):
    run = read_run(made(tmp_path, {"kind": "end", "step": 3, "tokens_per_second": 480.0}))
    assert run.tokens_per_second == 500.0


def test_a_load_that_lost_precision_says_so():
    load = {"bytes": 2e9, "seconds": 1.0, "expanded_bytes": 0}
    assert load_words(load | {"rounded": 0}) == load_words(load) == "2.00 GB at 2.00 GB/s"
    assert (
        load_words(load | {"rounded": 12})
        == "2.00 GB at 2.00 GB/s; 12 tensors rounded to the dtype of the computation"
    )


def test_decimal_bytes():
    assert [decimal_bytes(size) for size in (7_340_032, 9.2e8, 5.95e11)] == ["7.3 MB", "0.92 GB", "595.00 GB"]
    assert [decimal_bytes(size) for size in (0, 12_480, 50_001)] == ["0.0 MB", "12.5 kB", "0.1 MB"]


@pytest.mark.parametrize(
    ("file", "damaged", "words"),
    [
        ("plan.json", {"lines": 5}, "plan.lines is 5"),
        ("plan.json", {"terms": {"base": 1.5}}, "plan.terms.base is 1.5"),
        ("receipt.json", {"groups": {"mlp": 3}}, "receipt.groups.mlp is 3"),
        ("receipt.json", {"groups": {"mlp": {"moved": "x"}}}, "receipt.groups.mlp.moved is 'x'"),
        ("receipt.json", {"exceptions": [{"why": "not moved"}]}, "receipt.exceptions.0.group is missing"),
    ],
)
def test_a_damaged_plan_or_receipt_is_refused_by_its_field(
    tmp_path: Path, file: str, damaged: dict, words: str
):
    (made(tmp_path) / file).write_text(json.dumps(damaged))
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / file}: {words}")):
        read_run(tmp_path)


def test_a_plan_and_a_receipt_of_another_version_are_read(tmp_path: Path):
    (made(tmp_path) / "plan.json").write_text(json.dumps({"total": 10, "speed": "?"}))
    (tmp_path / "receipt.json").write_text(json.dumps({"groups": {"mlp": {"moved": 0.5, "norm": "?"}}}))
    run = read_run(tmp_path)
    assert run.plan == {"total": 10, "speed": "?"} and run.groups["mlp"].get("moved") == 0.5


@pytest.mark.parametrize(
    "losses, words", [((4.026,), "4.026"), ((4.026, 3.5, 3.75), "4.026 → 3.750; lowest 3.500")]
)
def test_one_validation_is_one_number(losses: tuple[float, ...], words: str, tmp_path: Path):
    evals = [{"kind": "eval", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    assert dict(facts(read_run(made(tmp_path, *evals))))["Held-out loss"] == words
