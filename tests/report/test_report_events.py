"""Reading a run back: EventLog is the writer and the oracle; only the half line of a killed run may be left
out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unfreeze.core.errors import DataError
from unfreeze.core.events import EventLog
from unfreeze.core.schema import EndEvent, TrainEvent
from unfreeze.report.events import (
    by_layer,
    data_lines,
    expert_load,
    last,
    read_events,
    sample_pairs,
    series,
    warnings,
)
from unfreeze.report.html import summary_lines


def written(path: Path) -> list[dict]:
    log = EventLog(path)
    events = [
        log.emit("train", step, loss=1.0 / step, grad_norm=None, expert_load={"10": [1, 0], "9": [step, 1]})
        for step in (1, 2, 3)
    ]
    log.close()
    return events


def test_reads_what_event_log_wrote(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    assert written(path) == read_events(path)


@pytest.mark.parametrize("cut", [1, 2, 10, 60])
def test_half_line_at_the_end_is_left_out(tmp_path: Path, cut: int):
    path = tmp_path / "events.jsonl"
    events = written(path)
    path.write_bytes(path.read_bytes()[:-cut])
    kept = read_events(path)
    # one byte less takes the newline only: the event is whole
    assert kept == (events if cut == 1 else events[:2])


def test_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    written(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:20], lines[2]]) + "\n")
    with pytest.raises(DataError, match="line 2 is not JSON"):
        read_events(path)
    # a broken last line WITH its newline was not cut by a kill
    path.write_text("\n".join([lines[0], lines[1][:20]]) + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_events(path)


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"step": 1}', '{"kind": "train"}', '{"kind": "train", "step": "1"}']
)
def test_line_that_is_no_event_is_an_error(tmp_path: Path, line: str):
    path = tmp_path / "events.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match="line 1 is not an event"):
        read_events(path)


def test_missing_file_is_a_user_error(tmp_path: Path):
    with pytest.raises(DataError, match=r"events\.jsonl is missing"):
        read_events(tmp_path / "events.jsonl")


def test_series_leaves_out_absent_and_not_finite():
    events = [
        json.loads(f'{{"kind": "train", "step": {step}, "loss": {loss}}}')
        for step, loss in ((1, "2"), (2, "NaN"), (3, "null"), (4, "1.5"))
    ]
    assert series([*events, {"kind": "eval", "step": 4, "loss": 9.0}], "train", "loss") == (
        [1, 4],
        [2.0, 1.5],
    )
    assert last(events, TrainEvent) is events[-1] and last(events, EndEvent) is None


@pytest.mark.parametrize("value", ['"2"', "NaN", "Infinity", "1e301", "true", "[1]"])
def test_a_value_of_another_type_is_an_error_with_its_line_kind_and_field(tmp_path: Path, value: str):
    path = tmp_path / "events.jsonl"
    written(path)
    path.write_bytes(path.read_bytes() + f'{{"kind": "train", "step": 4, "loss": {value}}}\n'.encode())
    with pytest.raises(DataError, match=r"line 4: train\.loss is .*: Input should be a"):
        read_events(path)


def test_expert_load_is_the_sum_in_numeric_order(tmp_path: Path):
    assert list(expert_load(written(tmp_path / "e.jsonl")).items()) == [("9", [6, 3]), ("10", [3, 0])]
    with pytest.raises(DataError, match="layer 1 has 2 experts at step 2, 3 before"):
        expert_load(
            [
                {"kind": "train", "step": 1, "expert_load": {"1": [1, 1, 1]}},
                {"kind": "train", "step": 2, "expert_load": {"1": [1, 1]}},
            ]
        )


def test_samples_are_paired_by_prompt():
    sample = {"kind": "sample", "step": 0}
    events = [
        sample | {"when": "before", "prompt": "a", "text": "1"},
        sample | {"when": "before", "prompt": "b", "text": "2"},
        sample | {"when": "after", "prompt": "a", "text": "3"},
        sample | {"when": "after", "prompt": "a", "text": "4"},
    ]
    assert sample_pairs(events) == [("a", "1", "4"), ("b", "2", None)]


def test_two_rows_with_the_same_question_are_two_samples():
    sample = {"kind": "sample", "step": 0, "prompt": "a"}
    events = [
        sample | {"index": i, "when": when, "text": f"{when} {i}"}
        for when in ("before", "after")
        for i in (0, 1)
    ]
    assert sample_pairs(events) == [("a", "before 0", "after 0"), ("a", "before 1", "after 1")]
    # control: without the index they merge
    assert len(sample_pairs([{k: v for k, v in e.items() if k != "index"} for e in events])) == 1


def test_data_lines_name_the_first_rows_left_out():
    listed = [{"row": row, "reason": f"row {row}: empty"} for row in range(1, 21)]
    account = {"kind": "data", "step": 0, "summary": "100 rows", "dropped": 30, "bad": 2, "listed": listed}
    more = "left out: 29 more rows; events.jsonl names the first 20"
    assert data_lines([account]) == ["100 rows", *(f"left out: row {row}: empty" for row in (1, 2, 3)), more]
    assert (
        data_lines([account | {"dropped": 0, "bad": 0, "listed": []}]) == ["100 rows"]
        and data_lines([]) == []
    )


def test_a_long_account_of_the_data_is_folded_at_80_columns(tmp_path: Path):
    whole = (
        "2 rows (messages 2), 39 tokens, 28.2 % supervised; 0 truncated, 0 dropped, 0 bad, 0 duplicates; end"
    )
    (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "data", "step": 0, "summary": whole}) + "\n")
    (tmp_path / "resolved_config.json").write_text("{}")
    _, *said = " ".join(f"{line}\n" for line in summary_lines(tmp_path)).partition("  Data ")
    lines = "".join(said).splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 80
    assert " ".join("".join(said).split()) == f"Data {whole}"  # nothing is lost


def test_warnings_of_both_kinds():
    events = [
        {"kind": "warning", "step": 3, "message": "x"},
        {"kind": "load", "step": 0, "warning": "y"},
        {"kind": "train", "step": 4},
    ]
    assert warnings(events) == [(3, "x"), (0, "y")]


def test_passes_of_a_chain_follow_their_layer():
    names = ["10", "2.10", "2", "2.1", "0.1", "0", "odd"]
    ordered = [name for name, _ in by_layer(dict.fromkeys(names, 0))]
    assert ordered == ["0", "0.1", "2", "2.1", "2.10", "10", "odd"]
