"""training.only: some experts train and nothing else moves, not a bit of it, not by weight decay either."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unfreeze import cli, models
from unfreeze.checkpoint import save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import Rows
from unfreeze.models.only import _checksum, rows_of, train_only
from unfreeze.models.publish import published

V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 512,
    "vocab_size": json.loads((TINY_K2 / "config.json").read_text())["vocab_size"],
}
BESIDE = ("tiktoken.model", "tokenizer_config.json", "generation_config.json")


def written(folder: Path, config: dict, dtype: str = "float32") -> Path:
    """A random model with tiny-k2's tokenizer; its biases are not zero."""
    config = config | {"dtype": dtype}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    for moe in model.moe_layers().values():
        if moe.gate.e_score_correction_bias is not None:
            moe.gate.e_score_correction_bias.copy_(torch.linspace(-0.1, 0.1, len(moe.gate.weight)))
    extra = {name: TINY_K2 / name for name in BESIDE}
    save_checkpoint(folder, config, published(model, config), extra=extra)
    return folder


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def grown(request, tmp_path_factory) -> Path:
    """A DeepSeek-V3 of 4 experts with 2 closed ones more."""
    root = tmp_path_factory.mktemp("grown")
    base = written(root / "base", V3, request.param)
    assert cli.main(["upcycle", str(base), "--add-experts", "2", "--out", str(root / "more"), "--quiet"]) == 0
    return root / "more"


def trained(model: Path, data: Path, out: Path, *more: object) -> Path:
    command = ["sft", "--train", "all", "--model", model, "--data", data, "--out", out, "--quiet", "--steps", 14]
    command += ["--tokens-per-step", 256, "--sequence-length", 128, "--learning-rate", "1e-2", *more]
    command += ["--optimizer.weight-decay", 0.1, "--watch.samples", 0]
    assert cli.main(list(map(str, command))) == 0
    return out


def test_new_experts_open_and_train_while_nothing_else_moves(grown, chat_rows, tmp_path, read_events):
    only = ["--training.only", "experts 4-5", "--optimizer.balance-rate", 0.15]
    run = trained(grown, chat_rows, tmp_path / "run", *only)
    before, after = (load_file(folder / "model.safetensors") for folder in (grown, run / "model"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    expected = {f"model.layers.1.mlp.experts.{e}.{p}_proj.weight" for e in (4, 5) for p in ("gate", "up", "down")}
    router = "model.layers.1.mlp.gate.weight"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert moved == expected | {router, bias}
    assert torch.equal(before[router][:4], after[router][:4])
    assert torch.equal(before[bias][:4], after[bias][:4])
    loads = [event["expert_load"]["1"] for event in read_events(run, "step")]
    assert sum(loads[0][4:]) == 0  # closed
    assert min(loads[-1][4:]) > 0  # open
    group = json.loads((run / "receipt.json").read_text())["groups"]["experts"]
    assert group["experts"] == 6
    assert 1 <= group["experts_reached"] <= 2
    assert group["frozen_moved"] == 0
