"""Scales of packed weights are held and used in the dtype of the file: logits, gradients of adapters, bytes
and round trip."""

import json

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

import unfreeze
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.checkpoint.save import disk_tensors
from unfreeze.core.errors import CheckpointError
from unfreeze.generate.open import open_model
from unfreeze.models import meta_model, rules, shape
from unfreeze.parallel.plan import measure_sizes

GROUP = 16
SCHEME = QuantizationScheme(
    targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP)
)
TOKENS = [5, 17, 3, 42, 9, 8, 11, 60]
COMMON = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
    },
}


def written(folder, family: str, dtype: torch.dtype, mixed: bool = False):
    """A checkpoint whose projections compressed-tensors packed with scales of `dtype`, and transformers'
    logits over its own expansion."""
    torch.manual_seed(0)
    settings = COMMON | (MOE if family == "Qwen3Moe" else {})
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**settings)
    ).eval()
    model.save_pretrained(folder, save_original_format=True)
    file = folder / "model.safetensors"
    tensors, dense = {}, {}
    for name, tensor in load_file(file).items():
        base = name.removesuffix(".weight")
        if not base.endswith("_proj") or base.endswith(("q_proj", "k_proj")):
            tensors[name] = dense[name] = tensor
            continue
        scale = (tensor.unflatten(-1, (-1, GROUP)).abs().amax(-1) / 7.3).to(
            torch.float32 if mixed and "up_proj" in name else dtype
        )
        packed = PackedQuantizationCompressor.compress({"weight": tensor, "weight_scale": scale}, SCHEME)
        tensors |= {
            f"{base}.{part}": value.contiguous() for part, value in packed.items() if "zero" not in part
        }
        dense[name] = PackedQuantizationCompressor.decompress(packed, SCHEME)["weight"].float()
    save_file(dense, file, metadata={"format": "pt"})
    expected = (
        type(model)
        .from_pretrained(folder, dtype=torch.float32)
        .eval()(torch.tensor([TOKENS]))
        .logits[0]
        .detach()
    )
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}))
    return expected


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_those_of_the_scales_in_their_own_dtype(tmp_path, family, dtype):
    expected = written(tmp_path, family, dtype)
    actual = unfreeze.load(tmp_path, dtype="float32").logits([TOKENS])[0]
    assert float((actual - expected).abs().max()) <= 1e-5
    model = open_model(open_checkpoint(tmp_path), torch.float32)
    scales = [buffer for name, buffer in model.named_buffers() if name.endswith("weight_scale")]
    assert scales and {scale.dtype for scale in scales} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_control_a_scale_rounded_to_bf16_is_seen(tmp_path, dtype):
    expected = written(tmp_path, "Qwen3Moe", dtype)
    model = unfreeze.load(tmp_path, dtype="float32")
    for name, buffer in model.decoder.named_buffers():
        if name.endswith("weight_scale"):
            buffer.copy_(buffer.bfloat16())
    assert float((model.logits([TOKENS])[0] - expected).abs().max()) > 1e-3


def test_nothing_is_rounded_the_plan_counts_the_bytes_and_saving_gives_them_back(tmp_path):
    written(tmp_path / "m", "Qwen3Moe", torch.float32)
    manifest, stats = open_checkpoint(tmp_path / "m"), []
    model = open_model(manifest, torch.float32, loaded=stats.append)
    assert stats[0].rounded == 0
    scale_bytes = sum(info.nbytes for name, info in manifest.tensors.items() if name.endswith("weight_scale"))
    held = sum(b.nbytes for name, b in model.named_buffers() if name.endswith("weight_scale"))
    assert held == scale_bytes
    meta = measure_sizes(meta_model(shape(manifest.config), manifest, torch.float32), None)
    assert meta.base == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    saved = tmp_path / "saved"
    save_checkpoint(
        saved,
        manifest.config,
        disk_tensors(model.state_dict().items(), rules(model.shape), manifest.scheme().codec_for),
    )
    before, after = load_file(tmp_path / "m" / "model.safetensors"), load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name].to(tensor.dtype)), name


def test_scales_of_two_dtypes_in_one_checkpoint_are_refused(tmp_path):
    written(tmp_path, "Qwen3Moe", torch.float16, mixed=True)
    with pytest.raises(
        CheckpointError,
        match=r"scales of packed weights have 2 dtypes: .* is F16, .* is F32|is F32, .* is F16",
    ):
        unfreeze.load(tmp_path, dtype="float32")
