"""Models in formats that other libraries write: the same logits as transformers' model of the expanded weights,
and LoRA trains beside the codes, experts included."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import packers
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from unfreeze import models
from unfreeze.adapters import attach
from unfreeze.checkpoint import disk_tensors, open_checkpoint
from unfreeze.commands.inspect import inspect
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import CheckpointError
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.models import qwen3_moe
from unfreeze.quant.codec import Packed, texted

VECTORS = Path(__file__).parents[1] / "quant" / "vectors"
COMMON = {
    "vocab_size": 88,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "Llama": COMMON,
    "Qwen3Moe": COMMON
    | {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 3, "num_experts_per_tok": 2},
    "Mixtral": COMMON | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "Phi3": COMMON | {"pad_token_id": 0},
}
PACKED = {"Llama": 7, "Qwen3Moe": 6, "Mixtral": 6, "Phi3": 4}
"""Packed weights of a layer; Mixtral's experts are called w1, w2 and w3 on disk, Phi-3's projections are fused."""
ENDS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FORMATS = {
    "awq": (AWQ, partial(packers.awq, group=32)),
    "gptq act-order": (
        GPTQ | {"checkpoint_format": "gptq"},
        partial(packers.gptq, bits=4, group=32, act_order=True, minus_one=True),
    ),
    "gptq 8 bits": (
        GPTQ | {"bits": 8, "desc_act": False, "checkpoint_format": "gptq_v2"},
        partial(packers.gptq, bits=8, group=32, act_order=False, minus_one=False),
    ),
}

BITS4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
NF4 = BITS4 | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_skip_modules": None}
FORMATS |= {
    "nf4 double": (NF4, partial(packers.bits4, kind="nf4", block=64, dtype=torch.bfloat16, double=True)),
    "fp4": (BITS4, partial(packers.bits4, kind="fp4", block=128, dtype=torch.float16, double=False)),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, packers.int8),
}


def without_g_idx(weight):
    parts, expanded = packers.gptq(weight, bits=4, group=32, act_order=False, minus_one=True)
    return {name: part for name, part in parts.items() if name != "g_idx"}, expanded


CASES = [(model, name) for model in MODELS for name in FORMATS] + [("Qwen3Moe", "auto-round")]
AUTOROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
FORMATS["auto-round"] = (AUTOROUND | {"packing_format": "auto_round:auto_gptq"}, without_g_idx)


@pytest.fixture(params=CASES, ids=" ".join)
def release(request, tmp_path):
    """-> (folder of the release, folder of the same in float32, transformers' model of the latter)."""
    kind, name = request.param
    table, packer = FORMATS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.save_pretrained(tmp_path / "random")
    written = json.loads((tmp_path / "random/config.json").read_text())
    packed, dense = {}, {}
    for tensor_name, tensor in load_file(tmp_path / "random/model.safetensors").items():
        if tensor_name.endswith(ENDS):
            parts, dense[tensor_name] = packer(tensor)
            module = tensor_name.removesuffix("weight")
            packed |= {f"{module}{part}": value.contiguous() for part, value in parts.items()}
        else:
            packed[tensor_name] = dense[tensor_name] = tensor
    for folder, tensors, more in (("packed", packed, {"quantization_config": table}), ("dense", dense, {})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(written | more))
    oracle = type(model).from_pretrained(tmp_path / "dense", dtype=torch.float32)
    return tmp_path / "packed", tmp_path / "dense", oracle


def batch_of(ids):
    return pack([Example(ids.tolist(), [0.0] + [1.0] * (len(ids) - 1))])


def some_ids(count):
    return torch.randint(0, 88, (count,), generator=torch.Generator().manual_seed(1))


def packed_of(model) -> dict[str, Packed]:
    found = {
        name: getattr(module, "packed", None) for name, module in model.named_modules() if is_packed(module)
    }
    return {name: packed for name, packed in found.items() if packed is not None}


def is_packed(module) -> bool:
    return getattr(module, "codec", None) is not None


def test_logits_equal_transformers_of_the_expanded_weights(release):
    folder, dense, oracle = release
    ids = some_ids(40)
    with torch.no_grad():
        wanted = oracle(ids[None]).logits[0]
        ours = open_model(open_checkpoint(folder))
        found = ours.lm_head(ours.hidden(batch_of(ids)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        half = open_model(open_checkpoint(folder), dtype=torch.bfloat16)
        torch.testing.assert_close(
            half.lm_head(half.hidden(batch_of(ids))).float(), wanted, rtol=0, atol=0.03
        )
    held, files = packed_of(ours), open_checkpoint(folder).tensors
    assert len(held) == 2 * PACKED[type(oracle).__name__.removesuffix("ForCausalLM")]
    parts = [info for name, info in files.items() if any(end.removesuffix("weight") in name for end in ENDS)]
    texts = [info for info in parts if "quant_state" in info.name]
    extra = [info for info in parts if "weight_format" in info.name]
    of_files = sum(info.nbytes for info in parts if info not in texts + extra)
    assert sum(packed.nbytes for packed in held.values()) == of_files + 4 * len(texts)
    facts, expanded = inspect(str(folder)), inspect(str(dense))
    assert facts["parameters"] == expanded["parameters"] and facts["format"] != "dense"


def test_what_was_read_is_saved_as_it_was(release):
    folder, *_ = release
    ours, manifest = open_model(open_checkpoint(folder)), open_checkpoint(folder)
    scheme, names = manifest.scheme(), manifest.by_model_name()
    written = disk_tensors(
        ours.state_dict().items(), models.rules(ours.shape), lambda module: scheme.stored(module, names)
    )
    if texted(scheme.codecs[0]):  # its texts are not kept
        with pytest.raises(CheckpointError, match="texts are not kept"):
            list(written)
        return
    saved = dict(written)
    stored = load_file(folder / "model.safetensors")
    assert saved.keys() == stored.keys()
    extras = [name for name in stored if name.endswith("weight_format")]
    assert all(saved.pop(name).item() == stored.pop(name).item() for name in extras)
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())


def gradients(folder):
    """-> (what autograd kept, logits, name -> gradient) of a step with adapters, whose B is not zero."""
    ids = some_ids(24)
    model = open_model(open_checkpoint(folder))
    attach(model, LoraConfig(rank=4), seed=0)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    for name, value in trained.items():  # B is zero at first: A would get no gradient
        torch.manual_seed(len(name))
        value.data += 0.02 * torch.randn_like(value)
    before = [part.clone() for packed in packed_of(model).values() for part in packed.parts.values()]
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model.lm_head(model.hidden(batch_of(ids)))
        torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    after = [part for packed in packed_of(model).values() for part in packed.parts.values()]
    assert all(map(torch.equal, before, after))
    return kept, logits, {name: value.grad for name, value in trained.items()}


def test_adapters_get_the_gradients_of_the_same_model_in_float(release):
    """The oracle is the model with the expanded weights, unpacked. The codes stay as they are, and no expanded
    weight is among what autograd keeps."""
    packed, dense, _ = release
    shapes = {weight.shape[-2:] for weight in packed_of(open_model(open_checkpoint(packed))).values()}
    (kept, _, found), (kept_whole, _, wanted) = gradients(packed), gradients(dense)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)

    def whole(tensors):
        return [t for t in tensors if t.is_floating_point() and {t.shape[-2:], t.shape[:-3:-1]} & shapes]

    assert not whole(kept) and whole(kept_whole)  # control arm: of the dense model it keeps the weights


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_the_packers_of_these_tests_write_what_the_libraries_wrote(name):
    tensors = load_file(VECTORS / f"{name}.safetensors")
    cases = sorted({key.partition("/")[0] for key in tensors})
    for case in cases:
        parts = {key.partition("/")[2]: value for key, value in tensors.items() if key.startswith(f"{case}/")}
        scales = parts["scales"]
        if name == "awq":
            columns = [
                packers.words(torch.eye(8, dtype=torch.int32)[k], 4, [0, 4, 1, 5, 2, 6, 3, 7])
                for k in range(8)
            ]
            shifts = [int(column).bit_length() - 1 for column in columns]
            codes, zeros = (
                torch.stack([parts[part] >> shift & 15 for shift in shifts], -1).flatten(-2)
                for part in ("qweight", "qzeros")
            )
            written = packers.pack_awq(codes, scales, zeros)
            groups = torch.arange(64) // (64 // len(scales))
        else:
            bits, old = int(case.split()[0].removeprefix("bits_")), case.endswith("gptq")
            count, mask, groups = 32 // bits, 2**bits - 1, parts["g_idx"].long()
            codes = torch.stack([parts["qweight"] >> bits * k & mask for k in range(count)], 1).flatten(0, 1)
            ones = sum(1 << bits * k for k in range(count)) if old else 0
            zeros = torch.stack([parts["qzeros"] + ones >> bits * k & mask for k in range(count)], -1)
            zeros = zeros.flatten(-2)
            written = packers.pack_gptq(codes, scales, zeros, groups, bits, minus_one=old)
            zeros = zeros[:, : scales.shape[1]]
        assert all(torch.equal(written[part], parts[part]) for part in written), case
        wanted = packers.expanded(codes, scales, zeros, groups)
        assert torch.equal(wanted, parts["weight"].float().t()), case


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"],
}


def test_stacked_experts_in_mxfp4_are_read_held_trained_beside_and_saved(tmp_path, monkeypatch):
    """As gpt-oss has them: both projections of all experts in one tensor each, under names of its own. The oracle
    is the same model with what transformers makes of those tensors."""
    monkeypatch.setattr(qwen3_moe, "RULES", ())
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**MODELS["Qwen3Moe"])
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "random")
    written = json.loads((tmp_path / "random/config.json").read_text())
    packed, dense = {}, {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in load_file(tmp_path / "random/model.safetensors").items():
        if ".experts." not in name:
            packed[name] = dense[name] = tensor
    for layer in range(2):
        for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            blocks = torch.randint(0, 256, (3, rows, columns // 32, 16), generator=generator).byte()
            scales = torch.randint(118, 122, (3, rows, columns // 32), generator=generator).byte()
            module = f"model.layers.{layer}.mlp.experts.{name}"
            packed |= {f"{module}_blocks": blocks, f"{module}_scales": scales}
            weight = convert_moe_packed_tensors(blocks, scales).float().transpose(1, 2)
            dense[f"{module}.weight"] = weight.contiguous()
    for folder, tensors, more in (("packed", packed, {"quantization_config": MXFP4}), ("dense", dense, {})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(written | more))
    facts, oracle = (inspect(str(tmp_path / folder)) for folder in ("packed", "dense"))
    assert facts["format"] == "mxfp4" and facts["parameters"] == oracle["parameters"]
    assert facts["groups"]["experts"]["bytes"] * 32 == 17 * oracle["groups"]["experts"]["parameters"]

    ours = open_model(open_checkpoint(tmp_path / "packed"))
    saved = dict(disk_tensors(ours.state_dict().items(), models.rules(ours.shape)))
    assert saved.keys() == packed.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in packed.items())
    found = [gradients(tmp_path / folder)[1:] for folder in ("packed", "dense")]
    assert torch.equal(found[0][0], found[1][0])
    for name, gradient in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("release", [("Llama", "gptq act-order")], indirect=True)
def test_a_bias_of_zeros_beside_each_packed_layer_is_none(release):
    """As GPTQ's older writers left them in models without biases; any other number is refused."""
    folder, *_ = release
    ids, file = some_ids(20), folder / "model.safetensors"
    ours = open_model(open_checkpoint(folder))
    wanted, tensors = ours.hidden(batch_of(ids)), load_file(file)
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    biases = {
        f"{module}.bias": torch.zeros(tensors[f"{module}.scales"].shape[1]).half() for module in modules
    }
    save_file(tensors | biases, file)
    assert torch.equal(open_model(open_checkpoint(folder)).hidden(batch_of(ids)), wanted)
    biases[f"{modules[0]}.bias"][3] = 0.5
    save_file(tensors | biases, file)
    with pytest.raises(CheckpointError, match=rf"{modules[0]}.bias says \[0.0, 0.0, 0.0, 0.5\] and 60 more"):
        open_model(open_checkpoint(folder))
    save_file(tensors | {"model.norm.bias": torch.zeros(64)}, file)  # control arm: beside nothing packed
    with pytest.raises(CheckpointError, match="not part of the model"):
        open_model(open_checkpoint(folder))


@pytest.mark.parametrize(
    "way",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=["nf4", "fp4", "int8"],
)
def test_a_release_that_transformers_and_bitsandbytes_wrote_is_read(way, tmp_path):
    """Where bitsandbytes is installed; else the models above and the recorded weights stand for it. The oracle is
    what they expand the model to again."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**COMMON | {"intermediate_size": 128})
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
    quantized = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=torch.bfloat16, quantization_config=transformers.BitsAndBytesConfig(**way)
    )
    quantized.save_pretrained(tmp_path / "packed")
    ids = some_ids(40)
    with torch.no_grad():
        wanted = quantized.dequantize(dtype=torch.float32).float()(ids[None]).logits[0]
        ours = open_model(open_checkpoint(tmp_path / "packed"), dtype=torch.float32)
        torch.testing.assert_close(ours.lm_head(ours.hidden(batch_of(ids))), wanted, rtol=0, atol=1e-5)
    assert len(packed_of(ours)) == 2 * 7
