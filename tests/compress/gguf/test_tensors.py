"""A GGUF read back: logits as transformers computes them from the file, and tensors against the checkpoint's."""

import re

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.compress.gguf.made import MADE, gguf_of, weights_of
from unfreeze.compress.gguf import tensors as ours
from unfreeze.compress.gguf.tensors import planned

IDS = torch.tensor([[5, 17, 3, 88, 41, 2, 9, 60, 61, 62, 63, 64, 200, 301]])
READ = [name for name in MADE if not name.startswith(("gemma4", "gpt_oss"))]
"""Those that transformers 5.23 reads: of Gemma 4 it drops the scalars, of gpt-oss it cannot read the config."""
DAILY = ["llama", "mistral", "qwen2_moe", "qwen3_moe", "gemma3", "minimax_m2"]


def class_of(name):
    return getattr(transformers, f"{MADE[name].name}ForCausalLM")


@torch.no_grad()
def from_checkpoint(name, folder):
    model = class_of(name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model, model(IDS).logits


@torch.no_grad()
def from_gguf(name, folder, file):
    """transformers reads the weights; settings that it does not read (llama3's rope, head_dim) are given.

    It knows no architecture "mistral": without windows that is a Llama.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = class_of(name)
    if name == "mistral":
        table = {
            key: value
            for key, value in config.to_dict().items()
            if key not in ("model_type", "sliding_window")
        }
        config, model_class = transformers.LlamaConfig(**table), transformers.LlamaForCausalLM
    return model_class.from_pretrained(
        folder, gguf_file=file.name, config=config, dtype=torch.float32, attn_implementation="eager"
    )(IDS).logits


def apart(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in READ]
)
def test_logits_are_the_checkpoints(name, tiny):
    folder = tiny(name)
    model, expected = from_checkpoint(name, folder)
    assert apart(from_gguf(name, folder, gguf_of(folder, "BF16")), expected) < 1e-3
    # q8_0: as the checkpoint whose matrices have been rounded by gguf
    file = gguf_of(folder, "Q8_0")
    rounded = {tensor.name for tensor in gguf.GGUFReader(file).tensors if tensor.tensor_type.name == "Q8_0"}
    assert len(rounded) > 6
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1 and not re.search(r"(mlp|moe)\.gate\.|shared_expert_gate", key):
                kind = gguf.GGMLQuantizationType.Q8_0
                weight.copy_(
                    torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
                )
        now = model(IDS).logits
    assert apart(now, expected) > 1e-2  # control: rounding does something
    assert apart(from_gguf(name, folder, file), now) < 1e-3


@pytest.mark.parametrize(
    "name, planted",
    [
        ("llama", {"paired": lambda rows, heads: rows}),
        ("gemma3", {"_read": lambda weights, family, parameter, name: iter([weights.read(parameter)])}),
        ("qwen3_moe", {"GATE": 1, "UP": 0}),
    ],
)
def test_a_planted_fault_is_seen(name, planted, tiny, monkeypatch):
    for attribute, fault in planted.items():
        monkeypatch.setattr(ours, attribute, fault)
    folder = tiny(name)
    _, expected = from_checkpoint(name, folder)
    assert apart(from_gguf(name, folder, gguf_of(folder, "BF16")), expected) > 1e-2


def read(file):
    return {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in gguf.GGUFReader(file).tensors
    }


def test_gpt_oss_has_gate_and_up_apart(tiny):
    folder = tiny("gpt_oss")
    theirs, file = load_file(folder / "model.safetensors"), read(gguf_of(folder, "BF16"))
    for layer in range(2):
        own, block = f"model.layers.{layer}", f"blk.{layer}"
        fused, bias = (
            theirs[f"{own}.mlp.experts.gate_up_proj"],
            theirs[f"{own}.mlp.experts.gate_up_proj_bias"],
        )
        pairs = {
            "ffn_gate_exps.weight": fused.mT[:, 0::2],
            "ffn_up_exps.weight": fused.mT[:, 1::2],
            "ffn_gate_exps.bias": bias[:, 0::2],
            "ffn_up_exps.bias": bias[:, 1::2],
            "ffn_down_exps.weight": theirs[f"{own}.mlp.experts.down_proj"].mT,
            "ffn_down_exps.bias": theirs[f"{own}.mlp.experts.down_proj_bias"],
            "ffn_gate_inp.weight": theirs[f"{own}.mlp.router.weight"],
            "ffn_gate_inp.bias": theirs[f"{own}.mlp.router.bias"],
            "attn_sinks.weight": theirs[f"{own}.self_attn.sinks"],
            "attn_q.weight": theirs[f"{own}.self_attn.q_proj.weight"],
            "attn_output.bias": theirs[f"{own}.self_attn.o_proj.bias"],
        }
        for name, expected in pairs.items():
            assert torch.equal(file[f"{block}.{name}"], expected.float()), name


def test_gemma_4_keeps_its_scales_and_the_pairs_that_stand_still(tiny):
    folder = tiny("gemma4-experts")
    theirs, file = load_file(folder / "model.safetensors"), read(gguf_of(folder, "BF16"))
    for name, expected in {
        "blk.0.layer_output_scale.weight": theirs["model.layers.0.layer_scalar"],
        "blk.1.ffn_gate_inp.scale": theirs["model.layers.1.router.scale"],
        "blk.1.ffn_down_exps.scale": theirs["model.layers.1.router.per_expert_scale"],
        "blk.1.ffn_gate_up_exps.weight": theirs["model.layers.1.experts.gate_up_proj"],
        "blk.0.attn_q_norm.weight": theirs["model.layers.0.self_attn.q_norm.weight"],
    }.items():
        assert torch.equal(file[name].flatten(), expected.float().flatten()), name
    assert file["rope_freqs.weight"].tolist() == [1.0] * 4 + [pytest.approx(1e30)] * 12  # a quarter rotates


def test_q8_0_is_gguf_s_own_bit_for_bit(tiny):
    folder = tiny("qwen3_moe")
    weights, family = weights_of(folder)
    file = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_of(folder, "Q8_0")).tensors}
    kinds = set()
    for tensor in planned(weights, family, "Q8_0"):
        whole = torch.cat([part.reshape(-1, tensor.shape[-1]) for part in tensor.parts()]).view(tensor.shape)
        kind = gguf.GGMLQuantizationType[tensor.kind]
        assert file[tensor.name].data.tobytes() == gguf.quants.quantize(whole.numpy(), kind).tobytes()
        kinds.add(tensor.kind)
    assert kinds == {"F32", "Q8_0"}


def test_rows_that_no_block_fits_stay_bf16():
    assert ours.kind_of("blk.0.ffn_up.weight", (64, 48), "Q8_0") == "BF16"
    assert ours.kind_of("blk.0.ffn_up.weight", (64, 64), "Q8_0") == "Q8_0"
    assert ours.kind_of("blk.0.ffn_gate_inp.weight", (8, 64), "Q8_0") == "F32"
    assert ours.kind_of("blk.0.attn_norm.weight", (64,), "BF16") == "F32"
