"""A folder computes what its dequantized weights compute, here and in transformers; config.json is the writer's."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from tests.compress.quantize.libraries import dense, modules_of, scheme, tensors_of
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import ConfigError
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.quant import not_followed

IDS = [5, 6, 7, 8, 9, 10, 30, 41, 77]
NOT_EXPERTS = ("nvfp4", "nf4")
"""Formats without a loader in transformers for experts, which it holds stacked."""


@torch.no_grad()
def ours(folder: Path) -> torch.Tensor:
    model = open_model(open_checkpoint(folder))
    return model.logits(model.hidden(pack([Example(IDS, [0.0] + [1.0] * (len(IDS) - 1))])))


@torch.no_grad()
def theirs(folder: Path, **options) -> torch.Tensor:
    """transformers' logits in float32. What it expands is left in bf16; widening that changes no number."""
    config = transformers.AutoConfig.from_pretrained(folder) if not kimi(folder) else None
    if config is None:
        config = transformers.DeepseekV3Config.from_pretrained(folder)
        config.model_type = "deepseek_v3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.bfloat16, attn_implementation="eager", **options
        )
    model.eval()(torch.tensor([IDS]))  # linear layers are expanded when they are first used
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model(torch.tensor([IDS])).logits[0]


def kimi(folder: Path) -> bool:
    return json.loads((folder / "config.json").read_text())["model_type"] == "kimi_k2"


def expanded_folder(folder: Path, to: str, out: Path) -> Path:
    """The folder with every matrix expanded by the format's library, without quantization_config."""
    from safetensors.torch import save_file

    out.mkdir()
    tensors = {name: part.contiguous() for name, part in dense(tensors_of(folder), to).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


FORMATS = ("int4", "int8", "fp8", "mxfp4", "nvfp4", "nf4")


@pytest.mark.parametrize("base", ["llama", "moe"])
@pytest.mark.parametrize("to", FORMATS)
def test_a_folder_computes_what_its_dequantized_weights_compute(to, base, bases, quantized, tmp_path):
    folder = quantized(base, to, "all-linear")
    found, exact = ours(folder), theirs(expanded_folder(folder, to, tmp_path / "dense"))
    assert (found - exact).abs().max() < 1e-5
    assert (found - ours(bases[base])).abs().max() > 1e-3  # control arm: the base's logits are others
    if (base == "llama" and to != "nf4") or (base == "moe" and to not in NOT_EXPERTS):
        assert (found - theirs(folder)).abs().max() < 1e-5  # transformers' own loader


@pytest.mark.parametrize("to", ["int4", "mxfp4"])
def test_experts_alone_are_the_default_of_a_mixture(to, bases, quantized):
    folder = quantized("moe", to)
    modules = modules_of(tensors_of(folder), to)
    assert len(modules) == 24 and all(".mlp.experts." in name for name in modules)
    assert (ours(folder) - theirs(folder)).abs().max() < 1e-5


@pytest.mark.parametrize("modules", [(), ("all-linear",)])
def test_latent_attention_and_shared_experts(modules, deepseek, tmp_path):
    from tests.compress.quantize.conftest import run_quantize

    run_quantize(deepseek, tmp_path / "out", "int4", modules)
    tensors = tensors_of(tmp_path / "out")
    packed = modules_of(tensors, "int4")
    assert any(name.endswith("experts.3.up_proj") for name in packed)
    assert any(name.endswith("kv_b_proj") for name in packed) == bool(modules)
    assert not any("mlp.gate." in f"{name}." or "embed" in name for name in packed)
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    found = ours(tmp_path / "out")
    assert (found - theirs(tmp_path / "out")).abs().max() < 1e-4
    if modules:
        assert (found - ours(deepseek)).abs().max() > 1e-3  # attention was in bf16 before


def test_a_release_that_was_expanded_comes_back_bit_for_bit(bases, deepseek, tmp_path):
    """tiny-k2, expanded to bf16 and quantized again: the published tensors, codes and scales."""
    from tests.compress.quantize.conftest import run_quantize

    run_quantize(deepseek, tmp_path / "out", "int4")
    before, after = tensors_of(bases["int4"]), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    other = [n for n in before if before[n].dtype != after[n].dtype or not torch.equal(before[n], after[n])]
    assert other == []
    declared = [
        json.loads((f / "config.json").read_text())["quantization_config"]
        for f in (bases["int4"], tmp_path / "out")
    ]
    assert declared[0]["config_groups"] == declared[1]["config_groups"]
    run_quantize(deepseek, tmp_path / "all", "int4", ("all-linear",))  # control arm
    assert tensors_of(tmp_path / "all").keys() != before.keys()


def test_transformers_would_misread_experts_in_nvfp4(quantized):
    """The reason why the card refers to other programs; where this fails, the card's sentence is out of date."""
    folder = quantized("moe", "nvfp4", "all-linear")
    assert (ours(folder) - theirs(folder)).abs().max() > 0.1


def test_tied_embeddings_stay_tied(merging, tmp_path):
    from tests.compress.quantize.conftest import run_quantize

    settings = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    }
    tensors, config = merging.random_model("Llama", settings)
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    base = merging.sharded(tmp_path / "base", half, config | {"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="the head of this llama is tied to the embeddings"):
        run_quantize(base, tmp_path / "out", "int4", ("lm_head",))
    run_quantize(base, tmp_path / "out", "int4")
    after = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in after
    assert torch.equal(after["model.embed_tokens.weight"], half["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True
    assert (ours(tmp_path / "out") - theirs(tmp_path / "out")).abs().max() < 1e-5


def test_a_head_that_is_named_is_quantized(bases, tmp_path):
    from tests.compress.quantize.conftest import run_quantize

    record = run_quantize(bases["llama"], tmp_path / "out", "int8", ("lm_head",))  # beside what is usual
    assert record.inputs["modules"] == "all-linear lm_head"
    assert "lm_head" in modules_of(tensors_of(tmp_path / "out"), "int8")
    assert (ours(tmp_path / "out") - theirs(tmp_path / "out")).abs().max() < 1e-5


PRESETS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}


@pytest.mark.parametrize("to", ["int4", "int8", "fp8", "mxfp4", "nvfp4"])
def test_config_json_is_what_compressed_tensors_writes(to, quantized):
    table = json.loads((quantized("moe", to) / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(table)
    group = read.config_groups["group_0"]
    wanted = scheme(to)
    if to in PRESETS:
        wanted = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[PRESETS[to]])
    found = group.weights.model_dump()
    assert found.pop("observer", "minmax") == "minmax"  # as Kimi's file has it
    assert found == wanted.weights.model_dump()
    assert group.input_activations is None and group.output_activations is None
    assert read.to_dict()["quantization_status"] == "compressed"
    # every module that the files hold dense is listed, and no packed one
    from compressed_tensors.utils.match import is_match

    tensors = tensors_of(quantized("moe", to))
    packed = modules_of(tensors, to)
    linear = torch.nn.Linear(1, 1)
    ignored = {
        n.removesuffix(".weight"): is_match(n.removesuffix(".weight"), linear, tuple(read.ignore))
        for n in tensors
    }
    for name in packed:
        assert not is_match(name, linear, tuple(read.ignore)), name
    for name, listed in ignored.items():
        if name.endswith(("_proj", "gate", "lm_head")) and name not in packed:
            assert listed, name
    # and its fused name with it, which SGLang looks up (tests/examples/test_sglang.py)
    for name in (*packed, *ignored):
        for part, fused in (("q_proj", "qkv_proj"), ("gate_proj", "gate_up_proj")):
            if name.endswith(f".{part}"):
                other = name.removesuffix(part) + fused
                assert is_match(other, linear, tuple(read.ignore)) == (name not in packed), other
    assert not_followed({"quantization_config": table}) == ""


def test_config_json_is_what_transformers_writes_for_bitsandbytes(quantized):
    table = json.loads((quantized("moe", "nf4") / "config.json").read_text())["quantization_config"]
    skipped = table["llm_int8_skip_modules"]
    wanted = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype="bfloat16",
        llm_int8_skip_modules=skipped,
    ).to_dict()
    assert table == wanted | {"quant_method": "bitsandbytes"}
    tensors = tensors_of(quantized("moe", "nf4"))
    packed = modules_of(tensors, "nf4")
    assert len(packed) == 24 and not set(skipped) & set(packed)
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.self_attn.q_proj"} <= set(skipped)
    assert not_followed({"quantization_config": table}) == ""
