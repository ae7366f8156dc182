"""Runs on a model with sparse attention: its indexer is frozen, or trains because the config names it; the receipt
says which it was."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from unfreeze import cli
from unfreeze.checkpoint import save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.models import build, initialize, shape
from unfreeze.models.publish import published

SPARSE = {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 16,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "vocab_size": 1536,
    "initializer_range": 0.1,
}


@pytest.fixture
def sparse(tmp_path):
    model = build(shape(SPARSE), dtype=torch.float32, device="cpu")
    initialize(model, 0)
    extra = {name: TINY_K2 / name for name in ("tiktoken.model", "tokenizer_config.json")}
    save_checkpoint(tmp_path / "sparse", SPARSE, published(model, SPARSE), extra=extra)
    return tmp_path / "sparse"


def sft(model, chat_rows, out, *flags) -> int:
    line = ["sft", "--model", model, "--data", chat_rows, "--out", out, "--tokens-per-step", 512, "--quiet"]
    line += ["--sequence-length", 128, "--dtype", "float32", "--watch.samples", 0, "--threads", 1]
    line += ["--steps", 3, "--optimizer.warmup", 0, "--learning-rate", "1e-2", *flags]
    return cli.main([str(word) for word in line])


def receipt(out) -> dict:
    return json.loads((out / "receipt.json").read_text())


def divergences(out) -> list[float]:
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "train"]
    return [event["indexer_divergence"] for event in steps if "indexer_divergence" in event]


def moved(before, after) -> set[str]:
    """Names of the tensors of two checkpoints that differ."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}


@pytest.mark.parametrize("asked", ["frozen", "trained"])
def test_all_weights_train_and_the_indexers_if_the_config_says_so(asked, sparse, chat_rows, tmp_path):
    out = tmp_path / "run"
    assert sft(sparse, chat_rows, out, "--train", "all", "--training.indexer", asked) == 0
    group = receipt(out)["groups"]["indexer"]
    changed = {name for name in moved(sparse, out / "model") if ".indexer." in name}
    trains = asked == "trained"
    assert group["parameters"] == 2 * (16 * 128 + 32 * 8 + 2 * 8 + 32 * 16)
    assert group["trained"] == (group["parameters"] if trains else 0)
    assert (group["sites_moved"] == group["sites"] == 10) if trains else not group["sites"]
    assert len(changed) == (10 if trains else 0)
    assert moved(sparse, out / "model") - changed
    assert receipt(out)["exceptions"] == []
    found = divergences(out)
    assert len(found) == (3 if trains else 0) and (not trains or found[-1] < found[0])


def test_adapters_train_an_indexer_whose_name_is_among_the_targets(sparse, chat_rows, tmp_path):
    """And they go out, come back, and are merged like others."""
    plain, named = tmp_path / "plain", tmp_path / "named"
    assert sft(sparse, chat_rows, plain) == 0
    assert receipt(plain)["groups"]["indexer"]["trained"] == 0 and divergences(plain) == []
    assert sft(sparse, chat_rows, named, "--lora.targets", "all-linear", "indexer") == 0
    group = receipt(named)["groups"]["indexer"]
    assert group["sites"] == group["sites_moved"] == 6 and group["connected"] is None
    assert len(divergences(named)) == 3
    tensors = load_file(named / "adapter" / "adapter_model.safetensors")
    own = {name for name in tensors if ".indexer." in name}
    first = "base_model.model.model.layers.0.self_attn.indexer.wq_b.lora_A.weight"
    assert len(own) == 12 and first in own
    merged = tmp_path / "merged"
    assert cli.main(["merge", str(named), "--out", str(merged)]) == 0
    changed = {name for name in moved(sparse, merged) if ".indexer." in name}
    assert len(changed) == 6


def test_layers_computed_again_and_streamed_experts_change_nothing(sparse, chat_rows, tmp_path):
    """The same losses and divergences, whatever backward computes again and wherever weights lie."""
    flags = ["--lora.targets", "all-linear", "indexer", "--place.recompute"]
    ways = {"nothing": ["nothing"], "layers": ["layers"], "streamed": ["layers", "--place.experts", "disk"]}
    seen = {}
    for name, more in ways.items():
        assert sft(sparse, chat_rows, tmp_path / name, *flags, *more) == 0
        seen[name] = divergences(tmp_path / name)
    assert seen["nothing"] == pytest.approx(seen["layers"], rel=1e-5)
    assert seen["layers"] == seen["streamed"] and len(seen["layers"]) == 3


def test_what_cannot_be_is_refused_in_one_line(sparse, chat_rows, tmp_path, capsys):
    assert sft(sparse, chat_rows, tmp_path / "a", "--training.indexer", "trained") != 0
    error = capsys.readouterr().err
    assert "adapters train" in error and "--lora.targets all-linear indexer" in error
    assert sft(TINY_K2, chat_rows, tmp_path / "b", "--lora.targets", "indexer") != 0
    assert "'indexer' matches nothing" in capsys.readouterr().err
