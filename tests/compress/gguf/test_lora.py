"""An adapter in a GGUF: merged on the way as `unfreeze merge` merges it, or beside the base as GGUF-LoRA."""

import json

import gguf
import numpy as np
import pytest
import torch

from tests.compress.conftest import adapter_for
from tests.compress.gguf.made import byte_level, gguf_of, weights_of
from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.gguf.file import write_gguf
from unfreeze.compress.gguf.lora import planned_lora
from unfreeze.compress.gguf.tensors import planned
from unfreeze.core.errors import ConfigError
from unfreeze.generate.open import open_model


def read(file):
    reader = gguf.GGUFReader(file)
    tensors = {
        tensor.name: torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        for tensor in reader.tensors
    }
    return tensors, {name: field.contents() for name, field in reader.fields.items()}


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_base_and_adapter_in_two_files_are_the_merged_file(name, tiny, tmp_path):
    base = tiny(name)
    adapter = adapter_for(base, tmp_path / "adapter")
    model = open_model(open_checkpoint(base))
    deltas = Deltas(model, adapter)
    weights, family = weights_of(base, deltas)
    assert cli.main(["merge", str(adapter), "--to", "bf16", "--no-check", "--out", str(tmp_path / "m")]) == 0
    merged = read(gguf_of(tmp_path / "m", "BF16"))[0]
    write_gguf(tmp_path / "whole.gguf", family.arch, {}, planned(weights, family, "BF16"))
    whole = read(tmp_path / "whole.gguf")[0]
    assert whole.keys() == merged.keys() and all(torch.equal(whole[key], merged[key]) for key in whole)

    tensors, table = planned_lora(weights, deltas, family)
    write_gguf(tmp_path / "lora.gguf", family.arch, table, tensors)
    lora, fields = read(tmp_path / "lora.gguf")
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    plain = read(gguf_of(base, "BF16"))[0]
    changed = {key.removesuffix(".lora_a") for key in lora if key.endswith(".lora_a")}
    assert len(changed) > 12
    for key in changed:
        A, B = lora[f"{key}.lora_a"], lora[f"{key}.lora_b"]
        rank = B.shape[-1]
        expected = (plain[key] + fields["adapter.lora.alpha"] / rank * (B @ A)).bfloat16().float()
        # the same float32 product in another order: at most a rounding of bf16 apart, in few weights
        apart = (expected - whole[key]).abs() > 0
        assert apart.float().mean() < 0.01 and torch.allclose(expected, whole[key], rtol=2**-7, atol=1e-6), (
            key
        )
        assert (plain[key] - whole[key]).abs().max() > 1e-3


def test_what_gguf_lora_cannot_hold_is_refused(tiny, tmp_path):
    """Gemma 4's gate and up are one tensor there, with a pair of factors each here."""
    base = tiny("gemma4-experts")
    deltas = Deltas(open_model(open_checkpoint(base)), adapter_for(base, tmp_path / "adapter"))
    weights, family = weights_of(base, deltas)
    with pytest.raises(ConfigError, match=r"cannot hold model\.layers\.0\.moe\.experts") as raised:
        planned_lora(weights, deltas, family)
    assert "unfreeze merge" in raised.value.next


def test_the_adapter_s_scale_differs_by_site(tiny, tmp_path):
    """A file has one alpha: with alpha_pattern a site's B carries the rest of its own."""
    base = tiny("llama")
    adapter = adapter_for(base, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "alpha_pattern": {"model.layers.1.mlp.up_proj": 24.0}})
    )
    deltas = Deltas(open_model(open_checkpoint(base)), adapter)
    weights, family = weights_of(base, deltas)
    tensors, table = planned_lora(weights, deltas, family)
    write_gguf(tmp_path / "lora.gguf", family.arch, table, tensors)
    lora, fields = read(tmp_path / "lora.gguf")
    [(A, B, scale)] = deltas.factors("model.layers.1.mlp.up_proj").values()
    assert scale == pytest.approx(24.0 / 4) and fields["adapter.lora.alpha"] == pytest.approx(6.0)
    key = "blk.1.ffn_up.weight"
    ours = fields["adapter.lora.alpha"] / 4 * (lora[f"{key}.lora_b"] @ lora[f"{key}.lora_a"])
    assert torch.allclose(ours, scale * (B.float() @ A.float()), atol=1e-6)


def test_packed_weights_are_expanded(tiny, tmp_path):
    """FP8: the same file as of the checkpoint that `merge --to bf16` would make."""
    from safetensors.torch import load_file, save_file

    from unfreeze.quant import Fp8

    base = tiny("llama-tied")
    tensors, packed, dense = load_file(base / "model.safetensors"), {}, {}
    for key, tensor in tensors.items():
        if not key.endswith("_proj.weight"):
            packed[key] = dense[key] = tensor
            continue
        parts = Fp8((32, 32)).quantize(tensor.float())
        packed |= {key.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
        dense[key] = Fp8((32, 32)).dequantize(parts).bfloat16()
    config = json.loads((base / "config.json").read_text())
    fp8 = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [32, 32],
    }
    for name, own, more in (("fp8", packed, {"quantization_config": fp8}), ("dense", dense, {})):
        byte_level(tmp_path / name)
        save_file(own, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **more}))
    theirs, ours = read(gguf_of(tmp_path / "dense", "BF16"))[0], read(gguf_of(tmp_path / "fp8", "BF16"))[0]
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)
