"""gpt-oss as it is published: experts in MXFP4 with rows of gate and up in turn, the rest in bf16. transformers reads
the same files to the same logits, and LoRA trains beside the codes."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.adapters import attach
from unfreeze.checkpoint import disk_tensors, open_checkpoint
from unfreeze.commands.inspect import inspect
from unfreeze.config.lora import LoraConfig
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.quant.mxfp4 import BLOCKS, Mxfp4

CONFIG = {
    "vocab_size": 88,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""As openai/gpt-oss-20b's config.json has it."""


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """-> (folder as published, folder of the same in float32 as transformers writes it, transformers' model)."""
    path = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**CONFIG))
    for name, value in model.named_parameters():  # biases and sinks begin as zeros, experts near it
        if "bias" in name or "sinks" in name or ".experts." in name:
            torch.nn.init.normal_(value, std=0.2)
    model.save_pretrained(path / "random")
    config = json.loads((path / "random/config.json").read_text())
    packed = {}
    for name, tensor in load_file(path / "random/model.safetensors").items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # [E, in, out]
            parts = Mxfp4(BLOCKS).quantize(tensor.transpose(1, 2).contiguous())
            packed |= {f"{name}_{suffix}": part for suffix, part in parts.items()}
        else:
            packed[name] = tensor
    (path / "packed").mkdir()
    save_file(packed, path / "packed/model.safetensors", metadata={"format": "pt"})
    (path / "packed/config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    way = transformers.Mxfp4Config(dequantize=True)
    oracle = transformers.GptOssForCausalLM.from_pretrained(
        path / "packed", dtype=torch.float32, quantization_config=way, attn_implementation="eager"
    ).float()
    dense = load_file(path / "random/model.safetensors")
    assert sum(oracle.state_dict()[name].ne(tensor).any() for name, tensor in dense.items()) == 4
    for name in dense:
        dense[name] = oracle.state_dict()[name].clone()
    (path / "dense").mkdir()
    save_file(dense, path / "dense/model.safetensors", metadata={"format": "pt"})
    (path / "dense/config.json").write_text(json.dumps(config))
    return path / "packed", path / "dense", oracle


def batch_of(ids):
    return pack([Example(ids.tolist(), [0.0] + [1.0] * (len(ids) - 1))])


def some_ids(count):
    return torch.randint(0, 88, (count,), generator=torch.Generator().manual_seed(1))


def test_logits_equal_transformers_reading_of_the_same_files(release):
    packed, dense, oracle = release
    ids = some_ids(40)
    with torch.no_grad():
        wanted = oracle(ids[None]).logits[0]
        ours = open_model(open_checkpoint(packed))
        found = ours.lm_head(ours.hidden(batch_of(ids)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        ours = open_model(open_checkpoint(packed), dtype=torch.bfloat16)
        half = ours.lm_head(ours.hidden(batch_of(ids))).float()
        # of a token, whose router may choose another expert where two are close: the median
        assert float(((half - wanted).norm(dim=1) / wanted.norm(dim=1)).median()) < 0.03
    held = [buffer for name, buffer in ours.named_buffers() if ".experts." in name]
    assert len(held) == 2 * 4 and all(buffer.dtype == torch.uint8 for buffer in held)
    facts, whole = inspect(str(packed)), inspect(str(dense))
    assert facts["format"] == "mxfp4" and facts["parameters"] == whole["parameters"]


def test_control_arm_gate_and_up_as_halves_are_another_model(release):
    packed, _, oracle = release
    ids = some_ids(40)
    tensors = load_file(packed / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate_up_proj_blocks" in name or "gate_up_proj_scales" in name:
            tensors[name] = torch.cat((tensor[:, ::2], tensor[:, 1::2]), dim=1)
    other = packed.parent / "halves"
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    (other / "config.json").write_text((packed / "config.json").read_text())
    with torch.no_grad():
        ours = open_model(open_checkpoint(other))
        found = ours.lm_head(ours.hidden(batch_of(ids)))
        assert float((found - oracle(ids[None]).logits[0]).abs().max()) > 0.01


def test_adapters_get_the_gradients_of_the_same_model_in_float(release):
    """The oracle is the model of the expanded weights. No expanded weight is among what autograd keeps."""
    ids, found = some_ids(24), []
    for folder in release[:2]:
        model = open_model(open_checkpoint(folder))
        attach(model, LoraConfig(rank=4), seed=0)
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        assert any("experts" in name for name in trained)
        for name, value in trained.items():  # B is zero at first: A would get no gradient
            torch.manual_seed(len(name))
            value.data += 0.02 * torch.randn_like(value)
        kept = []

        def keep(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = model.lm_head(model.hidden(batch_of(ids)))
            torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
        shapes = {(192, 64), (64, 192), (64, 96), (96, 64)}
        whole = [t for t in kept if t.is_floating_point() and tuple(t.shape[-2:]) in shapes]
        assert bool(whole) is (folder == release[1])  # control arm: of the dense model it keeps the weights
        found.append({name: value.grad for name, value in trained.items()})
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_what_was_read_is_saved_as_it_was(release):
    packed, *_ = release
    ours = open_model(open_checkpoint(packed))
    saved = dict(disk_tensors(ours.state_dict().items(), models.rules(ours.shape)))
    stored = load_file(packed / "model.safetensors")
    assert saved.keys() == stored.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
