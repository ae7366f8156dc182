"""Families that publish their experts stacked get a matrix per expert; gpt-oss: tests/compress/test_gpt_oss.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.compress.quantize.conftest import run_quantize
from tests.compress.quantize.libraries import compressed, dense, modules_of, tensors_of
from tests.compress.quantize.test_loads import ours

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 128,
}
STACKED = {
    "llama4_text": SIZES | {"num_local_experts": 4, "intermediate_size_mlp": 64},
    "qwen3_vl_moe_text": SIZES
    | {"num_experts": 4, "moe_intermediate_size": 96, "tie_word_embeddings": False, "intermediate_size": 64},
}


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("to", ["int4", "nvfp4"])
def test_stacked_experts_are_written_one_by_one_as_quantizers_do(to, name, tmp_path):
    from unfreeze import models
    from unfreeze.checkpoint import disk_tensors

    base, config = tmp_path / "base", {"model_type": name, "dtype": "bfloat16", **STACKED[name]}
    torch.manual_seed(0)
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = ((key, tensor.bfloat16()) for key, tensor in model.state_dict().items())
    save(base, dict(disk_tensors(state, models.rules(model.shape))), config)
    assert any(key.endswith("experts.gate_up_proj") for key in tensors_of(base))
    run_quantize(base, tmp_path / "out", to)
    tensors = tensors_of(tmp_path / "out")
    packed = modules_of(tensors, to)
    layers = len(model.moe_layers())
    assert len(packed) == layers * 4 * 3 and any(key.endswith("experts.2.up_proj") for key in packed)
    # gate, up and down are the base's, expert for expert
    experts = next(module for key, module in model.named_modules() if key.endswith("layers.1.mlp.experts"))
    gate, up = experts.gate_up_proj.weight[2].bfloat16().chunk(2)
    for projection, matrix in (("gate", gate), ("up", up), ("down", experts.down_proj.weight[2].bfloat16())):
        own = next(
            key for key in packed if key.endswith(f"layers.1.{inside(name)}.experts.2.{projection}_proj")
        )
        wanted = compressed(to, matrix.detach().float())
        if to == "nvfp4" and projection != "down":  # gate and up share a number: they are rounded as one
            both = compressed(to, torch.cat([gate, up]).detach().float())
            half = projection == "up"
            wanted = {k: v if v.numel() == 1 else v.chunk(2)[half] for k, v in both.items()}
        assert all(torch.equal(packed[own][part], wanted[part]) for part in wanted if part != "weight_shape")
    save(tmp_path / "dense", dense(tensors, to), config)
    assert (ours(tmp_path / "out") - ours(tmp_path / "dense")).abs().max() < 1e-4


def inside(name: str) -> str:
    return "feed_forward" if name == "llama4_text" else "mlp"


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict) -> None:
    folder.mkdir()
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
