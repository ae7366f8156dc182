"""Families with Mamba-2 layers: what is planted is seen, and configs that cannot be are refused in a line."""

import json

import pytest
import torch
import transformers
from cases_mamba import CONFIGS, NEMOTRON
from family_cases import DOCUMENTS, batch_of, difference, oracle
from safetensors.torch import load_file, save_file
from test_family_files import opened

from unfreeze import models
from unfreeze.core.errors import CheckpointError
from unfreeze.models import mamba
from unfreeze.models.blocks.mamba import GroupedNorm, Step
from unfreeze.models.publish import carried
from unfreeze.quant import nvfp4
from unfreeze.quant.codec import Packed
from unfreeze.quant.nvfp4 import Nvfp4


def changed(kind, **attributes):
    """A change of a model: these attributes of all its modules of that class."""

    def change(model):
        for module in model.modules():
            for name, value in attributes.items() if isinstance(module, kind) else ():
                setattr(module, name, value)

    return change


def without_skip(model):
    for module in model.modules():
        if isinstance(module, Step):
            torch.nn.init.zeros_(module.D)


BUGS = {
    "dt without its limits": changed(Step, limits=mamba.NO_LIMITS),
    "one group of the norm": changed(GroupedNorm, groups=1),
    "no skip": without_skip,
}


@pytest.mark.parametrize("bug", BUGS)
def test_control_what_is_planted_in_a_mamba_layer_is_seen(bug):
    name = "nemotron-h-latent-groups-limits"
    assert difference(name)[0] <= 1e-4
    assert difference(name, change=BUGS[bug])[0] > 1e-2


def test_transformers_own_limit_of_dt_is_another():
    """The reason why the oracle is repaired: goes when its #48989 is released."""
    mixer = transformers.models.nemotron_h.modeling_nemotron_h.NemotronHMamba2Mixer
    config = transformers.NemotronHConfig(**NEMOTRON, hidden_size=64, time_step_limit=[0.05, 2.0])
    assert mixer(config, 0).time_step_limit == (config.time_step_min, float("inf"))


def test_letters_and_names_of_layers_are_the_same():
    config = {"model_type": "nemotron_h", **CONFIGS["nemotron_h"]}
    del config["num_hidden_layers"]
    listed = {**config, "layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2}
    del listed["hybrid_override_pattern"]
    kinds = models.shape(config).layer_types
    assert kinds == models.shape(listed).layer_types
    assert kinds[:4] == ("linear_attention", "moe", "full_attention", "mlp") and len(kinds) == 8


def test_fields_that_all_of_granite_4s_releases_have_are_known():
    config = {"model_type": "granitemoehybrid", **CONFIGS["granitemoehybrid"]}
    assert models.notes({**config, "normalization_function": "rmsnorm", "init_method": "mup"}) == []


def test_limits_as_they_are_published():
    infinite = {"__float__": "Infinity"}  # as transformers writes it
    for declared in ([0.0, 1e308], [0.0, float("inf")], [0, infinite]):
        assert mamba.limits({"time_step_limit": declared}) == mamba.NO_LIMITS


REFUSED = [
    ("nemotron_h", {"hybrid_override_pattern": "ME*-ME*X"}, "hybrid_override_pattern holds 'X'"),
    ("nemotron_h", {"hybrid_override_pattern": None}, "hybrid_override_pattern is missing"),
    ("nemotron_h", {"num_hidden_layers": 9}, "layer_types has 8 entries, num_hidden_layers is 9"),
    ("nemotron_h", {"layers_block_type": ["mamba"] * 7 + ["rwkv"]}, "layer_types holds 'rwkv'"),
    ("nemotron_h", {"n_groups": 3}, "mamba_num_heads 16 is not a multiple of n_groups 3"),
    ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings true is not built"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias true is not built"),
    ("nemotron_h", {"time_step_limit": [1.0, 0.1]}, "time_step_limit is [1.0, 0.1]; it must be two numbers"),
    ("granitemoehybrid", {"mamba_n_heads": 7}, "mamba_n_heads 7 x a head width of 64 is not mamba_expand x"),
    (
        "granitemoehybrid",
        {"normalization_function": "layernorm"},
        "normalization_function 'layernorm' is not",
    ),
    ("granitemoehybrid", {"mamba_d_head": "wide"}, "mamba_d_head is 'wide'"),
    ("granitemoehybrid", {"layer_types": ["mamba", "moe"] * 4}, "layer_types holds 'moe'"),
    ("granitemoehybrid", {"mamba_d_state": 0}, "mamba_d_state is 0; it must be a whole number"),
    ("granitemoehybrid", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0; a token needs an expert"),
]


@pytest.mark.parametrize(("model_type", "change", "words"), REFUSED)
def test_a_config_that_cannot_be_is_refused_in_a_line(model_type, change, words):
    config = {"model_type": model_type, **CONFIGS[model_type]}
    models.shape(config)
    with pytest.raises(CheckpointError) as caught:
        models.shape({**config, **change})
    assert words in caught.value.message and "\n" not in caught.value.message and caught.value.next


def test_layers_of_another_kind_than_the_files_are_refused(tmp_path):
    oracle("nemotron-h").save_pretrained(tmp_path)
    opened(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layers_block_type"] = ["full_attention", "moe", "full_attention", "mlp"]
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"backbone\.layers\.0\.mixer"):
        opened(tmp_path)


def test_a_release_in_nvfp4_is_read_as_transformers_reads_its_expanded_weights(tmp_path):
    """The names and the list of modules left out are those of Nemotron 3 Nano's release."""
    codec, whole, packed, expanded = Nvfp4(nvfp4.MODELOPT), tmp_path / "whole", {}, {}
    oracle("nemotron-h").save_pretrained(whole)
    left_out = ["lm_head", "backbone.layers.2.mixer.o_proj", "backbone.layers.0.mixer.conv1d"]
    for name, tensor in load_file(whole / "model.safetensors").items():
        module = name.removesuffix(".weight")
        packed[name] = expanded[name] = tensor
        if module.endswith("_proj") and module not in left_out:
            parts = codec.quantize(tensor)
            expanded[name] = Packed(codec, parts).dequantize().float()
            del packed[name]
            packed |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    config = json.loads((whole / "config.json").read_text())
    save_file(expanded, whole / "model.safetensors", {"format": "pt"})
    quantized = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": left_out}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})

    model, _ = opened(tmp_path)
    held = {name for name, module in model.named_modules() if getattr(module, "codec", None) is not None}
    assert "model.layers.1.mixer.experts.up_proj" in held and "model.layers.0.mixer.in_proj" in held
    assert "model.layers.2.mixer.o_proj" not in held and len(held) == 11
    reference = transformers.NemotronHForCausalLM.from_pretrained(whole, attn_implementation="eager")
    for layer in reference.model.layers:
        layer.mixer.time_step_limit = mamba.NO_LIMITS
    with torch.no_grad():
        expected = torch.cat([reference(torch.tensor([ids])).logits[0] for ids in DOCUMENTS])
    actual = model.logits(model.hidden(batch_of(DOCUMENTS))).detach()
    assert (actual - expected).abs().max() <= 1e-4


def test_heads_that_predict_several_tokens_are_carried_along(tmp_path):
    oracle("nemotron-h").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    beside = {"mtp.layers.0.mixer.q_proj.weight": torch.ones(4, 4)}
    save_file(tensors | beside, tmp_path / "model.safetensors", {"format": "pt"})
    assert [name for name, _ in carried(*opened(tmp_path))] == list(beside)
