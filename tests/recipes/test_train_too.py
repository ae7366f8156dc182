"""`--train-too`: a run that trains modules fully beside its adapters, and what reads its folder."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.train import state as saving

WORDS = "--tokens-per-step 64 --learning-rate 2e-3 --watch.samples 0 --dtype float32 --lora.rank 2".split()
TOO = ["--train-too", "norm,*.gate,lm_head", "--lora.targets", "attention"]
WHOLE = {"lm_head.weight", "model.norm.weight", *(f"model.layers.{i}.mlp.gate.weight" for i in (1, 2, 3))}


def sft(capsys, *arguments, code=0):
    assert cli.main(["sft", "--json", *map(str, arguments), *WORDS]) == code
    said = capsys.readouterr()
    return said.err if code else json.loads(said.out.splitlines()[-1])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    turns = [{"prompt": f"What is {n}?", "completion": f"{n}, it is. Hmm."} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in turns))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory, rows):
    out = tmp_path_factory.mktemp("runs") / "too"
    given = ["--model", TINY_K2, "--data", rows, "--out", out, "--steps", 4, "--save.every", 2]
    assert cli.main(["sft", "--quiet", *map(str, given), *TOO, *WORDS]) == 0
    return out


def whole_of(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): t for name, t in tensors.items() if ".lora_" not in name}


def test_the_folder_has_what_trained_and_the_receipt_names_it(run):
    own, base = whole_of(run / "adapter"), load_file(TINY_K2 / "model.safetensors")
    trained = {name for name in own if not name.endswith("e_score_correction_bias")}
    assert trained == WHOLE
    assert all(own[name].dtype == torch.float32 for name in own)
    assert all(not torch.equal(own[name], base[name].float()) for name in trained)
    receipt = json.loads((run / "receipt.json").read_text())["groups"]
    assert receipt["router"]["trained"] == 3 * 16 * 128 and receipt["router"]["sites_moved"] == 3
    assert receipt["lm_head"]["trained"] and receipt["norms"]["trained"] == 128
    assert not receipt["experts"]["trained"] and not receipt["embeddings"]["trained"]  # control


def test_a_resumed_run_is_the_run_that_was_not_stopped(run, rows, capsys, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(run, again)
    for name in ("state/step-000004", "adapter"):
        shutil.rmtree(again / name)
    assert sft(
        capsys, "--model", TINY_K2, "--data", rows, "--out", again, "--steps", 4, "--save.every", 2, *TOO
    )["finished"]
    one, other = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (run, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    two = saving.saves(again)[0]
    assert {name for name in load_file(two / "tensors.safetensors") if name.startswith("model.lm_head")}


def test_it_goes_on_merges_and_is_loaded(run, rows, capsys, tmp_path):

    model, base = (unfreeze.load(name, dtype="float32") for name in (run, TINY_K2))
    logits = model.logits([[5, 6, 7, 8]])[0]
    moved = (logits - base.logits([[5, 6, 7, 8]])[0]).abs().max()
    assert moved > 1e-2  # control
    # merged: the same logits, within bf16's rounding of stored weights
    assert (
        cli.main(["merge", str(run), "--to", "bf16", "--no-check", "--out", str(tmp_path / "m"), "--quiet"])
        == 0
    )
    merged, own = load_file(tmp_path / "m/model.safetensors"), whole_of(run / "adapter")
    assert all(torch.equal(merged[name], own[name].to(merged[name].dtype)) for name in WHOLE)
    merged_model = unfreeze.load(tmp_path / "m", dtype="float32")
    assert (merged_model.logits([[5, 6, 7, 8]])[0] - logits).abs().max() < moved / 4
    # exported for peft: the same file; continued: the first loss is that of the trained model
    assert cli.main(["export", str(run), "--for", "peft", "--out", str(tmp_path / "e"), "--quiet"]) == 0
    assert all(torch.equal(own[name], tensor) for name, tensor in whole_of(tmp_path / "e").items())
    sft(capsys, "--adapter", tmp_path / "e", "--data", rows, "--out", tmp_path / "more", "--steps", 1)
    config = json.loads((tmp_path / "more/resolved_config.json").read_text())
    assert len(config["lora.train_too"]) == 5
    more = whole_of(tmp_path / "more/adapter")
    assert more.keys() == own.keys() and not torch.equal(more["lm_head.weight"], own["lm_head.weight"])


def test_refused_in_one_line_before_work(rows, capsys, tmp_path):
    out = ["--model", TINY_K2, "--data", rows, "--out", tmp_path / "no", "--steps", 1]
    assert "matches none" in sft(capsys, *out, "--train-too", "nrom", code=2)
    said = sft(capsys, *out, "--train-too", "norm", "--train", "all", "--lora.rank", "2", code=2)
    assert "has no adapters" in said and "lora.train_too" in said
    assert not (tmp_path / "no/adapter").exists()
