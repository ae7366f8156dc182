"""unfreeze swap as a command: its figures, what it writes beside the weights, training after it, what it refuses."""

import json

import pytest
import torch

import unfreeze
from tests.compress.test_swap import ATTENTION, IDS, assert_same_bits, swapped, tensors
from tests.compress.test_upcycle import random_model
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.inspect import inspect
from unfreeze.commands.swap import options_of
from unfreeze.core.errors import ConfigError


def refused(capsys, *words: object) -> str:
    assert cli.main(["swap", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_packed_weights_are_counted_as_weights(tmp_path, capsys):
    """The layers' own, as `inspect` counts them from the files; not the words of eight codes."""
    words = ["swap", str(TINY_K2), "layers.*", "shorten", "--out", str(tmp_path / "out"), "--json"]
    assert cli.main(words) == 0
    facts = inspect(str(TINY_K2))
    ends = sum(facts["groups"][name]["parameters"] for name in ("embeddings", "lm_head"))
    last_norm = 128
    assert json.loads(capsys.readouterr().out)["copied"] == facts["parameters"] - ends - last_norm


def test_the_last_lines_have_the_figures_and_the_next_command(tmp_path, capsys):
    model, out = random_model(tmp_path / "tiny", "Llama", {}), tmp_path / "out"
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\nmine")
    command = ["swap", str(model), ATTENTION, "qk_norm", "--out", str(out), "--json"]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["drawn"] == 3 * 2 * 16
    assert result["copied"] == 3 * (2 * 64 * 64 + 2 * 32 * 64)
    assert result["dropped"] == 0
    assert result["layers"] == [0, 1, 2]
    assert not result["same"]
    assert "qk_norm in place of layers.*.self_attn (3 modules): 36.9 K parameters copied" in printed.err
    assert f"unfreeze sft --train all --model {out} --data FILE" in printed.err
    card = (out / "README.md").read_text()
    assert 'license: "apache-2.0"' in card
    assert "tiny, with other parts" in card
    assert str(tmp_path) not in card
    assert (out / "README.base.md").read_text().endswith("mine")
    assert json.loads((out / "swap.json").read_text())["settings"]["drawn"] == 96
    assert cli.main(command) == 0  # again: everything is there
    assert json.loads(capsys.readouterr().out) == result
    assert cli.main(["inspect", str(out), "--json", "--quiet"]) == 0
    assert cli.main(["plan", "--model", str(out), "--json", "--quiet"]) == 0


def test_a_copy_says_that_nothing_changes(tmp_path, capsys):
    out = tmp_path / "out"
    command = ["swap", str(unfreeze.TINY_K2), ATTENTION, "full", "--out", str(out), "--json"]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["same"]
    assert result["parts"] == []
    assert "is a copy of the model" in printed.err
    for name in ("config.json", "model.safetensors", "tiktoken.model"):
        assert (out / name).read_bytes() == (unfreeze.TINY_K2 / name).read_bytes()


@pytest.mark.parametrize("train", ["all", "adapters"])
def test_a_swapped_model_trains_saves_and_loads_again(train, tmp_path, chat_rows, planted_parts):
    if train == "adapters":  # packed experts stay packed
        model = swapped(unfreeze.TINY_K2, tmp_path / "model", "layers.1.self_attn", "gated")
        name = "model.layers.1.self_attn.out_gate.weight"
    else:
        plain = random_model(
            tmp_path / "plain", "Llama", {"vocab_size": 1536, "max_position_embeddings": 512}
        )
        for file in ("tiktoken.model", "tokenizer_config.json"):
            (plain / file).write_bytes((unfreeze.TINY_K2 / file).read_bytes())
        model = swapped(plain, tmp_path / "model", ATTENTION, "qk_norm")
        name = "model.layers.1.self_attn.q_norm.weight"
    run = tmp_path / "run"
    settings = {"steps": 3, "tokens_per_step": 256, "samples": 0, "dtype": "float32", "device": "cpu"}
    more = {"rank": 2} if train == "adapters" else {"train": "all"}
    done = unfreeze.sft(model=model, data=chat_rows, out=run, quiet=True, threads=1, **settings, **more)
    assert len(done.losses) == 3
    assert all(torch.tensor(done.losses).isfinite())
    if train == "all":
        before, after = tensors(model), tensors(run / "model")
        assert before.keys() == after.keys()
        assert not torch.equal(before[name], after[name])
        written, own = (json.loads((folder / "config.json").read_text()) for folder in (run / "model", model))
        assert written["parts"] == own["parts"]
    else:
        assert any("out_gate" in key for key in tensors(run / "adapter"))
    ids = IDS[:20]
    assert unfreeze.load(run, dtype="float32").generate(ids, max_new_tokens=2)
    base = unfreeze.load(model, dtype="float32")
    assert not torch.equal(unfreeze.load(run, dtype="float32").logits([ids])[0], base.logits([ids])[0])


def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, planted_parts):
    model, out = random_model(tmp_path / "model", "Llama", {}), tmp_path / "out"
    cases = {
        ("layers.*.atn", "full"): "'layers.*.atn' names no place for a part",
        ("layers.7.self_attn", "full"): "the model has layers 0 to 2",
        (ATTENTION, "fulll"): "'fulll' is no part; nearest: 'full'",
        (ATTENTION, "sliding_windov"): "nearest: 'sliding_window'",
        ("layers.*", "full"): "full cannot stand at 'layers.*'",
        (ATTENTION, "sliding_window", "--set", "windows=4"): "has no option 'windows'; nearest: 'window'",
        (ATTENTION, "sliding_window", "--set", "window=0"): "window is 0; it must be a whole number from 1",
        (ATTENTION, "sliding_window", "--set", "window=four"): "window is 'four'; it must be a whole number",
        (ATTENTION, "sliding_window", "--set", "window"): "--set 'window' is no NAME=VALUE",
        (ATTENTION, "full", "--init", "cpoy"): "init",
        (ATTENTION, "narrow"): "narrow needs [16, 64]",
    }
    for words, message in cases.items():
        error = refused(capsys, model, *words, "--out", out)
        assert message in error
        assert "Traceback" not in error
        assert not out.exists()
    assert "unfreeze swap needs" in refused(capsys, model, ATTENTION, "full")
    assert "the model's own folder" in refused(capsys, model, ATTENTION, "full", "--out", model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "resolved_config.json").write_text("{}")
    for part in ("full", "qk_norm"):  # a run's folder
        error = refused(capsys, model, ATTENTION, part, "--out", tmp_path / "full")
        assert "holds resolved_config.json" in error


def test_runs_and_adapters_are_no_models(tmp_path, capsys):
    adapter, run, whole = tmp_path / "adapter", tmp_path / "run", tmp_path / "whole"
    for folder in (adapter, run, whole, whole / "model"):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (run / "resolved_config.json").write_text("{}")
    (whole / "resolved_config.json").write_text("{}")
    (whole / "model" / "config.json").write_text("{}")
    for folder in (adapter, run):
        error = refused(capsys, folder, ATTENTION, "full", "--out", tmp_path / "out")
        assert "has adapters" in error
        assert f"unfreeze merge {folder} --to bf16 --out DIR, then swap DIR" in error
    error = refused(capsys, whole, ATTENTION, "full", "--out", tmp_path / "out")
    assert f"swap its model: {whole / 'model'}" in error


def test_options_are_numbers_truths_and_texts():
    assert options_of(["block=64", "rate=0.5", "gate=low_rank", "own=true"]) == {
        "block": 64,
        "rate": 0.5,
        "gate": "low_rank",
        "own": True,
    }
    assert options_of(["x=[1]", "y=null"]) == {"x": "[1]", "y": "null"}
    with pytest.raises(ConfigError, match="twice"):
        options_of(["a=1", "a=2"])


def test_the_bits_after_a_command_are_those_before(tmp_path):
    model = random_model(tmp_path / "model", "Qwen2", {}, torch.bfloat16)
    assert_same_bits(tensors(model), tensors(swapped(model, tmp_path / "out", ATTENTION, "sliding_window")))
