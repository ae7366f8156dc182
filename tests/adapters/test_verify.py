"""The verifier passes what is right and catches what real exporters got wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.adapters import LoraConfig, save_adapter, sites, verify_adapter
from unfreeze.adapters.layouts import CONFIG, WEIGHTS
from unfreeze.core.errors import AdapterError

FUSED = "base_model.model.model.layers.1.mlp.experts."


@pytest.fixture(params=["per-expert", "peft"])
def saved(request, tiny, tmp_path):
    model = tiny.trained(tiny.model("deepseek"), LoraConfig(rank=4, alpha=8.0, experts_rank=2))
    save_adapter(model, tmp_path, request.param)
    return model, tmp_path, request.param


def edit(directory, change):
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def test_a_good_file_passes_and_every_matrix_is_compared(saved):
    model, directory, _ = saved
    verified = verify_adapter(model, directory)
    linears = sum(s.group != "experts" for s in sites(model))
    assert verified.sites == linears + 1 and verified.matrices == verified.nonzero == linears + 3 * 4
    assert verified.max_difference < 1e-12  # float64 in another order of summation


def wrong_axis_order(tensors):
    """B written as A is, with the expert slowest: the commonest bug of exporters."""
    name = FUSED + "lora_B.weight"
    tensors[name] = tensors[name].unflatten(1, (-1, 4)).transpose(1, 2).flatten(1).contiguous()


def transposed_ranks(tensors):
    name = FUSED + "base_layer.lora_A.weight"
    tensors[name] = tensors[name].unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1).contiguous()


def gate_and_up_exchanged(tensors):
    name = FUSED + "base_layer.lora_B.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2)[::-1]).contiguous()


@pytest.mark.parametrize("bug", [wrong_axis_order, transposed_ranks, gate_and_up_exchanged])
def test_a_wrong_axis_order_is_caught(tiny, tmp_path, bug):
    model = tiny.trained(tiny.model("deepseek"), LoraConfig(rank=4, alpha=8.0))
    save_adapter(model, tmp_path, "peft")
    verify_adapter(model, tmp_path)
    edit(tmp_path, bug)
    with pytest.raises(
        AdapterError, match=r"the saved adapter is not the model's: \d+ differences; first: .*of expert \d"
    ):
        verify_adapter(model, tmp_path)


GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


GRANITE_MOE = {
    "model_type": "granitemoe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def drawn(config):
    """A random model of a config.json."""
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_modules_that_transformers_names_otherwise_pass(tiny, tmp_path):
    model = tiny.trained(drawn(GRANITE_MOE), LoraConfig(rank=4, alpha=8.0))
    save_adapter(model, tmp_path, "peft")
    assert any("block_sparse_moe" in name for name in load_file(tmp_path / WEIGHTS))
    verified = verify_adapter(model, tmp_path)
    assert verified.max_difference < 1e-12 and verified.matrices == verified.nonzero == 2 * (4 + 3 * 4)


def test_rows_of_gate_and_up_that_alternate_pass_and_halves_of_them_are_caught(tiny, tmp_path):
    """gpt-oss: peft adapts gate_up_proj as it lies in the base, gate and up in turn."""
    model = tiny.trained(drawn(GPT_OSS), LoraConfig(rank=4, alpha=8.0))
    save_adapter(model, tmp_path, "peft")
    assert verify_adapter(model, tmp_path).max_difference < 1e-12

    def halves(tensors):
        for name in [name for name in tensors if "experts.base_layer.lora_B" in name]:
            tensors[name] = torch.cat((tensors[name][0::2], tensors[name][1::2])).contiguous()

    edit(tmp_path, halves)
    with pytest.raises(AdapterError, match="gate_proj of expert 0"):
        verify_adapter(model, tmp_path)


def test_two_experts_exchanged_are_caught(tiny, tmp_path):
    model = tiny.trained(tiny.model("deepseek"), LoraConfig(rank=4, alpha=8.0))
    save_adapter(model, tmp_path, "per-expert")
    one, two = FUSED + "0.up_proj.lora_B.weight", FUSED + "1.up_proj.lora_B.weight"
    edit(tmp_path, lambda t: t.update({one: t[two], two: t[one].clone()}))
    with pytest.raises(AdapterError, match="2 differences"):
        verify_adapter(model, tmp_path)


def test_a_rounded_a_missing_an_extra_tensor_and_another_scale_are_caught(saved):
    model, directory, _ = saved
    name = next(n for n in load_file(directory / WEIGHTS) if "o_proj.lora_B" in n)
    good = load_file(directory / WEIGHTS)
    changes = [
        lambda t: t.update({name: t[name].bfloat16().float()}),
        lambda t: t.pop(name),
        lambda t: t.update({name.replace("o_proj", "x_proj"): t[name].clone()}),
    ]
    for change in changes:
        save_file(good, directory / WEIGHTS)
        edit(directory, change)
        with pytest.raises(AdapterError, match="1 differences"):
            verify_adapter(model, directory)
    save_file(good, directory / WEIGHTS)
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    with pytest.raises(AdapterError, match="differences"):
        verify_adapter(model, directory)
