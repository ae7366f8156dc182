"""An adapter's settings as [lora], read from its two files without torch; and what is refused by name."""

import json

import pytest
import torch
from safetensors.torch import save_file

from unfreeze.config.adapter import CONFIG, WEIGHTS, adapter_folder, lora_of
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import AdapterError

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
LAYER = "base_model.model.model.layers.1."


def made(folder, tensors, config=PLAIN, metadata=None):
    factors = {f"{LAYER}{name}.weight": torch.ones(*shape) for name, shape in tensors.items()}
    save_file(factors, folder / WEIGHTS, metadata)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_ranks_scale_and_places_come_from_the_tensors_and_the_patterns(tmp_path):
    tensors = {
        "self_attn.q_proj.lora_A": (2, 8),
        "self_attn.q_proj.lora_B": (8, 2),
        "mlp.experts.base_layer.lora_A": (4 * 6, 8),
        "mlp.experts.lora_A": (4 * 6, 8),
    }
    config = {**PLAIN, "r": 6, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    found = lora_of(made(tmp_path, tensors, config))
    assert LoraConfig(**found) == LoraConfig(
        rank=2,
        alpha=3,
        experts_rank=6,
        targets=("*.self_attn.q_proj", "*.experts.gate_up_proj", "*.experts.down_proj"),
    )
    # our own file: gate's and up's blocks lie side by side, so the rank is half
    assert lora_of(made(tmp_path, tensors, config, {"layout": "peft"}))["experts_rank"] == 3
    rank_stabilised = {**PLAIN, "r": 4, "use_rslora": True}
    found = lora_of(made(tmp_path, {"self_attn.q_proj.lora_A": (4, 8)}, rank_stabilised))
    assert (found["rank"], found["alpha"], found["experts_rank"]) == (4, 16, None)  # 8 / sqrt(4) = 16 / 4


def test_a_layers_experts_are_those_that_its_own_names_say(tmp_path):
    tensors = {"mlp.experts.lora_A": (4 * 6, 8)}

    def places(*targets):
        return lora_of(made(tmp_path, tensors, {**PLAIN, "r": 6, "target_parameters": targets}))["targets"]

    both = ("layers.0.mlp.experts.down_proj", "layers.1.mlp.experts.gate_up_proj")
    assert places(*both) == ("*.experts.gate_up_proj",)
    assert places(both[1], both[0].replace("0", "1")) == ("*.experts.down_proj",)  # control arm: its own too


@pytest.mark.parametrize(
    ("layer", "pattern", "more", "alpha"),
    [
        ("self_attn.q_proj", "model.layers.1.self_attn.q_proj", {}, 3),
        ("self_attn.q_proj", "layers.1.self_attn.q_proj", {}, 3),
        ("mlp.gate_proj", "mlp.gate_proj.weight", {"target_parameters": ["mlp.gate_proj.weight"]}, 3),
        # control arms: another layer; a module that is no parameter
        ("self_attn.q_proj", "model.layers.0.self_attn.q_proj", {}, 8),
        ("mlp.gate_proj", "mlp.gate_proj.weight", {}, 8),
    ],
)
def test_patterns_of_whole_names_are_matched_as_peft_matches_them(layer, pattern, more, alpha, tmp_path):
    config = {**PLAIN, "alpha_pattern": {pattern: 3}, **more}
    assert lora_of(made(tmp_path, {f"{layer}.lora_A": (4, 8)}, config))["alpha"] == alpha


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": 1}, "use_dora is 1"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is not a list of names"),
        ({"trainable_token_indices": [1, 1]}, "trainable_token_indices is [1, 1]"),
        ({"trainable_token_indices": {"embed_tokens": [-1]}}, "lists of different ids"),
        ({"bias": "lora_only"}, "bias = 'lora_only'"),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"init_lora_weights": "pissa_niter_4"}, "changed the base's weights too"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"use_qalora": True}, "use_qalora"),
        ({"use_bdlora": {"n": 1}}, "use_bdlora"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(change, said, tmp_path):
    folder = made(tmp_path, {"self_attn.q_proj.lora_A": (4, 8)}, {**PLAIN, **change})
    with pytest.raises(AdapterError) as error:
        lora_of(folder)
    assert said in str(error.value)
    # control: what peft writes for plain LoRA, with these at their defaults
    lora_of(made(tmp_path, {"self_attn.q_proj.lora_A": (4, 8)}, {**PLAIN, **dict.fromkeys(change), **PLAIN}))


def test_a_folder_without_an_adapter_and_a_damaged_one_are_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"is not a run and has no adapter_config\.json"):
        adapter_folder(tmp_path / "nowhere")
    (tmp_path / "resolved_config.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"has no adapter/adapter_config\.json"):
        adapter_folder(tmp_path)
    (tmp_path / "resolved_config.json").unlink()
    made(tmp_path, {})
    with pytest.raises(AdapterError, match="no LoRA factors"):
        lora_of(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"\xff" * 100)
    with pytest.raises(AdapterError, match="damaged file"):
        lora_of(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="a pickle"):
        lora_of(tmp_path)
