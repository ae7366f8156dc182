"""What pretrain writes: the experts on Kimi's grid as compressed-tensors reads them, the rest in bf16, and
the same model when read again."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.checkpoint.keymap import disk_module
from unfreeze.core.errors import ConfigError
from unfreeze.models.publish import published
from unfreeze.parallel.placement.place import place

CONFIG = {
    "model_type": "kimi_k2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 61,
    "initializer_range": 0.05,
}
WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def trained(config) -> models.Decoder:
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    for moe in model.moe_layers().values():
        moe.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 4) / 7)  # not representable in bf16
    return model


def read(folder) -> models.Decoder:
    manifest = open_checkpoint(folder)
    model = models.meta_model(models.shape(manifest.config), manifest, torch.bfloat16)
    place(
        model,
        manifest,
        models.rules(model.shape),
        device="cpu",
        ignore=models.ignored(model.shape),
        tied=models.tied(model.shape),
    )
    return model


@pytest.fixture
def written(tmp_path):
    config = {**CONFIG, "quantization_config": QUANTIZED}
    model = trained(config)
    save_checkpoint(tmp_path / "model", config, published(model, config))
    return model, tmp_path / "model"


def test_experts_are_what_compressed_tensors_makes_of_them(written):
    model, folder = written
    tensors = load_file(folder / "model.safetensors")
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**{k: v for k, v in WEIGHTS.items() if k != "dynamic"})
    )
    experts = model.model.layers[1].mlp.experts
    for expert in range(4):
        gate, up = experts.gate_up_proj.weight[expert].detach().chunk(2)
        for name, weight in (
            ("gate_proj", gate),
            ("up_proj", up),
            ("down_proj", experts.down_proj.weight[expert].detach()),
        ):
            parts = {
                suffix: tensors[f"model.layers.1.mlp.experts.{expert}.{name}.{suffix}"]
                for suffix in ("weight_packed", "weight_scale", "weight_shape")
            }
            theirs = PackedQuantizationCompressor.decompress(dict(parts), scheme)["weight"].float()
            scale = (weight.unflatten(-1, (-1, 32)).abs().amax(-1) / 7).bfloat16().float().unsqueeze(-1)
            grid = (
                ((weight.unflatten(-1, (-1, 32)) / scale).round().clamp(-7, 7) * scale)
                .bfloat16()
                .float()
                .flatten(-2)
            )
            assert torch.equal(theirs, grid)
            assert (
                theirs - weight
            ).abs().max() <= 0.51 * scale.max()  # half a step, and the bf16 rounding of scale and product


def test_the_rest_is_bf16_but_for_the_selection_bias(written):
    model, folder = written
    tensors = load_file(folder / "model.safetensors")
    packed = [name for name in tensors if name.endswith("weight_packed")]
    assert len(packed) == 4 * 3 and all(".mlp.experts." in name for name in packed)
    bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and torch.equal(
        bias, model.model.layers[1].mlp.gate.e_score_correction_bias
    )
    q = "model.layers.0.self_attn.q_a_proj.weight"
    assert torch.equal(tensors[q], model.state_dict()[q].bfloat16())


def test_read_again_and_published_again_it_is_the_same_to_the_bit(written, tmp_path):
    _, folder = written
    again = read(folder)
    dense = trained(CONFIG)
    state = {
        name.replace("weight_packed", "weight"): tensor
        for name, tensor in again.state_dict().items()
        if not name.endswith("weight_scale")
    }
    for name, module in again.named_modules():
        if f"{name}.weight_packed" in again.state_dict():
            state[f"{name}.weight"] = module.packed.dequantize()
    dense.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    config = json.loads((folder / "config.json").read_text())
    save_checkpoint(tmp_path / "again", config, published(dense, config))
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


def test_a_tied_head_is_not_written(tmp_path):
    model = trained(LLAMA)
    save_checkpoint(tmp_path / "m", LLAMA, published(model, LLAMA))
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    assert torch.equal(read(tmp_path / "m").lm_head.weight, model.model.embed_tokens.weight.bfloat16())


def test_a_format_that_cannot_be_written_is_refused_by_name():
    config = {**CONFIG, "quantization_config": {**QUANTIZED, "format": "float-quantized"}}
    with pytest.raises(ConfigError, match="float-quantized"):
        list(published(trained(CONFIG), config))


def test_stacked_experts_stand_for_their_first_in_the_ignore_list():
    rules, mlp = models.FAMILIES["kimi_k2"].RULES, "model.layers.1.mlp"
    assert disk_module(f"{mlp}.experts.gate_up_proj", rules) == f"{mlp}.experts.0.gate_proj"
    assert disk_module(f"{mlp}.experts.down_proj", rules) == f"{mlp}.experts.0.down_proj"
    assert disk_module(f"{mlp}.shared_experts.down_proj", rules) == f"{mlp}.shared_experts.down_proj"
