"""Nouns: batch lengths, units, events and what happens to the half line of a killed run."""

import json

import pytest
import torch

from unfreeze.core.batch import Batch
from unfreeze.core.conform import damage
from unfreeze.core.errors import UserError
from unfreeze.core.events import EventLog, truncate_after
from unfreeze.core.units import format_bytes, format_count, format_of, format_seconds, format_step, plural


def test_lengths_sum_to_the_tokens():
    batch = Batch(*(torch.zeros(9, dtype=torch.int64) for _ in range(4)), starts_S=torch.tensor([0, 4, 5]))
    assert batch.lengths() == [4, 1, 4] and batch.num_tokens == 9


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (594.2e9, "553.4 GiB"),
        (2e12, "1.8 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


def test_a_part_that_is_too_much_says_so_where_a_decimal_hides_it():
    whole = 700 * 2**30
    assert format_of(whole, whole) == "700.0 GiB of 700.0 GiB"
    assert format_of(whole + 5 * 2**20, whole) == "700.0 GiB of 700.0 GiB, 5.0 MiB too much"
    assert format_of(2 * whole, whole) == "1.4 TiB of 700.0 GiB"


def test_counts_and_seconds():
    assert [format_count(n) for n in (7, 1234, 1_026e9, 44.04e6)] == ["7", "1.23 K", "1.03 T", "44 M"]
    assert [format_seconds(s) for s in (0.25, 42, 75, 3700)] == ["0.2 s", "42 s", "1 min 15 s", "1 h 01 min"]


def test_one_thing_has_no_s():
    assert [plural(n, "row") for n in (0, 1, 2, 1234)] == ["0 rows", "1 row", "2 rows", "1,234 rows"]


def test_an_error_says_what_to_do_next():
    assert (
        str(UserError("rank 0 is below 1", next="--lora.rank 8"))
        == "rank 0 is below 1\n  next: --lora.rank 8"
    )


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_lines_and_listeners_hear_them(tmp_path):
    heard = []
    log = EventLog(tmp_path / "run" / "events.jsonl", (heard.append,))
    log.emit("train", 1, loss=2.5, grad_norm=1.0)
    with pytest.raises(ValueError, match=r"train\.loss is nan: Input should be a finite number"):
        log.emit("train", 2, loss=float("nan"), grad_norm=1.0)
    with pytest.raises(ValueError, match=r"train\.loss is tensor\(\[1\.\]\): Input should be a valid number"):
        log.emit("train", 2, loss=torch.ones(1), grad_norm=1.0)
    log.close()
    lines = lines_of(tmp_path / "run" / "events.jsonl")
    assert (
        [(e["kind"], e["step"], e["loss"]) for e in lines]
        == [("train", 1, 2.5)]
        == [(e["kind"], e["step"], e["loss"]) for e in heard]
    )


@pytest.mark.parametrize("value", [float("nan"), torch.ones(1), "2.5"])
def test_in_a_run_a_field_that_does_not_conform_is_left_out_and_said_once(tmp_path, monkeypatch, value):
    monkeypatch.setattr(EventLog, "strict", False)
    heard = []
    log = EventLog(tmp_path / "events.jsonl", (heard.append,))
    for step in (9998, 9999):
        log.emit("train", step, loss=2.5, grad_norm=value, tokens=8)
    log.emit("end", 9999, reason="done", steps=9999, tokens_per_second=None)
    lines = lines_of(tmp_path / "events.jsonl")
    assert lines == heard and [(e["kind"], e["step"]) for e in lines] == [
        ("train", 9998),
        ("warning", 9998),
        ("train", 9999),
        ("end", 9999),
    ]
    assert lines[0]["loss"] == 2.5 and lines[0]["tokens"] == 8 and "grad_norm" not in lines[0]
    message = lines[1]["message"]
    assert "training continues" in message and f"train.grad_norm is {value!r}: Input should be" in message
    assert [damage(line) for line in lines] == [[]] * 4


def test_in_a_run_a_field_that_is_missing_or_unknown_and_a_kind_that_is_unknown_are_said(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(EventLog, "strict", False)
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("save", 3, size=7)
    log.emit("trian", 4, loss=1.0)
    log.emit("train", torch.ones(1), loss=1.0)
    kinds = [(e["kind"], e["step"]) for e in lines_of(tmp_path / "events.jsonl")]
    assert kinds == [
        ("save", 3),
        ("warning", 3),
        ("warning", 3),
        ("warning", 4),
        ("warning", 0),
        ("warning", 0),
    ]
    words = " ".join(e.get("message", "") for e in lines_of(tmp_path / "events.jsonl"))
    for said in (
        "save.path is missing",
        "save.size is 7",
        "'trian'",
        "train.step is tensor",
        "grad_norm is missing",
    ):
        assert said in words


def test_resuming_drops_later_lines_the_end_and_a_half_line(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = [
        {"kind": "train", "step": 1},
        {"kind": "train", "step": 2},
        {"kind": "end", "step": 2},
        {"kind": "train", "step": 3},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr')
    truncate_after(path, 2, ended=True)
    assert lines_of(path) == lines[:3]
    truncate_after(path, 2)
    assert lines_of(path) == lines[:2]


@pytest.mark.parametrize(
    "seconds, words",
    [(0.0, "0.0 s"), (0.00423, "0.0042 s"), (0.53, "0.53 s"), (2.345, "2.3 s"), (75, "1 min 15 s")],
)
def test_the_time_of_a_step_keeps_two_digits(seconds: float, words: str):
    assert format_step(seconds) == words
