"""Claims about gate and up whose parts cannot lie below each other: they are read, computed with and saved like
the two matrices that they are."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.checkpoint import StackRule, disk_tensors, open_checkpoint, unstack
from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.models.publish import published
from unfreeze.quant import Fp8, Int4, Packed
from unfreeze.quant.halves import Halves, stacked
from unfreeze.quant.mxfp4 import BLOCKS, PACKED, Mxfp4

QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
FP8 = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [16, 16]}


@pytest.mark.parametrize("codec", [Int4(32), Fp8(), Mxfp4(PACKED), Mxfp4(BLOCKS)])
def test_a_format_whose_rows_are_their_own_is_stacked_as_it_is(codec):
    assert stacked(codec, 2 * 256, 128) is codec


@pytest.mark.parametrize("I", [192, 64, 1])
def test_blocks_that_a_half_does_not_fill_stay_with_their_half(I):
    """With I = 64 both halves would share one block of 128 rows, which has one scale."""
    codec = stacked(Fp8(), 2 * I, 128)
    assert isinstance(codec, Halves) and codec.name == "fp8-block"
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 5, I, 128, generator=generator) * torch.tensor([1.0, 30.0]).view(2, 1, 1, 1)
    packed = Packed(codec, codec.quantize(torch.cat((gate, up), dim=-2)))
    assert packed.shape == (5, 2 * I, 128) and packed.nbytes == 5 * codec.nbytes(2 * I, 128)
    assert {name: tuple(part.shape[1:]) for name, part in packed.parts.items()} == {
        name: shape for name, (_, shape) in codec.parts(2 * I, 128).items()
    }
    oracle = torch.cat([Fp8().dequantize(Fp8().quantize(half)) for half in (gate, up)], dim=-2)
    assert torch.equal(packed.dequantize(), oracle) and torch.equal(packed[3].dequantize(), oracle[3])
    below = Fp8().dequantize(Fp8().quantize(torch.cat((gate, up), dim=-2)))
    assert I % 128 == 0 or not torch.equal(below, oracle)  # control arm: blocks across the two


def test_each_half_has_the_names_of_its_own_matrix_on_disk():
    stack = "model.layers.{layer}.mlp.experts."
    rules = [
        StackRule(stack + "{expert}.gate_proj.{part}", stack + "gate_up_proj.{part}", 0),
        StackRule(stack + "{expert}.up_proj.{part}", stack + "gate_up_proj.{part}", 1),
    ]
    name = "model.layers.1.mlp.experts.gate_up_proj.up_qweight"
    found = tensor_sources(name, (2, 8, 4), rules)
    assert [(source.name, source.index, source.shape) for source in found] == [
        (f"model.layers.1.mlp.experts.{expert}.up_proj.qweight", (expert,), (8, 4)) for expert in (0, 1)
    ]
    stack = torch.randn(2, 8, 4)
    written = dict(unstack(name, stack, rules))
    assert torch.equal(written["model.layers.1.mlp.experts.1.up_proj.qweight"], stack[1])
    assert tensor_sources(name.replace("up_qweight", "gate_qweight"), (2, 8, 4), rules)[0].name.endswith(
        "experts.0.gate_proj.qweight"
    )


def test_a_model_of_such_experts_computes_like_the_expanded_one_and_is_saved_as_it_was(tmp_path):
    """FP8 in blocks of 16 rows, 24 of them in gate and up each: one and a half."""
    dense = models.build(models.shape(QWEN3), dtype=torch.float32, device="cpu")
    models.initialize(dense, seed=0)
    codec, packed, expanded = Fp8((16, 16)), {}, {}
    for name, tensor in published(dense, QWEN3):
        packed[name] = expanded[name] = tensor.contiguous()
        if name.endswith("_proj.weight"):
            parts = codec.quantize(tensor)
            packed |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
            expanded[name] = codec.dequantize(parts)
    for folder, tensors, config in (
        ("packed", packed, {"quantization_config": FP8}),
        ("dense", expanded, {}),
    ):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(QWEN3 | config))
    ours, oracle = (open_model(open_checkpoint(tmp_path / folder)) for folder in ("packed", "dense"))
    held = [name for name, _ in ours.named_buffers() if ".experts.gate_up_proj." in name]
    assert len(held) == 2 * 4 and all(".gate_weight" in name or ".up_weight" in name for name in held)
    batch = pack([Example(list(range(20)), [1.0] * 20)])
    assert torch.equal(ours.hidden(batch), oracle.hidden(batch))
    saved = dict(disk_tensors(ours.state_dict().items(), models.rules(ours.shape), lambda module: codec))
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(
        torch.equal(saved[name].view(torch.uint8), part.view(torch.uint8)) for name, part in stored.items()
    )
