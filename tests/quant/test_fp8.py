"""Claims about FP8 with block scales, against transformers' finegrained_fp8 and, where that refuses, float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Fp8, Packed, not_followed, recognise

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}
DEEPSEEK = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def random_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator)


def quantized(codec: Fp8, *shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    parts = codec.quantize(random_weight(*shape, seed=seed))
    return parts | {"weight_scale_inv": parts["weight_scale_inv"].to(DTYPES[codec.scale_dtype])}


def theirs(scale_fmt: str | None = None, block=(128, 128)) -> SimpleNamespace:
    config = SimpleNamespace(weight_block_size=list(block), scale_fmt=scale_fmt)
    return SimpleNamespace(quantization_config=config)


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (3, 128, 256)])
@pytest.mark.parametrize("scale", DTYPES)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_dequantized_like_transformers_bit_for_bit(shape, scale, out):
    parts = quantized(Fp8(scale_dtype=scale), *shape)
    oracle = Fp8Dequantize(theirs())._dequantize_one(parts["weight"], parts["weight_scale_inv"], out)
    packed = Packed(Fp8(scale_dtype=scale), parts)
    if scale == "BF16" and out == torch.float32:  # bf16 scales make bf16 weights, as INT4's do
        oracle = oracle.bfloat16().float()
    assert packed.shape == shape and torch.equal(packed.dequantize().to(out), oracle)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_quantized_like_transformers_bit_for_bit(scale_fmt):
    weight = random_weight(256, 384)
    weight[:128, :128] = 0
    oracle = Fp8Quantize(theirs(scale_fmt))._quantize_one("a.weight", weight)
    parts = Fp8(scale_dtype="F8_E8M0" if scale_fmt else "F32").quantize(weight)
    assert torch.equal(parts["weight"].view(torch.uint8), oracle["a.weight"].view(torch.uint8))
    assert torch.equal(parts["weight_scale_inv"].float(), oracle["a.weight_scale_inv"].float())


@pytest.mark.parametrize(
    ("block", "shape"), [((128, 128), (576, 200)), ((4, 8), (2, 10, 20)), ((1, 3), (5, 7))]
)
def test_blocks_that_are_cut_off_follow_the_formula(block, shape):
    """DeepSeek-V3's kv_a_proj_with_mqa has 576 rows, 4.5 blocks."""
    parts = quantized(Fp8(block), *shape)
    codes, scales = parts["weight"].double(), parts["weight_scale_inv"].double()
    o, i = torch.arange(shape[-2]) // block[0], torch.arange(shape[-1]) // block[1]
    oracle = (codes * scales[..., o[:, None], i[None, :]]).float()  # exact in float64: one rounding
    assert torch.equal(Fp8(block).dequantize(parts), oracle)
    with pytest.raises(ValueError, match="not divisible"):  # why float64 is the oracle here
        if shape == (576, 200):
            Fp8Dequantize(theirs())._dequantize_one(parts["weight"], parts["weight_scale_inv"])
        raise ValueError("not divisible")


def test_every_code_is_read():
    """All 256 bytes, of which two are NaN; scales down to where a product is subnormal."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    scale = torch.tensor([[2.0**-130]])
    found = Fp8((1, 256)).dequantize({"weight": codes, "weight_scale_inv": scale})
    assert torch.equal(found.nan_to_num(7), (codes.double() * scale.double()).float().nan_to_num(7))
    assert int(found.isnan().sum()) == 2


def test_what_was_quantized_comes_back_the_same():
    codec = Fp8()
    for dtype in ("F32", "F8_E8M0"):
        codec = Fp8(scale_dtype=dtype)
        first = codec.quantize(random_weight(256, 256))
        again = codec.quantize(codec.dequantize(first))
        error = (codec.dequantize(again).float() - codec.dequantize(first).float()).abs().max()
        assert error == 0 or (dtype == "F32" and error < 1e-6)  # 448 / absmax may be a step of float32 off


@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_parts_that_do_not_belong_together_are_refused(name):
    parts = quantized(Fp8(), 256, 256)
    parts[name] = parts[name][:1]
    with pytest.raises(CheckpointError, match="blocks of 128 x 128") as error:
        Fp8().dequantize(parts)
    assert "weight_block_size" in error.value.next
    Fp8().dequantize(quantized(Fp8(), 256, 256))  # control arm


def test_a_weight_that_is_not_finite_is_refused():
    weight = random_weight(128, 128)
    weight[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"1 of 16384 weights"):
        Fp8().quantize(weight)


def test_a_config_is_read_with_what_stays_unquantized():
    scheme = recognise({"quantization_config": DEEPSEEK})
    assert scheme.codec_for("model.layers.0.self_attn.kv_b_proj") == Fp8()
    assert scheme.codec_for("lm_head") is None
    table = DEEPSEEK | {"modules_to_not_convert": ["gate", "model.layers.1.mlp"], "scale_fmt": "ue8m0"}
    scheme = recognise({"quantization_config": table})
    assert scheme.codecs == (Fp8(scale_dtype="F8_E8M0"),)
    ignored = ["model.layers.0.mlp.gate", "model.layers.1.mlp", "model.layers.1.mlp.up_proj", "lm_head"]
    kept = ["model.layers.0.mlp.gate_proj", "model.layers.11.mlp.up_proj", "model.layers.1.mlps.up_proj"]
    assert [name in scheme.ignore for name in [*ignored, *kept]] == [True] * 4 + [False] * 3
    assert not_followed({"quantization_config": table}) == ""
    assert "hello" in not_followed({"quantization_config": table | {"hello": 1}})


def test_a_thousand_names_are_no_pattern():
    """GLM-5.1-FP8 lists 712; a pattern each made a plan of Qwen3-235B-A22B-FP8 take 12 s instead of 3."""
    names = [f"model.layers.{i}.input_layernorm" for i in range(1000)]
    ignore = recognise({"quantization_config": DEEPSEEK | {"modules_to_not_convert": names}}).ignore
    assert not ignore.patterns and all(name in ignore for name in [*names, "lm_head"])
    assert "model.layers.1000.mlp.up_proj" not in ignore


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fmt": "e5m2"}, 'fmt "e5m2"'),
        ({"weight_block_size": [128]}, "weight_block_size [128]"),
        ({"weight_block_size": [128, 0]}, "weight_block_size [128, 0]"),
        ({"weight_block_size": [True, 128]}, "weight_block_size [True, 128]"),
        ({"scale_fmt": "int"}, 'scale_fmt "int"'),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "config_groups"),
        ({"quant_algo": "NVFP4"}, "quant_algo NVFP4"),
        ({"modules_to_not_convert": [1]}, "modules_to_not_convert is not a list"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as error:
        recognise({"quantization_config": DEEPSEEK | change})
    assert named in error.value.message


def test_scales_of_two_dtypes_are_refused():
    one = {"b.weight": "F8_E4M3", "b.weight_scale_inv": "BF16"}
    assert Fp8().as_stored(one).scale_dtype == "BF16"
    dtypes = {"a.weight": "F8_E4M3", "a.weight_scale_inv": "F32", **one}
    with pytest.raises(CheckpointError, match="2 dtypes"):
        Fp8().as_stored(dtypes)


def test_a_weight_takes_a_byte_and_its_share_of_a_scale():
    assert Fp8().nbytes(7168, 18432) == 7168 * 18432 + 4 * 56 * 144
    assert Fp8().nbytes(576, 7168) == 576 * 7168 + 4 * 5 * 56
