"""Training of an upcycled model: its experts begin equal and part, and its router begins to learn."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.job.test_only import V3, trained, written
from unfreeze import cli

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": V3["vocab_size"],
}
OF_LAYER = "model.layers.1.block_sparse_moe."


def spread(folder: Path) -> float:
    """max over pairs of experts of ‖a - b‖ / ‖a‖, of one layer's down."""
    tensors = load_file(folder / "model.safetensors")
    experts = [tensors[f"{OF_LAYER}experts.{e}.w2.weight"].float() for e in range(4)]
    return max(float((a - b).norm() / a.norm()) for a in experts for b in experts)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_experts_part_and_the_router_learns(noise, chat_rows, tmp_path):
    """Equal experts give the router no gradient in the first step: Σ w = 1, whatever the weights are.

    Different tokens part the experts, and from then on the router learns, without noise too.
    """
    base = written(tmp_path / "base", LLAMA)
    moe = tmp_path / "moe"
    command = ["upcycle", base, "--experts", 4, "--noise", noise, "--out", moe, "--quiet"]
    assert cli.main(list(map(str, command))) == 0
    assert (spread(moe) > 0) == (noise > 0)
    run = trained(moe, chat_rows, tmp_path / "run", steps=6)
    assert spread(run / "model") > spread(moe) + 0.01
    first = json.loads((run / "receipt.json").read_text())["groups"]["router"]["grad_norm"]
    assert (first > 1e-7) == (noise > 0)
    router = f"{OF_LAYER}gate.weight"
    before, after = (load_file(folder / "model.safetensors")[router] for folder in (moe, run / "model"))
    assert float((after - before).norm() / before.norm()) > 0.01


def test_some_experts_of_an_upcycled_model_train_alone(chat_rows, tmp_path):
    base = written(tmp_path / "base", LLAMA)
    moe = tmp_path / "moe"
    assert cli.main(["upcycle", str(base), "--experts", "4", "--out", str(moe), "--quiet"]) == 0
    run = trained(moe, chat_rows, tmp_path / "run", "--training.only", "experts 2-3", steps=3)
    before, after = (load_file(folder / "model.safetensors") for folder in (moe, run / "model"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(
        ".experts.2." in name or ".experts.3." in name or name.endswith("gate.weight") for name in changed
    )
