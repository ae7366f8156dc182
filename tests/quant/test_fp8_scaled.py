"""Claims about FP8 with one scale for a matrix or a row, and compressed-tensors' blocks: equal to the libraries bit
for bit, both ways."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.quant.compressed_tensors_oracle import bits_of, differences, weight_of
from unfreeze.core.errors import CheckpointError
from unfreeze.quant import Fp8, Packed, not_followed, recognise
from unfreeze.quant.codec import Unreadable
from unfreeze.quant.fp8_scaled import COLUMN, MATRIX, ONE, ROWS, Fp8Scaled, read_float
from unfreeze.quant.halves import Halves, stacked

DTYPE = {torch.float32: "F32", torch.bfloat16: "BF16"}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("format", ["float-quantized", "naive-quantized"])
def test_codes_and_numbers_are_compressed_tensors_bit_for_bit(format, dtype):
    weight = weight_of(40, 96, dtype)
    for codec, strategy in (
        (Fp8Scaled(ONE, scale_dtype=DTYPE[dtype]), {"strategy": "tensor"}),
        (Fp8Scaled(COLUMN, scale_dtype=DTYPE[dtype]), {"strategy": "channel"}),
        # cut off below and at the right
        (
            Fp8((32, 64), DTYPE[dtype], scale="weight_scale"),
            {"strategy": "block", "block_structure": [32, 64]},
        ),
    ):
        assert differences(codec, format, weight, **FLOAT, **strategy) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "scales"), [("fp8", MATRIX), ("fp8_rows", ROWS)])
def test_codes_and_numbers_are_modelopts_bit_for_bit(recorded, kind, scales, dtype):
    case = recorded("modelopt", "0.47.0")[f"{kind} {dtype}"]
    codec = Fp8Scaled(scales)
    ours = codec.quantize(case["given"])
    assert bits_of(ours["weight"]) == bits_of(case["weight"])
    assert bits_of(ours["weight_scale"].float()) == bits_of(case["weight_scale"])
    parts = {suffix: case[suffix] for suffix in codec.suffixes}
    assert bits_of(codec.dequantize(parts)) == bits_of(case["expanded"])
    wrong = parts | {"weight_scale": parts["weight_scale"] * (1 + 2**-23)}
    assert bits_of(codec.dequantize(wrong)) != bits_of(case["expanded"])  # control arm: the next float32


@pytest.mark.parametrize("dtype", DTYPE)
def test_every_code_is_read_as_compressed_tensors_reads_it(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].view(torch.float8_e4m3fn).expand(40, 254).contiguous()
    scales = (torch.rand(40, 1, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**FLOAT, strategy="channel"))
    parts = {"weight": codes, "weight_scale": scales}
    theirs = NaiveQuantizationCompressor.decompress(dict(parts), scheme)["weight"]
    assert bits_of(Fp8Scaled(scale_dtype=DTYPE[dtype]).dequantize(parts)) == bits_of(theirs)


def test_one_scale_for_a_matrix_is_one_for_each_of_gate_and_up():
    weight = weight_of(80, 64, torch.float32).view(2, 40, 64)
    both = stacked(Fp8Scaled(ONE), 40, 64)
    assert isinstance(both, Halves) and stacked(Fp8Scaled(COLUMN), 40, 64) == Fp8Scaled(COLUMN)
    packed = Packed(both, both.quantize(weight))
    up = Fp8Scaled(ONE)
    assert torch.equal(packed[1].dequantize()[20:], up.dequantize(up.quantize(weight[1, 20:])))


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "weight_block_size": None,
    "dequantize": False,
    "ignored_layers": ["model.layers.0.mlp.down_proj"],
}


def test_a_method_without_blocks_has_a_scale_for_a_matrix_under_the_name_in_the_files():
    """Mistral's releases write weight_scale_inv and activation_scale, others weight_scale and input_scale."""
    config = {"quantization_config": FP8}
    assert recognise(config).codecs == (Fp8Scaled(MATRIX, "weight_scale_inv"),)
    files = {"a.weight": "F8_E4M3", "a.weight_scale": "BF16", "a.input_scale": "F32"}
    assert recognise(config).as_stored(files).codecs == (Fp8Scaled(MATRIX, "weight_scale", "BF16"),)
    assert recognise(config).codec_for("model.layers.0.mlp.down_proj") is None  # AutoFP8's word
    assert recognise(config).codec_for("model.layers.1.mlp.down_proj") is not None
    assert "activation_scheme static: a server rounds" in not_followed(config)
    assert not_followed({"quantization_config": FP8 | {"activation_scheme": "dynamic"}}) == ""


def test_a_group_names_the_codec_and_its_activations_are_said_once():
    weights = {**FLOAT, "strategy": "channel", "dynamic": False}
    groups = {
        f"group_{i}": {
            "targets": [t],
            "weights": weights,
            "input_activations": {"num_bits": 8, "dynamic": True},
        }
        for i, t in enumerate(("Linear", "re:.*mlp.*"))
    }
    table = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    assert recognise({"quantization_config": table}).codecs == (Fp8Scaled(COLUMN),)
    said = not_followed({"quantization_config": table})
    assert said.count("a server rounds activations") == 1 and "group_0.input_activations" in said


def test_blocks_are_read_in_both_spellings():
    for block in ([128, 128], "128x128"):
        weights = {**FLOAT, "strategy": "block", "block_structure": block}
        assert QuantizationArgs(**weights).block_structure == [128, 128]
        assert read_float("here", weights) == Fp8((128, 128), scale="weight_scale")
    for block in ("128", "128x", "axb", 128):
        with pytest.raises(Unreadable, match="block_structure"):
            read_float("here", {**FLOAT, "strategy": "block", "block_structure": block})


def test_codes_and_scales_that_do_not_belong_together_are_refused():
    codec = Fp8Scaled(COLUMN)
    parts = codec.quantize(weight_of(16, 32, torch.float32))
    with pytest.raises(CheckpointError, match="fp8-channel needs"):
        codec.dequantize(parts | {"weight_scale": parts["weight_scale"][:1]})
    weight = weight_of(16, 32, torch.float32)
    weight[2, 3] = float("inf")
    with pytest.raises(CheckpointError, match="1 of 512 weights"):
        codec.quantize(weight)
