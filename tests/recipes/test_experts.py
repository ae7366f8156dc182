"""Pretraining a chain of experts from nothing, with drawn experts and the auxiliary loss; killed and resumed; and what
is refused or warned of."""

import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parent))
from chain_case import built
from runs import Stopped, of_kind, stopping_at
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.experts import Experts
from unfreeze.config.parse import parse
from unfreeze.core.errors import ConfigError
from unfreeze.data.packing.drawn import Drawn
from unfreeze.job.end.result import next_command
from unfreeze.job.experts import routed
from unfreeze.job.watch.balancing import BiasWatch

SIZES = {
    "vocab_size": json.loads((TINY_K2 / "config.json").read_text())["vocab_size"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CHAIN = {**SIZES, **MOE, "model_type": "chain_of_experts", "n_routed_experts": 4, "inner_iter": 2}
QWEN = {**SIZES, **MOE, "model_type": "qwen3_moe", "num_experts": 4, "head_dim": 16}
DENSE = {**SIZES, "model_type": "llama"}
DRAWN = {"experts.choice": "drawn", "experts.balance_loss": 0.01, "micro_batches": 2}


@pytest.fixture
def start(tmp_path):
    """-> a folder with this config and a tokenizer, and no weights."""

    def make(config):
        folder = tmp_path / config["model_type"]
        folder.mkdir()
        for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(TINY_K2 / name, folder / name)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(f"The young of animal number {i} is small. It grows." for i in range(40)))
    return str(path)


def ran(model, text, out, on_step=(), **fields):
    usual = {"steps": 6, "tokens_per_step": 256, "watch.samples": 0, "optimizer.warmup": 0.0}
    given = {**usual, **fields}
    return unfreeze.pretrain(model=model, data=text, out=str(out), on_step=on_step, quiet=True, **given)


def told(run):
    """What a train event computed; not how long it took."""
    kept = ("loss", "grad_norm", "expert_load", "balance_loss")
    return [{name: event[name] for name in kept} for event in of_kind(run, "train")]


def test_from_nothing_to_answers(start, text, tmp_path, unfreeze_json):
    run = ran(start(CHAIN), text, tmp_path / "run", **{"watch.samples": 1, "validation_fraction": 0.1})
    losses = [event["loss"] for event in of_kind(run, "train")]
    assert losses[-1] < losses[0]
    tensors = load_file(run.path / "model" / "model.safetensors")
    assert {name for name in tensors if ".passes." in name} == {
        f"model.layers.{layer}.passes.1.{part}"
        for layer in (0, 1)
        for part in ("gate.weight", "gate.e_score_correction_bias", "norm.weight")
    }
    event = of_kind(run, "train")[-1]
    assert list(event["expert_load"]) == ["0", "1", "0.1", "1.1"] == list(event["expert_balance"])
    # the bias of each gate has moved, by 0.001 a step at most
    for layer in (0, 1):
        for gate in ("mlp.gate", "passes.1.gate"):
            bias = tensors[f"model.layers.{layer}.{gate}.e_score_correction_bias"]
            assert 0 < bias.abs().max() <= 6.1e-3
    page = (run.path / "report.html").read_text()
    assert "0.1" in page and "4 layers down" in page
    model = unfreeze.load(run.path, dtype="float32")
    assert len(model.generate("The young of", max_new_tokens=4)) > 0
    assert of_kind(run, "gap")[-1]["logprob_gap_max"] < 1e-5  # steps against the packed pass
    facts = unfreeze_json("inspect", str(run.path / "model"))
    assert facts["expert_passes"] == 2


def test_an_adapter_of_a_chain_trains_is_loaded_and_is_exported_to_nobody(start, text, tmp_path, capsys):
    base = ran(start(CHAIN), text, tmp_path / "base", steps=1).path / "model"
    run = unfreeze.sft(
        model=str(base),
        data=text,
        out=str(tmp_path / "sft"),
        steps=2,
        tokens_per_step=256,
        quiet=True,
        **{"watch.samples": 1},
    )
    assert run.receipt["experts"]["trained"] and of_kind(run, "sample")[-1]["when"] == "after"
    assert of_kind(run, "plan")[0]["export_for"] == ""
    assert "export" not in next_command(run.path, {"finished": True, "steps": 2}, "", export=True)
    for reader in ("vllm", "sglang", "peft"):
        assert cli.main(["export", str(run.path), "--for", reader]) == 2
        said = capsys.readouterr().err
        assert "chain_of_experts" in said and "unfreeze generate" in said


def test_a_run_that_was_killed_draws_and_balances_as_one_that_was_not(start, text, tmp_path, monkeypatch):
    model = start(CHAIN)
    whole = ran(model, text, tmp_path / "whole", **DRAWN)
    with pytest.raises(Stopped):  # behind step 3, of which the last save is step 2's
        ran(model, text, tmp_path / "killed", on_step=[stopping_at(3)], **DRAWN, save_every=2)
    resumed = ran(model, text, tmp_path / "killed", **DRAWN, save_every=2)
    assert told(resumed)[-4:] == told(whole)[-4:] and len(told(whole)) == 6
    ours, theirs = (load_file(run.path / "model" / "model.safetensors") for run in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    # control: a source that numbers its steps anew
    with pytest.raises(Stopped):
        ran(model, text, tmp_path / "anew", on_step=[stopping_at(3)], **DRAWN, save_every=2)
    begin = Drawn.__init__
    monkeypatch.setattr(
        Drawn, "__init__", lambda self, source, **keys: begin(self, source, **{**keys, "step": 0})
    )
    anew = ran(model, text, tmp_path / "anew", **DRAWN, save_every=2)
    assert told(anew)[-4:] != told(whole)[-4:]


def test_validation_takes_the_best_experts(start, text, tmp_path):
    model, held = start(CHAIN), {"validation_fraction": 0.2, "steps": 1}
    runs = [ran(model, text, tmp_path / name, **held, **more) for name, more in (("a", {}), ("b", DRAWN))]
    before = [of_kind(run, "eval")[0]["loss"] for run in runs]
    assert before[0] == pytest.approx(before[1], rel=1e-6)
    assert of_kind(runs[0], "train")[0]["expert_load"] != of_kind(runs[1], "train")[0]["expert_load"]
    again = ran(model, text, tmp_path / "c", **held, **{**DRAWN, "experts.temperature": 0.5})
    assert of_kind(again, "train")[0]["expert_load"] != of_kind(runs[1], "train")[0]["expert_load"]


def test_a_model_that_nothing_balances_is_warned_of_once(start, text, tmp_path):
    model = start(QWEN)
    bare = ran(model, text, tmp_path / "bare", steps=2)
    warned = [event["message"] for event in of_kind(bare, "warning") if "balances" in event["message"]]
    assert len(warned) == 1 and "no bias" in warned[0] and "--experts.balance-loss 0.01" in warned[0]
    balanced = ran(model, text, tmp_path / "balanced", steps=2, **{"experts.balance_loss": 0.01})
    chain = ran(start(CHAIN), text, tmp_path / "chain", steps=2)
    for run in (balanced, chain):
        assert not [event for event in of_kind(run, "warning") if "balances" in event["message"]]
    assert all(event["balance_loss"] >= 0.5 for event in of_kind(balanced, "train"))
    assert "balance_loss" not in of_kind(chain, "train")[0]
    off = ran(str(tmp_path / "chain_of_experts"), text, tmp_path / "off", steps=2, **{"balance_rate": 0.0})
    assert any("a balance_rate above 0" in event["message"] for event in of_kind(off, "warning"))


@pytest.mark.parametrize("config", [QWEN, DENSE])
def test_a_balance_rate_that_nothing_could_follow_is_refused(start, text, tmp_path, config):
    model = start(config)
    has = "its routers have no selection bias" if config is QWEN else "it has no experts"
    with pytest.raises(ConfigError, match=f"optimizer.balance_rate is given, but {has}") as refused:
        ran(model, text, tmp_path / "run", balance_rate=0.01)
    assert ("balance_loss" in refused.value.next) == (config is QWEN)


CLIPPED = {"optimizer.kind": "muon", "muon.qk_clip": 100.0}


def test_the_auxiliary_loss_is_the_same_where_logits_are_watched_too(start, text, tmp_path):
    """qk-clip wraps the objective: the loss must still learn the size of the step, and show all its metrics."""
    model, first = start(CHAIN), []
    for name, more in (("muon", {"optimizer.kind": "muon"}), ("clipped", CLIPPED)):
        run = ran(model, text, tmp_path / name, steps=1, **DRAWN, **more)
        first.append(of_kind(run, "train")[0])
    assert first[1]["balance_loss"] == first[0]["balance_loss"] > 0.5
    assert first[1]["grad_norm"] == first[0]["grad_norm"]
    assert 0 < first[1]["largest_logit"] < 100


def test_a_clip_balances_nothing(start, text, tmp_path):
    greedy = start({**CHAIN, "topk_method": "greedy"})
    run = ran(greedy, text, tmp_path / "run", steps=1, **CLIPPED)
    assert any("nothing balances the experts" in event["message"] for event in of_kind(run, "warning"))


def test_what_has_no_effect_is_refused(start, text, tmp_path):
    with pytest.raises(ValueError, match=r"no effect with experts\.choice = best"):
        Experts(temperature=0.5)
    dense = start(DENSE)
    for field, value in (("balance_loss", 0.01), ("choice", "drawn")):
        with pytest.raises(ConfigError, match=rf"experts\.{field} is given, but no layer") as caught:
            ran(dense, text, tmp_path / field, **{f"experts.{field}": value})
        assert caught.value.next
    assert not list((tmp_path / "choice").glob("state/*"))


def test_layers_without_a_choice_have_no_loss():
    found = routed(built(first_k_dense_replace=1), "choice")
    assert {layer: list(mixtures) for layer, mixtures in found.items()} == {1: [1, 4, 7], 2: [2, 5, 8]}


@pytest.mark.parametrize("recipe", ["sft", "prefer"])
def test_a_bias_that_stands_still_is_watched_in_every_recipe_that_balances(recipe):
    """The watches for dead and overloaded experts listen to every run; this one needs a rate."""
    parts, config = parts_of(recipe, "--train", "all", "--optimizer.balance-rate", "0.01")
    assert any(isinstance(hook, BiasWatch) for hook in parts(config).on_step)
    parts, config = parts_of(recipe, "--train", "all")
    assert not any(isinstance(hook, BiasWatch) for hook in parts(config).on_step)


def parts_of(recipe, *flags):
    module = import_module(f"unfreeze.recipes.{recipe}")
    words = ["--model", str(TINY_K2), "--data", "rows.jsonl", *flags]
    return module.parts, parse(module.Config, words, command=recipe, description="")
