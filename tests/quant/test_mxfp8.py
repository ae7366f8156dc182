"""Claims about MXFP8: equal to compressed-tensors and to modelopt bit for bit, both ways."""

from __future__ import annotations

import pytest
import torch

from tests.quant.compressed_tensors_oracle import bits_of, differences, weight_of
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Packed, recognise
from unfreeze.quant.halves import stacked
from unfreeze.quant.mxfp8 import Mxfp8

ARGUMENTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": torch.uint8,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_numbers_are_compressed_tensors_bit_for_bit(dtype):
    weight = weight_of(24, 64, torch.float32)
    for size in (1.0, 1e-20, 1e20):
        assert differences(Mxfp8(), "mxfp8-quantized", (weight * size).to(dtype), **ARGUMENTS) == []
    assert differences(Mxfp8(above=True), "mxfp8-quantized", weight, **ARGUMENTS) != []  # control arm


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_and_numbers_are_modelopts_bit_for_bit(recorded, dtype):
    case, codec = recorded("modelopt", "0.47.0")[f"mxfp8 {dtype}"], Mxfp8(above=True)
    ours = codec.quantize(case["given"])
    assert {name: bits_of(part) for name, part in ours.items()} == {
        name: bits_of(case[name]) for name in codec.suffixes
    }
    parts = {name: case[name] for name in codec.suffixes}
    assert torch.equal(codec.dequantize(parts).float(), case["expanded"])
    wrong = parts | {"weight_scale": parts["weight_scale"] + 1}
    assert not torch.equal(codec.dequantize(wrong).float(), case["expanded"])  # control arm


def test_a_group_of_zeros_stays_zero_and_every_code_is_exact_in_bf16():
    codec = Mxfp8()
    assert not codec.dequantize(codec.quantize(torch.zeros(2, 64))).any()
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN
    parts = {"weight": codes.view(1, 256).view(torch.float8_e4m3fn)}
    parts["weight_scale"] = torch.tensor([[0, 60, 100, 127, 130, 200, 240, 246]], dtype=torch.uint8)
    exact = parts["weight"].double() * torch.exp2(parts["weight_scale"].double() - 127).repeat_interleave(32)
    large = exact.abs() >= 2.0**-126
    assert torch.equal(codec.dequantize(parts).double()[large], exact[large])


def test_a_stack_is_read_like_its_matrices():
    codec = stacked(Mxfp8(), 40, 64)
    assert codec == Mxfp8()
    weight = weight_of(120, 64, torch.float32).view(3, 40, 64)
    packed = Packed(codec, codec.quantize(weight))
    assert torch.equal(packed[1].dequantize()[20:], codec.dequantize(codec.quantize(weight[1, 20:])))


def test_configs_name_it():
    weights = {key: value for key, value in ARGUMENTS.items() if key != "scale_dtype"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights | {"scale_dtype": "torch.uint8"}}}
    table = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": groups}
    assert recognise({"quantization_config": table}).codecs == (Mxfp8(),)
    table = {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32}
    assert recognise({"quantization_config": table}).codecs == (Mxfp8(above=True),)
    with pytest.raises(ConfigError, match="group_size 16"):
        recognise({"quantization_config": table | {"group_size": 16}})


def test_parts_that_disagree_are_refused():
    parts = Mxfp8().quantize(torch.ones(4, 64))
    with pytest.raises(CheckpointError, match=r"needs torch.float8_e4m3fn weight \[4, 32\]"):
        Mxfp8().dequantize(parts | {"weight_scale": parts["weight_scale"][:, :1]})
    with pytest.raises(ConfigError, match="groups of 32"):
        Mxfp8().parts(4, 40)
