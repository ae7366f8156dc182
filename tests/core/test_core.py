"""Nouns: batch lengths, units, events and what happens to the half line of a killed run."""

import json

import pytest
import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError, nearest
from unfreeze.core.events import EventLog, truncate_after
from unfreeze.core.units import format_bytes, format_count, format_seconds


def test_lengths_sum_to_the_tokens():
    batch = Batch(*(torch.zeros(9, dtype=torch.int64) for _ in range(4)), starts_S=torch.tensor([0, 4, 5]))
    assert batch.lengths() == [4, 1, 4] and batch.num_tokens == 9


@pytest.mark.parametrize(
    "value, text",
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (594.2e9, "553.4 GiB"), (2e12, "1.8 TiB"), (-2048, "-2.0 KiB")],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


def test_counts_and_seconds():
    assert [format_count(n) for n in (7, 1234, 1_026e9, 44.04e6)] == ["7", "1.23 K", "1.03 T", "44 M"]
    assert [format_seconds(s) for s in (0.25, 42, 75, 3700)] == ["0.2 s", "42 s", "1 min 15 s", "1 h 01 min"]


def test_an_error_says_what_to_do_next():
    assert str(UserError("rank 0 is below 1", next="--lora.rank 8")) == "rank 0 is below 1\n  next: --lora.rank 8"
    assert nearest("rnak", ["rank", "alpha"]) == "; nearest: 'rank'" and nearest("zzz", ["rank"]) == ""


def test_events_are_lines_and_listeners_hear_them(tmp_path):
    heard = []
    log = EventLog(tmp_path / "run" / "events.jsonl", (heard.append,))
    log.emit("train", 1, loss=2.5)
    with pytest.raises(ValueError):
        log.emit("train", 2, loss=float("nan"))
    with pytest.raises(TypeError, match="Tensor is not plain JSON"):
        log.emit("train", 2, loss=torch.ones(1))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [(e["kind"], e["step"], e["loss"]) for e in lines] == [("train", 1, 2.5)] == [(e["kind"], e["step"], e["loss"]) for e in heard]


def test_resuming_drops_later_lines_the_end_and_a_half_line(tmp_path):
    path = tmp_path / "events.jsonl"
    lines = [{"kind": "train", "step": 1}, {"kind": "train", "step": 2}, {"kind": "end", "step": 2}, {"kind": "train", "step": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr')
    truncate_after(path, 2, ended=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:3]
    truncate_after(path, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == lines[:2]
