"""Models in FP8 with block scales: transformers reads the same files to the same logits, and LoRA trains beside
the codes, experts included."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from unfreeze.adapters import attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.inspect import inspect
from unfreeze.config.lora import LoraConfig
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.quant import Fp8

COMMON = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MOE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MLA = {
    "q_lora_rank": 128,
    "kv_lora_rank": 112,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
"""Whole blocks: transformers takes the grid of scales for the size of a block, so 192 rows in 2 blocks are 96 each
to it, and 128 and 64 to whoever wrote the file."""
GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MIMO = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "v_head_dim": 32,
    "sliding_window": 9,
    "n_routed_experts": 4,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
        for kind in ("full_attention", "sliding_attention")
    },
}
INDEX = {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 128}
QUANTIZED = ("_proj.weight", "_with_mqa.weight", ".wq_b.weight", ".wk.weight")
DENSE = {
    "MiMoV2Flash": "self_attn.o_proj",
    "DeepseekV32": "indexer.weights_proj",
    "GlmMoeDsa": "indexer.weights_proj",
}
"""Linear layers that a release leaves in bf16."""
CASES = {
    "Llama": COMMON,
    "Qwen3": COMMON | {"head_dim": 32},
    "Qwen3Moe": COMMON | MOE | {"head_dim": 32, "num_experts": 4},
    "DeepseekV3": COMMON | MOE | MLA | GROUPS | {"num_key_value_heads": 4},
    "DeepseekV32": COMMON | MOE | MLA | GROUPS | INDEX | {"num_key_value_heads": 4},
    "GlmMoeDsa": COMMON | MOE | MLA | GROUPS | INDEX | {"num_key_value_heads": 4, "num_hidden_layers": 3},
    # o_proj stays bf16 in the release; 8 sliding heads of 32 are whole blocks
    "MiMoV2Flash": COMMON | MOE | MIMO,
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture(params=CASES)
def release(request, tmp_path):
    """-> (folder of a release in FP8, transformers' model of it in float32)."""
    torch.manual_seed(0)
    build = getattr(transformers, f"{request.param}ForCausalLM")
    model = build(getattr(transformers, f"{request.param}Config")(**CASES[request.param]))
    model.save_pretrained(tmp_path / "dense")
    config = json.loads((tmp_path / "dense/config.json").read_text())
    tensors = {}
    left = []
    with safe_open(tmp_path / "dense/model.safetensors", "pt") as dense:
        for name in dense.keys():  # noqa: SIM118 - not a dict
            tensor = dense.get_tensor(name)
            tensors[name] = tensor.bfloat16() if "norm" not in name else tensor
            if name.endswith(DENSE.get(request.param, " ") + ".weight"):
                left.append(name)
            elif name.endswith(QUANTIZED):
                parts = Fp8().quantize(tensor)
                tensors |= {name: parts["weight"], f"{name}_scale_inv": parts["weight_scale_inv"]}
    folder = tmp_path / "fp8"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ignored = [name.removesuffix(".weight") for name in left]
    quantization = FP8 | ({"ignored_layers": ignored} if left else {})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    way = transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=ignored)
    return folder, build.from_pretrained(folder, dtype=torch.float32, quantization_config=way).float()


def packed_of(model):
    return [buffer for _, buffer in model.named_buffers() if buffer.dtype == torch.float8_e4m3fn]


def batch_of(ids):
    return pack([Example(ids.tolist(), [0.0] + [1.0] * (len(ids) - 1))])


def test_logits_equal_transformers_reading_of_the_same_files(release):
    folder, oracle = release
    ids = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = oracle(ids[None]).logits[0]
        ours = open_model(open_checkpoint(folder))
        held = [buffer.dtype for name, buffer in ours.named_buffers() if name.endswith("_proj.weight")]
        found = ours.lm_head(ours.hidden(batch_of(ids)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        half = open_model(open_checkpoint(folder), dtype=torch.bfloat16)
        found = half.lm_head(half.hidden(batch_of(ids))).float()
        # bf16 rounds an indexer's scores too, and may choose other keys: not where a token sees all there are
        sure = slice(ours.shape.config.get("index_topk"))
        torch.testing.assert_close(found[sure], wanted[sure], rtol=0, atol=0.03)
    assert held and set(held) == {torch.float8_e4m3fn}
    assert inspect(str(folder))["format"] == "fp8-block"


def test_adapters_get_the_gradients_of_the_same_model_in_float(release, tmp_path):
    """The oracle is the model with the expanded weights, unpacked. The codes stay as they are."""
    folder, _ = release
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    tensors = {}
    with safe_open(folder / "model.safetensors", "pt") as files:
        for name in files.keys():  # noqa: SIM118 - not a dict
            if not name.endswith("_scale_inv"):
                tensors[name] = files.get_tensor(name)
            if f"{name}_scale_inv" in files.keys():  # noqa: SIM118
                scale = files.get_tensor(f"{name}_scale_inv")
                tensors[name] = Fp8().dequantize({"weight": tensors[name], "weight_scale_inv": scale})
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(1))
    found = []
    for path in (folder, tmp_path):
        model = open_model(open_checkpoint(path))
        attach(model, LoraConfig(rank=4), seed=0)
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        for name, value in trained.items():  # B is zero at first: A would get no gradient
            torch.manual_seed(len(name))
            value.data += 0.02 * torch.randn_like(value)
        codes = [buffer.view(torch.uint8).clone() for buffer in packed_of(model)]
        logits = model.lm_head(model.hidden(batch_of(ids)))
        torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
        assert all(map(torch.equal, codes, (buffer.view(torch.uint8) for buffer in packed_of(model))))
        found.append({name: value.grad for name, value in trained.items()})
    assert len(codes) == 0 and found[0].keys() == found[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
