"""inspect counts what is there, from headers alone: every byte in one group, packed weights by their logical
size, other towers apart."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unfreeze.commands import inspect as recipe
from unfreeze.commands.demo import TINY_K2
from unfreeze.commands.inspect import inspect
from unfreeze.core.command import Common
from unfreeze.core.errors import CheckpointError

SHARED = Path(__file__).resolve().parents[3] / "shared"
V, D, I, W, E, GROUP = 48, 64, 96, 32, 3, 32
TEXT = {
    "model_type": "kimi_k2",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": I,
    "moe_intermediate_size": W,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            }
        }
    },
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def mlp(name: str, width: int) -> dict[str, torch.Tensor]:
    return {
        f"{name}.gate_proj.weight": bf16(width, D),
        f"{name}.up_proj.weight": bf16(width, D),
        f"{name}.down_proj.weight": bf16(D, width),
    }


def tensors() -> dict[str, torch.Tensor]:
    """A model in Kimi's on-disk names, dense: one dense layer, one with experts."""
    found = {
        "model.embed_tokens.weight": bf16(V, D),
        "model.norm.weight": bf16(D),
        "lm_head.weight": bf16(V, D),
    }
    for layer in ("model.layers.0", "model.layers.1"):
        found |= {
            f"{layer}.input_layernorm.weight": bf16(D),
            f"{layer}.self_attn.o_proj.weight": bf16(D, 16),
            f"{layer}.self_attn.q_a_layernorm.weight": bf16(16),
        }
    found |= mlp("model.layers.0.mlp", I) | mlp("model.layers.1.mlp.shared_experts", W)
    found |= {
        "model.layers.1.mlp.gate.weight": bf16(E, D),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.zeros(E),
    }
    for e in range(E):
        found |= mlp(f"model.layers.1.mlp.experts.{e}", W)
    return found


def packed(dense: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with routed experts as INT4: shapes of the format written out by hand."""
    found = {}
    for name, tensor in dense.items():
        if ".mlp.experts." not in name:
            found[name] = tensor
            continue
        out, width = tensor.shape
        found |= {
            f"{name}_packed": torch.zeros(out, width // 8, dtype=torch.int32),
            f"{name}_scale": bf16(out, width // GROUP),
            f"{name}_shape": torch.tensor([out, width], dtype=torch.int32),
        }
    return found


def write(folder: Path, config: dict, found: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors")
    return str(folder)


def numel(found: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() for t in found.values())


def nbytes(found: dict[str, torch.Tensor]) -> int:
    return sum(t.nbytes for t in found.values())


def test_packed_weights_count_by_their_logical_size_and_every_byte_is_in_one_group(tmp_path):
    dense = tensors()
    facts = inspect(write(tmp_path / "int4", TEXT | {"quantization_config": INT4}, packed(dense)))
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert (facts["parameters"], facts["expanded_bytes"], facts["format"]) == (
        numel(dense),
        2 * numel(dense),
        "int4-pack-quantized",
    )
    assert (
        facts["bytes"] == nbytes(packed(dense)) == sum(group["bytes"] for group in facts["groups"].values())
    )
    assert (facts["family"], facts["layers"], facts["moe_layers"], facts["experts"]) == (
        "deepseek_v3",
        2,
        1,
        E,
    )
    experts = facts["groups"]["experts"]
    assert (experts["parameters"], experts["formats"], experts["tensors"]) == (
        3 * E * W * D,
        ["int4-pack-quantized"],
        9 * E,
    )
    assert set(facts["groups"]) == {
        "attention",
        "mlp",
        "shared_experts",
        "experts",
        "router",
        "lm_head",
        "embeddings",
        "norms",
    }
    assert (
        facts["groups"]["router"]["formats"] == ["BF16", "F32"] and facts["groups"]["norms"]["tensors"] == 5
    )
    as_dense = inspect(write(tmp_path / "dense", TEXT, dense))
    assert {n: g["parameters"] for n, g in as_dense["groups"].items()} == {
        n: g["parameters"] for n, g in facts["groups"].items()
    }
    assert (as_dense["format"], as_dense["bytes"]) == ("dense", nbytes(dense))


def test_a_vision_tower_and_heads_for_later_tokens_are_in_no_total(tmp_path):
    """Kimi-K2.5: the text model under language_model., beside it a tower whose names look like a language
    model's."""
    text = packed(tensors())
    vision = {
        "vision_tower.encoder.blocks.0.mlp.fc0.weight": bf16(80, 40),
        "vision_tower.encoder.blocks.0.norm0.weight": bf16(40),
        "mm_projector.proj.0.weight": bf16(64, 40),
        "language_model.model.layers.2.mlp.gate_proj.weight": bf16(W, D),
    }
    config = {
        "model_type": "kimi_k25",
        "text_config": TEXT | {"quantization_config": INT4, "num_nextn_predict_layers": 1},
        "vision_config": {},
    }
    facts = inspect(
        write(tmp_path / "k25", config, {"language_model." + n: t for n, t in text.items()} | vision)
    )
    assert (facts["parameters"], facts["bytes"], facts["tensors"]) == (
        numel(tensors()),
        nbytes(text),
        len(text),
    )
    other = facts["groups"]["other"]
    assert (other["parameters"], other["bytes"], other["tensors"]) == (numel(vision), nbytes(vision), 4)
    assert list(facts["groups"])[-1] == "other"


def test_an_unsupported_quantization_is_inspected_and_its_weights_are_not_guessed(tmp_path):
    found = tensors()
    found["model.layers.0.mlp.up_proj.weight"] = torch.zeros(I, D).to(torch.float8_e4m3fn)
    found["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.zeros(1, 1)
    quantized = {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}
    facts = inspect(write(tmp_path / "fp8", TEXT | quantized, found))
    assert facts["format"].startswith("unsupported (") and 'fmt "e5m2"' in facts["format"]
    assert facts["bytes"] == nbytes(found) and facts["parameters"] is None and facts["expanded_bytes"] is None
    assert facts["groups"]["mlp"]["parameters"] is None and facts["groups"]["mlp"]["formats"] == [
        "BF16",
        "F32",
        "F8_E4M3",
    ]
    assert facts["groups"]["embeddings"]["parameters"] == V * D


def test_a_model_without_a_family_is_inspected(tmp_path):
    config = TEXT | {"model_type": "llama9"}
    facts = inspect(
        write(tmp_path / "new", config, tensors() | {"visual.blocks.0.mlp.fc1.weight": bf16(8, 8)})
    )
    assert facts["family"] == "not built" and "llama9" in facts["reason"]
    assert (facts["layers"], facts["experts"], facts["parameters"]) == (2, E, numel(tensors()))
    assert (
        facts["groups"]["other"]["parameters"] == 64
        and facts["groups"]["experts"]["bytes"] == 2 * 3 * E * W * D
    )
    bare = inspect(write(tmp_path / "bare", {"model_type": "x"}, {"model.embed_tokens.weight": bf16(V, D)}))
    assert bare["layers"] is None and bare["parameters"] == V * D


@pytest.mark.parametrize(
    "config", [TEXT, {"model_type": "x"}, TEXT | {"quantization_config": {"quant_method": "awq"}}]
)
def test_what_is_printed_has_every_group_and_the_total(tmp_path, capsys, config):
    folder = write(tmp_path / "m[bold]", config, tensors())
    facts = recipe.main([folder], Common(json=False, quiet=False))
    said = capsys.readouterr().out
    assert all(name in said for name in facts["groups"]) and "total" in said and facts["family"] in said
    assert ("cannot be loaded" in said) == (facts["family"] == "not built")


def test_a_damaged_file_is_still_refused(tmp_path):
    folder = Path(write(tmp_path / "m", TEXT, tensors()))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(CheckpointError):
        inspect(str(folder))


def test_a_packed_weight_without_one_of_its_parts_is_named(tmp_path):
    """Some writers of GPTQ leave g_idx out where columns are in order."""
    found, name = tensors(), "model.layers.0.mlp.up_proj"
    del found[f"{name}.weight"]
    found[f"{name}.qweight"] = torch.zeros(D // 8, I, dtype=torch.int32)
    found[f"{name}.qzeros"] = torch.zeros(1, I // 8, dtype=torch.int32)
    found[f"{name}.scales"] = torch.zeros(1, I, dtype=torch.float16)
    config = TEXT | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}}
    with pytest.raises(CheckpointError, match=f"{name} has qweight, qzeros, scales and no g_idx"):
        inspect(write(tmp_path / "without", config, found))
    found[f"{name}.g_idx"] = torch.zeros(D, dtype=torch.int32)
    assert inspect(write(tmp_path / "with", config, found))["format"] == "gptq"


def test_the_shared_checkpoint():
    folder = SHARED / "data" / "tiny-kimi-int4"
    if not folder.is_dir():
        pytest.skip("../shared/data/tiny-kimi-int4 is not here; the tests above cover the same ground")
    facts = inspect(str(folder))
    weights = 0
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:  # the publisher's own shapes: what weight_shape says
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name.endswith("weight_shape"):
                    weights += math.prod(opened.get_tensor(name).tolist())
                elif not name.endswith(("weight_packed", "weight_scale")):
                    weights += math.prod(opened.get_slice(name).get_shape())
    assert facts["parameters"] == weights and "other" not in facts["groups"]


CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "data" / "configs"
PUBLISHED = {  # what the publisher says of the model, in billions
    "deepseek-ai--DeepSeek-V3": 671,
    "gpt-oss-20b": 20.9,
    "Kimi-K2-Thinking": 1026,
    "Qwen--Qwen3-30B-A3B": 30.5,
    "google--gemma-4-26B-A4B": 25.2,
    "Qwen3-Next-80B": 79.7,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": 31.6,
    "deepseek-ai--DeepSeek-V3.2": 671.9,
}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="published configs are not here")
def test_a_config_alone_is_built_or_names_its_part():
    files = [file for file in sorted(CONFIGS.glob("*.json")) if "hf_quant" not in file.name]
    assert len(files) > 50
    for file in files:
        facts = inspect(str(file))
        if facts["family"] == "not built":
            assert re.search(r"model_type '\w+.*'.* (is|are) not built", facts["reason"]), facts["reason"]
        elif not facts["format"].startswith("unsupported"):
            assert facts["parameters"] > 10**8 and facts["bytes"] > 0
        if file.stem in PUBLISHED:
            assert facts["parameters"] / 1e9 == pytest.approx(PUBLISHED[file.stem], rel=0.01)


def test_a_config_alone_counts_what_its_files_hold():
    """tiny-k2, whose files are here: the same parameters and bytes in each group."""
    whole, alone = inspect(str(TINY_K2)), inspect(str(TINY_K2 / "config.json"))
    assert alone["parameters"] == whole["parameters"] and alone["files"] == 0
    for name, group in whole["groups"].items():
        assert alone["groups"][name]["parameters"] == group["parameters"], name


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="published configs are not here")
@pytest.mark.parametrize(
    "name, words",
    [("Qwen3.5-35B-A3B", "GQA 16/2 in 10 layers, a recurrent state in 30"), ("Kimi-K2-Thinking", "MLA")],
)
def test_a_hybrid_says_which_layers_have_a_state(name, words):
    assert inspect(str(CONFIGS / f"{name}.json"))["attention"] == words
