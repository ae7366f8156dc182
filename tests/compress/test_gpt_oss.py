"""gpt-oss merged: experts in MXFP4 stacked on disk, gate and up row by row in turn, which bf16 has transposed."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from unfreeze.adapters import load_adapter
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import ConfigError
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
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
IDS = torch.randint(0, 88, (40,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """A folder as published: codes of [E, out, in], the rest in bf16."""
    path = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**CONFIG))
    for name, value in model.named_parameters():
        if "bias" in name or "sinks" in name or ".experts." in name:
            torch.nn.init.normal_(value, std=0.2)
    model.save_pretrained(path / "random")
    packed = {}
    for name, tensor in load_file(path / "random/model.safetensors").items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # [E, in, out]
            parts = Mxfp4(BLOCKS).quantize(tensor.transpose(1, 2).contiguous())
            packed |= {f"{name}_{suffix}": part for suffix, part in parts.items()}
        else:
            packed[name] = tensor.bfloat16()
    (path / "packed").mkdir()
    save_file(packed, path / "packed/model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "random/config.json").read_text()) | {"dtype": "bfloat16"}
    (path / "packed/config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    return path / "packed"


@torch.no_grad()
def ours(folder, adapter=None):
    model = open_model(open_checkpoint(folder))
    if adapter is not None:
        load_adapter(model, adapter)
    batch = pack([Example(IDS.tolist(), [0.0] + [1.0] * (len(IDS) - 1))])
    return model.logits(model.hidden(batch))


@torch.no_grad()
def theirs(folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.GptOssForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", **options
        ).float()
    return model.eval()(IDS[None]).logits[0]


def far(left, right) -> float:
    """Of a token the median: where two experts are close, rounding may change the router's choice."""
    return float((left - right).norm(dim=1).median())


@pytest.mark.parametrize("scales", ["refit", "keep"])
def test_in_its_own_format_transformers_reads_what_we_read(scales, release, merging, tmp_path):
    adapter = merging.adapter_for(release, tmp_path / "adapter", size=0.1)
    record = merging.run(release, adapter, tmp_path / "out", "same", scales)
    way = transformers.Mxfp4Config(dequantize=True)
    found = ours(tmp_path / "out")
    torch.testing.assert_close(found, theirs(tmp_path / "out", quantization_config=way), rtol=0, atol=1e-4)
    beside, plain = ours(release, adapter), ours(release)
    assert far(found, beside) < 0.7 * far(plain, beside)  # a grid of 8 steps keeps part of it
    experts = [row for row in record.rows if row.group == "experts"]
    assert len(experts) == 2 * 4 * 2 and all(row.ways[scales].cosine > 0.5 for row in experts)
    assert {row.module for row in experts} >= {"model.layers.1.mlp.experts.gate_up_proj[3]"}


def test_in_bf16_it_is_base_and_adapter_to_transformers_too(release, merging, tmp_path):
    adapter = merging.adapter_for(release, tmp_path / "adapter", size=0.1)
    merging.run(release, adapter, tmp_path / "out", "bf16")
    stacked = open_checkpoint(tmp_path / "out").tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert stacked.shape == (4, 64, 192) and stacked.dtype == "BF16"
    found, beside = ours(tmp_path / "out"), ours(release, adapter)
    torch.testing.assert_close(found, theirs(tmp_path / "out"), rtol=0, atol=1e-4)
    assert far(found, beside) < 0.02 * far(ours(release), beside)


def test_int4_needs_a_matrix_per_expert(release, merging, tmp_path):
    adapter = merging.adapter_for(release, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="INT4 needs a matrix per expert"):
        merging.run(release, adapter, tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()


def test_gpt_oss_becomes_the_layout_it_is_published_in(release, tmp_path):
    """Expanded and quantized again: the published codes and scales, and what transformers reads of them."""
    from tests.compress.quantize.conftest import expanded, run_quantize

    base = expanded(release, tmp_path / "bf16")
    run_quantize(base, tmp_path / "out", "mxfp4")
    before, after = load_file(release / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    way = transformers.Mxfp4Config(dequantize=True)
    found = ours(tmp_path / "out")
    torch.testing.assert_close(found, theirs(tmp_path / "out", quantization_config=way), rtol=0, atol=1e-4)
    with pytest.raises(ConfigError, match="INT4 needs a matrix per expert; gpt_oss has them stacked"):
        run_quantize(base, tmp_path / "int4", "int4")
    run_quantize(base, tmp_path / "nf4", "nf4")  # as unsloth publishes it
    assert (ours(tmp_path / "nf4") - ours(base)).abs().max() > 1e-3
