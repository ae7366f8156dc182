"""A row that explodes in a real run: named in the error and written out with its row number and text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.generate import model as _  # noqa: F401  imported here, so that it doesn't keep the poisoned open_model of the test
from unfreeze.generate import open as opening


def test_a_nan_of_one_word_names_module_and_row(
    chat_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    from unfreeze.data import load_tokenizer

    word = load_tokenizer(TINY_K2).encode(" frog", specials=False)[0]
    real = opening.open_model

    def poisoned(*arguments, **options):
        model = real(*arguments, **options)
        with torch.no_grad():
            model.model.embed_tokens.weight[word, 3] = float("nan")
        return model

    monkeypatch.setattr(opening, "open_model", poisoned)
    out = tmp_path / "run"
    command = [
        "sft",
        "--quiet",
        "--model",
        TINY_K2,
        "--data",
        chat_rows,
        "--out",
        out,
        "--tokens-per-step",
        256,
        "--steps",
        2,
        "--samples",
        0,
    ]
    assert cli.main([*map(str, command), "--lora.rank", "2"]) == 2
    said = capsys.readouterr().err
    assert (
        "NonFinite: step 1: NaN from model.embed_tokens.weight, a weight that no step changed: the checkpoint"
        in said
        and "next: download the checkpoint again" in said
    )
    lines = [json.loads(line) for line in (out / "suspects.jsonl").read_text(encoding="utf-8").splitlines()]
    # the rows stand three times in the file
    assert lines and all("frog" in line["text"] and len(line["rows"]) == 3 for line in lines)
    rows = [json.loads(text) for text in chat_rows.read_text(encoding="utf-8").splitlines()]
    assert all("frog" in json.dumps(rows[number - 1]) for line in lines for number in line["rows"])
    (event,) = [
        json.loads(line) for line in (out / "events.jsonl").read_text().splitlines() if '"train"' in line
    ]
    assert event["loss"] is None and "NaN first at model.embed_tokens, " in event["error"]


def test_on_spike_is_a_flag_that_may_change_within_a_run(chat_rows: Path, tmp_path: Path, capsys):
    out = tmp_path / "run"
    command = [
        "sft",
        "--quiet",
        "--model",
        TINY_K2,
        "--data",
        chat_rows,
        "--out",
        out,
        "--tokens-per-step",
        256,
        "--steps",
        1,
        "--samples",
        0,
    ]
    assert cli.main([*map(str, command), "--lora.rank", "2", "--on-spike", "stop"]) == 0
    assert cli.main([*map(str, command), "--lora.rank", "2", "--on-spike", "skip"]) == 0
    assert cli.main([*map(str, command), "--on-spike", "ignore"]) == 2
    capsys.readouterr()
