"""A row that explodes in a real run: named in the error and written out with its row number and text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.generate import model as _  # noqa: F401  imported here, so that it doesn't keep the poisoned open_model of the test
from unfreeze.generate import open as opening

pytestmark = pytest.mark.usefixtures("fewer_layers")


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
        "--watch.samples",
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


def broken(folder: Path) -> Path:
    """tiny-k2 with one NaN in a file, in a weight that every token meets."""
    shutil.copytree(TINY_K2, folder)
    manifest = open_checkpoint(folder)
    info = manifest.tensors["model.layers.1.input_layernorm.weight"]
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xc0\x7f")  # NaN in bfloat16
    return folder


def test_answers_before_the_first_step_name_the_files_weight(chat_rows: Path, tmp_path: Path, capsys):
    """By default answers come before any step. Without them: the test above."""
    model, out = broken(tmp_path / "model"), tmp_path / "run"
    command = ["sft", "--quiet", "--model", model, "--data", chat_rows, "--out", out, "--steps", 1]
    assert cli.main([str(word) for word in command]) == 2
    said = capsys.readouterr().err
    assert "NonFinite: NaN from model.layers.1.input_layernorm.weight, a weight that no step changed" in said
    assert "next: download the checkpoint again" in said


def test_a_teachers_nan_is_the_teachers(chat_rows: Path, tmp_path: Path, capsys):
    model, out = broken(tmp_path / "teacher"), tmp_path / "run"
    command = [
        "distill",
        "--quiet",
        "--model",
        TINY_K2,
        "--teacher",
        model,
        "--data",
        chat_rows,
        "--out",
        out,
    ]
    assert cli.main([str(word) for word in [*command, "--steps", 1, "--watch.samples", 0]]) == 2
    said = capsys.readouterr().err
    assert f"the teacher {model} holds NaN in model.layers.1.input_layernorm.weight" in said, said


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
        "--watch.samples",
        0,
    ]
    assert cli.main([*map(str, command), "--lora.rank", "2", "--watch.on-spike", "stop"]) == 0
    assert cli.main([*map(str, command), "--lora.rank", "2", "--watch.on-spike", "skip"]) == 0
    assert cli.main([*map(str, command), "--watch.on-spike", "ignore"]) == 2
    capsys.readouterr()
