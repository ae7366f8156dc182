"""Models in compressed-tensors' and modelopt's formats, several in one checkpoint among them: logits and gradients of
the same model in float, codes that stay as they are, and adapters that train beside them."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_quantized_models import batch_of, gradients, packed_of, some_ids

from unfreeze import cli, models
from unfreeze.checkpoint import disk_tensors, open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.inspect import inspect
from unfreeze.core.errors import ConfigError
from unfreeze.generate.open import open_model
from unfreeze.models.publish import carried, published
from unfreeze.quant import Int4, nvfp4
from unfreeze.quant.fp8_scaled import COLUMN, MATRIX, Fp8Scaled
from unfreeze.quant.integers import Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.nvfp4 import Nvfp4

SIZES = {
    "vocab_size": 88,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
"""A dense layer, and one with experts."""
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
ASYMMETRIC = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
GATE_UP = r"re:.*mlp\.experts\.\d+\.(gate|up)_proj"
EXPERTS = r"re:.*mlp\.experts\..*"


def compressed(*groups: tuple[str, str, dict[str, object]]) -> dict[str, object]:
    """(targets, format, weights) of each group; attention and the head stay as they are where no group has them."""
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": groups[0][1] if len(groups) == 1 else "mixed-precision",
        "ignore": ["lm_head", r"re:.*mlp\.gate$"] + (["re:.*self_attn.*"] if len(groups) > 1 else []),
        "config_groups": {
            f"group_{i}": {"targets": [targets], "format": format, "weights": weights}
            for i, (targets, format, weights) in enumerate(groups)
        },
    }


def modelopt(algorithm: str, **more: object) -> dict[str, object]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "exclude_modules": ["lm_head", "*.mlp.gate"],
        **more,
    }


@pytest.fixture
def configs(pytestconfig):
    folder = pytestconfig.rootpath.parent / "shared" / "data" / "configs"
    if not folder.is_dir():
        pytest.skip("the published configs are not here")
    return folder


def by_kind(attention, dense, experts):
    return lambda name: experts if ".experts." in name else attention if "self_attn" in name else dense


INTEGERS, FP8, NVFP4 = Integers(4, 32, zeros=True), Fp8Scaled(COLUMN), Nvfp4(nvfp4.MODELOPT)
CASES = {
    "bf16, FP8 and MXFP4": (
        compressed(("Linear", "float-quantized", FLOAT8), (EXPERTS, "mxfp4-pack-quantized", FLOAT4)),
        by_kind(None, FP8, Mxfp4()),
        "mxfp4-pack-quantized, fp8-channel",
    ),
    "experts of two formats": (
        compressed(("Linear", "float-quantized", FLOAT8), (GATE_UP, "mxfp4-pack-quantized", FLOAT4)),
        lambda name: None if "self_attn" in name else Mxfp4() if re.match(GATE_UP[3:], name) else FP8,
        "mxfp4-pack-quantized, fp8-channel",
    ),
    "experts whose down is bf16": (
        compressed((GATE_UP, "pack-quantized", ASYMMETRIC)),
        lambda name: INTEGERS if re.match(GATE_UP[3:], name) else None,
        "int4-pack-quantized",
    ),
    "W4A16 with zero points": (
        compressed(("Linear", "pack-quantized", ASYMMETRIC)),
        by_kind(INTEGERS, INTEGERS, INTEGERS),
        "int4-pack-quantized",
    ),
    "NVFP4 of modelopt": (modelopt("NVFP4"), by_kind(NVFP4, NVFP4, NVFP4), "nvfp4"),
    "FP8 and NVFP4 of modelopt": (
        modelopt(
            "MIXED_PRECISION",
            quantized_layers={
                "model.layers.1.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
                **{f"model.layers.{i}.self_attn": {"quant_algo": "FP8"} for i in range(2)},
            },
        ),
        by_kind(Fp8Scaled(MATRIX), None, NVFP4),
        "nvfp4, fp8-tensor",
    ),
}
UNREAD = ("input_scale", "k_scale")
"""Scales of activations, as modelopt's releases have them beside the weights."""


def write(folder, tensors, config):
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(params=CASES)
def release(request, tmp_path):
    """-> (folder of the release, folder of the same in float32, transformers' model of the latter, its formats)."""
    table, codec_for, formats = CASES[request.param]
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES))
    model.save_pretrained(tmp_path / "random")
    config = json.loads((tmp_path / "random/config.json").read_text())
    packed, dense = {}, {}
    for name, tensor in load_file(tmp_path / "random/model.safetensors").items():
        packed[name] = dense[name] = tensor
        codec = codec_for(name) if name.endswith("_proj.weight") else None
        if codec is not None:
            module, parts = name.removesuffix("weight"), codec.quantize(tensor)
            del packed[name]
            packed |= {f"{module}{part}": value for part, value in parts.items()}
            extras = codec.disk_extras(*tensor.shape)
            packed |= {f"{module}{part}": torch.tensor(values) for part, values in extras.items()}
            dense[name] = codec.dequantize(parts).float()
            if "modelopt" in request.param:
                packed |= {f"{module}{part}": torch.tensor(0.5) for part in UNREAD}
    write(tmp_path / "packed", packed, config | {"quantization_config": table})
    write(tmp_path / "dense", dense, config)
    oracle = type(model).from_pretrained(tmp_path / "dense", dtype=torch.float32)
    return tmp_path / "packed", tmp_path / "dense", oracle, formats


def test_logits_equal_transformers_of_the_expanded_weights(release):
    folder, dense, oracle, formats = release
    ids = some_ids(40)
    with torch.no_grad():
        wanted = oracle(ids[None]).logits[0]
        ours = open_model(open_checkpoint(folder))
        found = ours.lm_head(ours.hidden(batch_of(ids)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        half = open_model(open_checkpoint(folder), dtype=torch.bfloat16)
        found = half.lm_head(half.hidden(batch_of(ids))).float()
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.03)
    facts, whole = inspect(str(folder)), inspect(str(dense))
    assert facts["format"] == formats and facts["parameters"] == whole["parameters"]
    scheme, names = open_checkpoint(folder).scheme(), open_checkpoint(folder).by_model_name()
    parts = sum(info.nbytes for name, info in names.items() if scheme.part_of(name, names))
    extras = sum(info.nbytes for name, info in names.items() if name.endswith("weight_shape"))
    assert sum(packed.nbytes for packed in packed_of(ours).values()) == parts - extras


GLM = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "vocab_size": 88,
    "pad_token_id": None,
    "eos_token_id": 1,
}
"""Sizes of the release's five first layers: three dense ones, the last two with shared choices."""


def test_glm_5_2_is_read_as_nvidia_published_it(tmp_path, configs):
    """Its quantization_config and every field but the sizes; experts in NVFP4, the head for more tokens untouched."""
    published_config = json.loads((configs / "nvidia--GLM-5.2-NVFP4.json").read_text())
    cut = {name: published_config[name][:5] for name in ("indexer_types", "mlp_layer_types")}
    cut["layer_types"] = ["indexed_attention"] * 5  # transformers' own word for it
    config = published_config | GLM | cut
    table = config.pop("quantization_config")
    torch.manual_seed(0)
    oracle = transformers.GlmMoeDsaForCausalLM(transformers.GlmMoeDsaConfig.from_dict(config))
    oracle.save_pretrained(tmp_path / "random")
    packed, dense = {}, {}
    for name, tensor in load_file(tmp_path / "random/model.safetensors").items():
        packed[name] = dense[name] = tensor
        if ".experts." in name:
            parts = NVFP4.quantize(tensor)
            del packed[name]
            packed |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
            dense[name] = NVFP4.dequantize(parts).float()
    packed["model.layers.5.enorm.weight"] = torch.ones(64)
    write(tmp_path / "packed", packed, config | {"quantization_config": table})
    write(tmp_path / "dense", dense, config)
    theirs = type(oracle).from_pretrained(
        tmp_path / "dense", dtype=torch.float32, attn_implementation="eager"
    )
    ids = some_ids(40)
    with torch.no_grad():
        manifest = open_checkpoint(tmp_path / "packed")
        ours = open_model(manifest)
        found = ours.lm_head(ours.hidden(batch_of(ids)))
        torch.testing.assert_close(found, theirs(ids[None]).logits[0], rtol=0, atol=1e-5)
    assert len(packed_of(ours)) == 2 * 2 and inspect(str(tmp_path / "packed"))["format"] == "nvfp4"
    assert [name for name, _ in carried(ours, manifest)] == ["model.layers.5.enorm.weight"]


def test_what_was_read_is_saved_as_it_was_but_for_scales_of_activations(release):
    folder, *_ = release
    manifest = open_checkpoint(folder)
    ours, scheme, names = open_model(manifest), manifest.scheme(), manifest.by_model_name()
    rules = models.rules(ours.shape)
    saved = dict(disk_tensors(ours.state_dict().items(), rules, lambda module: scheme.stored(module, names)))
    stored = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.rpartition(".")[2] not in UNREAD
    }
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert saved[name].flatten().tolist() == tensor.flatten().tolist(), name


def test_adapters_get_the_gradients_of_the_same_model_in_float(release):
    """LoRA on every linear layer, experts too. No expanded weight is among what autograd keeps."""
    packed, dense, *_ = release
    held = packed_of(open_model(open_checkpoint(packed)))
    shapes = {weight.shape[-2:] for weight in held.values()}
    (kept, _, found), (kept_whole, _, wanted) = gradients(packed), gradients(dense)
    assert found.keys() == wanted.keys() and any("experts" in name for name in found)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)

    def expanded(tensors):
        return [t for t in tensors if t.is_floating_point() and {t.shape[-2:], t.shape[:-3:-1]} & shapes]

    # layers that stay dense keep their weight in both, of which some have a packed one's shape
    assert len(expanded(kept)) < len(expanded(kept_whole))


def test_what_is_trained_dense_is_published_in_the_formats_of_its_config(release):
    """Each half of a stack is quantized by itself, as its file has it."""
    folder, dense, *_ = release
    config = json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    scheme = open_checkpoint(folder).scheme()
    written = dict(published(open_model(open_checkpoint(dense)), config | {"dtype": "float32"}))
    assert written.keys() == {name for name in stored if name.rpartition(".")[2] not in UNREAD}
    weights = load_file(dense / "model.safetensors")
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        codec = scheme.codec_for(module) if name.endswith("_proj.weight") else None
        if codec is not None:
            for part, value in codec.quantize(weight).items():
                assert torch.equal(
                    written[f"{module}.{part}"].flatten().view(torch.uint8), value.flatten().view(torch.uint8)
                ), (name, part)


DIRECT = {
    "float-quantized": (FLOAT8, Fp8Scaled(COLUMN)),
    "pack-quantized": (ASYMMETRIC | {"symmetric": True, "num_bits": 8}, Integers(8, 32, scale_dtype="F32")),
}
"""Formats of compressed-tensors that transformers computes with in float32: with zero points its own shapes disagree,
NVFP4 it has in bf16."""


@pytest.mark.parametrize("format", DIRECT)
def test_transformers_reads_the_same_numbers_of_the_same_files(format, tmp_path):
    weights, codec = DIRECT[format]
    config = {key: value for key, value in SIZES.items() if "experts" not in key and "mlp_only" not in key}
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))
    model.save_pretrained(tmp_path / "random")
    given = json.loads((tmp_path / "random/config.json").read_text())
    packed = {}
    for name, tensor in load_file(tmp_path / "random/model.safetensors").items():
        packed[name] = tensor
        if name.endswith("_proj.weight"):
            module, parts = name, codec.quantize(packed.pop(name))
            extras = codec.disk_extras(*tensor.shape)
            parts |= {part: torch.tensor(values) for part, values in extras.items()}
            packed |= {f"{module.removesuffix('weight')}{part}": value for part, value in parts.items()}
    table = compressed(("Linear", format, weights))
    write(tmp_path / "packed", packed, given | {"quantization_config": table})
    ids = some_ids(30)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs(ids[None]).logits[0]
        ours = open_model(open_checkpoint(tmp_path / "packed"))
        found = ours.lm_head(ours.hidden(batch_of(ids)))
    assert len(packed_of(ours)) == 2 * 7
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.fixture
def mixed_k2(tmp_path):
    """tiny-k2 with bf16 attention, FP8 dense layers and MXFP4 experts."""
    folder = tmp_path / "mixed"
    shutil.copytree(TINY_K2, folder)
    dense, fp8 = by_kind(None, Fp8Scaled(COLUMN, scale_dtype="BF16"), Mxfp4()), {}
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            parts = {part: stored[f"{module}.{part}"] for part in ("weight_packed", "weight_scale")}
            tensor, suffix = Int4(32).dequantize(parts), "weight"
        elif f"{module}.weight_packed" in stored:
            continue
        codec = dense(name) if module.endswith("_proj") and suffix == "weight" else None
        parts = {suffix: tensor} if codec is None else codec.quantize(tensor)
        fp8 |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(fp8, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    groups = (("Linear", "float-quantized", FLOAT8), (EXPERTS, "mxfp4-pack-quantized", FLOAT4))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": compressed(*groups)}))
    return folder


def test_a_mixed_checkpoint_trains_and_its_adapter_is_saved(mixed_k2, chat_rows, tmp_path, capsys):
    out = tmp_path / "run"
    command = ["sft", "--quiet", "--model", mixed_k2, "--data", chat_rows, "--out", out]
    sizes = ["--tokens-per-step", 128, "--steps", 2, "--watch.samples", 1, "--lora.rank", 2]
    assert cli.main([str(word) for word in [*command, *sizes]]) == 0
    adapter = load_file(next(out.rglob("adapter_model.safetensors")))
    assert sum("experts" in name for name in adapter) and all(
        tensor.isfinite().all() for tensor in adapter.values()
    )
    facts = inspect(str(mixed_k2))
    assert facts["format"] == "mxfp4-pack-quantized, fp8-channel"
    assert facts["groups"]["experts"]["formats"] == ["mxfp4-pack-quantized"]
    # every weight of packed files cannot be trained, and that is said before any work
    with pytest.raises(ConfigError, match="packed"):
        from unfreeze.job.trained import AllWeights

        AllWeights().check(open_checkpoint(mixed_k2))
