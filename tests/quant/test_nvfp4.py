"""Claims about NVFP4: equal to compressed-tensors and to modelopt bit for bit, both ways; gate and up of a stack
have their own number."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.quant.compressed_tensors_oracle import bits_of, differences, theirs, weight_of
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Fp8, Packed, not_followed, recognise
from unfreeze.quant.halves import Halves, stacked
from unfreeze.quant.nvfp4 import MODELOPT, PACKED, Nvfp4

ARGUMENTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_numbers_are_compressed_tensors_bit_for_bit(dtype):
    for size in (1.0, 1e-6, 1e6):
        assert (
            differences(Nvfp4(), "nvfp4-pack-quantized", weight_of(24, 64, dtype) * size, **ARGUMENTS) == []
        )
    zeros = torch.zeros(8, 32, dtype=dtype)
    assert differences(Nvfp4(), "nvfp4-pack-quantized", zeros, **ARGUMENTS) == []


def every_code_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """bytes [254, 256] and scales [254, 32]: every pair of codes with every finite scale."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[(scales & 127) != 127].view(torch.float8_e4m3fn)
    return torch.arange(256, dtype=torch.uint8).expand(254, 256).contiguous(), scales[:, None].expand(254, 32)


@pytest.mark.parametrize("whole", [1.0, 2688.0 / 3.7, 1e-30, 3e38])
def test_every_code_and_scale_is_read_as_compressed_tensors_reads_it(whole):
    codes, scales = every_code_and_scale()
    parts = {"weight_packed": codes, "weight_scale": scales.contiguous()}
    parts["weight_global_scale"] = torch.tensor([whole])
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**ARGUMENTS))
    theirs = NVFP4PackedCompressor.decompress(dict(parts), scheme)["weight"]
    assert bits_of(Nvfp4().dequantize(parts)) == bits_of(theirs)


def test_every_code_and_scale_is_read_as_modelopt_reads_it(recorded):
    """Every byte in each row, every finite scale in some group."""
    case, codec = recorded("modelopt", "0.47.0")["nvfp4 any_bits"], Nvfp4(MODELOPT)
    codes, scales = every_code_and_scale()
    assert set(case["weight"].flatten().tolist()) == set(codes.flatten().tolist())
    found = case["weight_scale"].flatten().view(torch.uint8)
    assert set(found.tolist()) == set(scales[:, 0].contiguous().view(torch.uint8).tolist())
    parts = {name: case[name] for name in codec.suffixes}
    assert bits_of(codec.dequantize(parts)) == bits_of(case["expanded"])


def test_control_arm_a_quotient_rounded_to_bf16_is_seen():
    class Narrow(Nvfp4):
        def effective(self, scales, whole):
            return super().effective(scales, whole).bfloat16().float()

    weight = weight_of(24, 64, torch.float32)
    assert "read" in differences(Narrow(), "nvfp4-pack-quantized", weight, **ARGUMENTS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_and_numbers_are_modelopts_bit_for_bit(recorded, dtype):
    case, codec = recorded("modelopt", "0.47.0")[f"nvfp4 {dtype}"], Nvfp4(MODELOPT)
    ours = codec.quantize(case["given"])
    assert {name: bits_of(part) for name, part in ours.items()} == {
        name: bits_of(case[name]) for name in codec.suffixes
    }
    parts = {name: case[name] for name in codec.suffixes}
    assert bits_of(codec.dequantize(parts)) == bits_of(case["expanded"])
    wrong = parts | {"weight_scale_2": parts["weight_scale_2"] * (1 + 2**-23)}
    assert bits_of(codec.dequantize(wrong)) != bits_of(case["expanded"])  # control arm: the next float32


@pytest.mark.parametrize("layout", [PACKED, MODELOPT], ids=lambda layout: layout.name)
def test_gate_and_up_of_a_stack_have_their_own_number(layout):
    codec = Nvfp4(layout)
    weight = weight_of(3 * 40, 64, torch.float32).view(3, 40, 64)
    weight[:, 20:] *= 50
    both = stacked(codec, 40, 64)
    assert isinstance(both, Halves)
    packed = Packed(both, both.quantize(weight))
    assert packed.parts[f"up_{layout.whole}"].shape == (3, *layout.shape)
    assert packed.nbytes == 3 * both.nbytes(40, 64)
    for rows in (slice(0, 20), slice(20, 40)):
        one = codec.dequantize(codec.quantize(weight[2, rows]))
        assert torch.equal(packed[2].dequantize()[rows], one)
    shared = codec.dequantize(codec.quantize(weight[2]))
    assert not torch.equal(shared, packed[2].dequantize())  # control arm: one number for both


def test_a_weight_takes_nine_sixteenths_of_a_byte():
    assert Nvfp4().nbytes(2048, 7168) == 2048 * 7168 * 9 // 16 + 4


KIMI = {
    "config_groups": {"group_0": {"input_activations": {"dynamic": False}, "weights": {"num_bits": 4}}},
    "ignore": ["language_model.lm_head", "language_model.model.layers.0.self_attn*", "mm_projector*"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.41.0"},
    "quant_method": "modelopt",
}
"""Kimi-K2.5-NVFP4's, shortened."""


def test_modelopts_configs_are_read_in_both_spellings():
    scheme = recognise({"text_config": {"quantization_config": KIMI}})
    assert scheme.codecs == (Nvfp4(MODELOPT),)
    assert scheme.codec_for("lm_head") is scheme.codec_for("model.layers.0.self_attn.o_proj") is None
    assert scheme.codec_for("model.layers.1.self_attn.o_proj") == Nvfp4(MODELOPT)
    said = not_followed({"quantization_config": KIMI | {"hello": 1}})
    assert "hello = 1" in said and "a server rounds activations" in said and "a server's cache" in said
    beside = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["model.layers.3.mlp*"]}
    scheme = recognise({"quantization_config": beside})
    assert scheme.codec_for("model.layers.3.mlp.up_proj") is None and scheme.codec_for(
        "model.layers.4.mlp.up_proj"
    )
    for weight_only, activations in (("W4A16_NVFP4", False), ("NVFP4", True)):
        said = not_followed({"quantization_config": beside | {"quant_algo": weight_only}})
        assert ("a server rounds activations" in said) is activations


def test_mixed_precision_has_an_algorithm_for_each_of_its_layers():
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"},
    }
    table = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    scheme = recognise({"quantization_config": table})
    assert scheme.name == "nvfp4, fp8-tensor"
    assert scheme.codec_for("model.layers.0.mlp.experts.3.up_proj") == Nvfp4(MODELOPT)
    assert scheme.codec_for("model.layers.0.self_attn.o_proj").name == "fp8-tensor"
    assert scheme.codec_for("model.layers.0.self_attn.q_proj") is None
    # an FP8 weight and its scale have the names that NVFP4's have too
    files = ["a.weight", "a.weight_scale"]
    assert scheme.stored("a", files).name == "fp8-tensor"
    assert scheme.stored("a", [*files, "a.weight_scale_2"]).name == "nvfp4"


def test_modelopts_layers_in_a_release_in_fp8_are_read_beside_it():
    """As DeepSeek-V4-Flash-NVFP4 has them: the experts anew, the rest as it was."""
    layers = {f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(2)}
    table = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        "quantized_layers": layers,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
        "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head"],
        "kv_cache_quant_algo": None,
        "producer": {"name": "modelopt"},
    }
    scheme = recognise({"quantization_config": table})
    assert scheme.codec_for("layers.1.ffn.experts.3.w1") == Nvfp4(MODELOPT)
    for name in ("layers.1.attn.wq_a", "layers.1.ffn.shared_experts.w1"):
        assert scheme.codec_for(name) == Fp8(scale_dtype="F8_E8M0")
    assert scheme.name == "nvfp4, fp8-block" and not_followed({"quantization_config": table}) == ""
    assert "hello" in not_followed({"quantization_config": table | {"hello": 1}})
    with pytest.raises(ConfigError, match="quant_algo NVFP4"):  # control arm: not as layers beside FP8
        recognise({"quantization_config": table | {"quant_algo": "NVFP4", "config_groups": None}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, 'quant_algo "NVFP4_AWQ"'),
        ({"group_size": 32}, "group_size 32"),
        ({"pre_quant_scale": True}, "pre_quant_scale True"),
        ({"quant_algo": "MIXED_PRECISION"}, "without quantized_layers"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}}, "a is not an object"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W8A16"}}}, '"W8A16"'),
        ({"ignore": "lm_head"}, "ignore is not a list"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as error:
        recognise({"quantization_config": KIMI | change})
    assert named in error.value.message


def test_parts_that_disagree_are_refused():
    codec = Nvfp4()
    parts = codec.quantize(weight_of(16, 64, torch.bfloat16))
    with pytest.raises(CheckpointError, match=r"groups of 16 needs torch.uint8 weight_packed \[16, 32\]"):
        codec.dequantize(parts | {"weight_packed": parts["weight_packed"][:, :24]})
    with pytest.raises(ConfigError, match="groups of 16"):
        codec.parts(4, 40)
    assert (
        theirs("nvfp4-pack-quantized", weight_of(16, 64, torch.float32), **ARGUMENTS)[1].dtype
        == torch.bfloat16
    )
