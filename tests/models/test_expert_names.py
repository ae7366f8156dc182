"""Families whose releases have fused experts, as quantizers write them: an expert per name.

llm-compressor and AutoAWQ unfuse the experts before they quantize them (Llama-4-Scout in FP8, Qwen3-VL in AWQ).
"""

import json

import packers
import pytest
import torch
import transformers
from safetensors.torch import save_file

from unfreeze import models
from unfreeze.checkpoint import disk_tensors, open_checkpoint
from unfreeze.core.errors import CheckpointError
from unfreeze.generate.open import open_model
from unfreeze.quant.fp8_scaled import Fp8Scaled

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama4_text": SIZES | {"num_local_experts": 4, "intermediate_size_mlp": 64},
    "qwen3_vl_moe_text": SIZES
    | {"num_experts": 4, "moe_intermediate_size": 24, "tie_word_embeddings": False},
}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*router", "re:.*mlp.gate$", "re:.*shared_expert.*"],
}
TOKENS = list(range(1, 30))


def drawn(name):
    """(config, a random model of it)."""
    config = {"model_type": name, **FAMILIES[name]}
    torch.manual_seed(0)
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return config, model


def inside(name):
    return "feed_forward" if name == "llama4_text" else "mlp"


def unfused(name, model, pack=None):
    """The tensors of the model, an expert per name; packed by `pack` where it is given."""
    tensors = {}
    for key, tensor in model.state_dict().items():
        if ".experts." not in key:
            other = key.replace(".mlp.gate.", ".feed_forward.router.").replace(".mlp.", ".feed_forward.")
            other = other.replace("shared_experts", "shared_expert")
            tensors[other if name == "llama4_text" else key] = tensor.contiguous()
            continue
        base = key.replace(".mlp.", f".{inside(name)}.").split(".experts.")[0]
        names = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for projection, part in zip(names, matrix.chunk(len(names)), strict=True):
                place = f"{base}.experts.{expert}.{projection}"
                packed = {"weight": part.contiguous()} if pack is None else pack(part.contiguous())
                tensors |= {f"{place}.{suffix}": value.contiguous() for suffix, value in packed.items()}
    return tensors


def opened(folder, config, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))


def logits(model):
    from unfreeze.data import Example, pack

    batch = pack([Example(TOKENS, [1.0] * len(TOKENS))])
    with torch.no_grad():
        return model.logits(model.hidden(batch))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_expert_per_name_is_read(name, tmp_path):
    config, model = drawn(name)
    found = opened(tmp_path / "dense", config, unfused(name, model))
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_experts_stay_packed(name, tmp_path):
    """FP8 with a scale per row, as Llama-4-Scout's FP8 release; logits of the expanded weights."""
    config, model = drawn(name)
    codec = Fp8Scaled()
    tensors = unfused(name, model, codec.quantize)
    for key, tensor in model.state_dict().items():
        if ".experts." in key:
            tensor.copy_(codec.dequantize(codec.quantize(tensor)))
    found = opened(tmp_path / "packed", config | {"quantization_config": CHANNELS}, tensors)
    packed = found.packed_weights()
    assert len(packed) == 2 * len(found.moe_layers()) and len(packed) > 0
    torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-5)


NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_skip_modules": ["router", "lm_head", "embed_tokens"],
}


def gpt_oss(pack):
    """(transformers' config and model of what is written, the tensors as unsloth names them)."""
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": 32, "num_local_experts": 4, "hidden_size": 64, "intermediate_size": 32}
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    tensors = {}
    for key, tensor in theirs.state_dict().items():
        torch.nn.init.normal_(tensor, std=0.2)
        base, _, name = key.rpartition(".")
        if ".router." in key:
            tensors[key.replace(".router.", ".router.linear.")] = tensor
        elif name.endswith("_bias"):
            named = name.replace("_bias", "s")
            tensors |= {f"{base}.{named}.{e}.bias": bias.clone() for e, bias in enumerate(tensor)}
        elif ".experts." in key:
            for expert, matrix in enumerate(tensor):
                parts, expanded = pack(matrix.mT.contiguous())
                matrix.copy_(expanded.mT)
                place = f"{base}.{name}s.{expert}"
                tensors |= {f"{place}.{part}": value.contiguous() for part, value in parts.items()}
        else:
            tensors[key] = tensor
    return theirs, tensors


def dense(matrix):
    return {"weight": matrix}, matrix


def nf4(matrix):
    return packers.bits4(matrix, kind="nf4", block=64, dtype=torch.bfloat16, double=True)


@pytest.mark.parametrize("pack", [dense, nf4])
def test_gpt_oss_as_unsloth_writes_it(pack, tmp_path):
    theirs, tensors = gpt_oss(pack)
    config = json.loads(theirs.config.to_json_string(use_diff=False)) | {"model_type": "gpt_oss"}
    config |= {"quantization_config": NF4} if pack is nf4 else {}
    found = opened(tmp_path / "files", config, tensors)
    with torch.no_grad():
        wanted = theirs(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits(found), wanted, rtol=0, atol=1e-4)
    assert len(found.packed_weights()) == (4 if pack is nf4 else 0)
    # its own names, where those are there; written by them too
    written = (
        dict(disk_tensors(found.state_dict().items(), models.rules(found.shape))) if pack is dense else {}
    )
    assert pack is nf4 or written.keys() == theirs.state_dict().keys()


def test_control_arm_a_missing_expert_is_named(tmp_path):
    config, model = drawn("qwen3_vl_moe_text")
    tensors = unfused("qwen3_vl_moe_text", model)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.weight"):
        opened(tmp_path / "dense", config, tensors)
