"""Claims about integer codes of compressed-tensors: zero points, one scale for a row or matrix, other bit widths,
int8 weights, act-order. Equal to the library bit for bit, both ways."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor, pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from tests.quant.compressed_tensors_oracle import bits_of, differences, theirs, weight_of
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Int4, Packed, recognise
from unfreeze.quant.halves import Halves, stacked
from unfreeze.quant.integers import MATRIX, ROW, Integers, pack, unpack

STRATEGY = {ROW: {"strategy": "channel"}, MATRIX: {"strategy": "tensor"}}
DTYPE = {torch.float32: "F32", torch.bfloat16: "BF16"}


def strategy(group: int) -> dict[str, object]:
    return STRATEGY.get(group, {"strategy": "group", "group_size": group})


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("group", [32, 128, ROW, MATRIX])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_codes_are_compressed_tensors_bit_for_bit(bits, group, dtype):
    """40 rows: their zero points fill no whole words at 2 bits."""
    for zeros in (False, True)[: 1 if group == MATRIX else 2]:
        codec = Integers(bits, group, zeros=zeros, scale_dtype=DTYPE[dtype])
        given = {"num_bits": bits, "type": "int", "symmetric": not zeros, **strategy(group)}
        assert differences(codec, "pack-quantized", weight_of(40, 128, dtype), **given) == []


@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("group", [32, ROW, MATRIX])
@pytest.mark.parametrize("format", ["int-quantized", "naive-quantized"])
def test_int8_weights_are_compressed_tensors_bit_for_bit(format, group, dtype):
    for zeros in (False, True):
        codec = Integers(8, group, zeros=zeros, packed=False, scale_dtype=DTYPE[dtype])
        given = {"num_bits": 8, "type": "int", "symmetric": not zeros, **strategy(group)}
        assert differences(codec, format, weight_of(24, 64, dtype), **given) == []


def test_control_arm_another_zero_point_or_order_of_words_is_seen():
    weight = weight_of(24, 64, torch.bfloat16)
    given = {"num_bits": 4, "type": "int", "symmetric": False, **strategy(32)}
    assert differences(Integers(4, 32, zeros=True), "pack-quantized", weight, **given) == []

    class Swapped(Integers):
        def _zeros(self, parts, out_features):
            return super()._zeros(parts, out_features).flip(-1)

    assert differences(Swapped(4, 32, zeros=True), "pack-quantized", weight, **given) == ["read"]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_are_compressed_tensors_words(bits):
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, 37), dtype=torch.int8)
    assert torch.equal(pack(codes, bits), pack_to_int32(codes, bits))
    assert torch.equal(unpack(pack(codes, bits), bits, 37), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_words_of_any_bits_are_read_as_compressed_tensors_reads_them(bits):
    generator = torch.Generator().manual_seed(bits)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    parts = {
        "weight_packed": words(24, 128 * bits // 32),
        "weight_scale": torch.randn(24, 4, generator=generator).bfloat16(),
        "weight_zero_point": words(-(-24 * bits // 32), 4),
    }
    args = QuantizationArgs(num_bits=bits, symmetric=False, strategy="group", group_size=32)
    shape = {"weight_shape": torch.tensor((24, 128))}
    theirs = PackedQuantizationCompressor.decompress(
        parts | shape, QuantizationScheme(targets=["Linear"], weights=args)
    )
    assert bits_of(Integers(bits, 32, zeros=True).dequantize(parts)) == bits_of(theirs["weight"])


@pytest.mark.parametrize("name", ["bits_4 symmetric", "bits_4 zeros", "bits_8 zeros"])
def test_act_order_is_read_as_compressed_tensors_read_it(recorded, name):
    """0.12.2 knew weight_g_idx; 0.20 writes none."""
    case = recorded("act_order", "0.12.2")[name]
    codec = Integers(int(name[5]), 16, zeros="zeros" in name, permuted=True)
    parts = {suffix: case[suffix] for suffix in codec.suffixes if suffix != "weight_shape"}
    assert codec.disk_extras(12, 64) == {"weight_shape": tuple(case["weight_shape"].tolist())}
    assert {suffix: tuple(part.shape) for suffix, part in parts.items()} == {
        suffix: shape for suffix, (_, shape) in codec.parts(12, 64).items()
    }
    assert torch.equal(codec.dequantize(parts), case["expanded"])
    in_order = parts | {"weight_g_idx": torch.arange(64, dtype=torch.int32) // 16}
    assert not torch.equal(codec.dequantize(in_order), case["expanded"])  # control arm
    plain = Integers(codec.bits, 16, zeros=codec.zeros)
    made = codec.quantize(case["expanded"])
    assert torch.equal(codec.dequantize(made), plain.dequantize({k: made[k] for k in plain.suffixes[:-1]}))


@pytest.mark.parametrize(
    "codec", [Integers(4, 32, zeros=True), Integers(4, 32, permuted=True), Integers(8, MATRIX)]
)
def test_gate_and_up_of_a_stack_keep_what_is_their_own(codec):
    """Zero points of 20 rows fill two words and a half; orders and a matrix's scale are one for each."""
    weight = weight_of(2 * 3 * 20, 64, torch.bfloat16).view(3, 40, 64)
    both = stacked(codec, 40, 64)
    assert isinstance(both, Halves)
    packed = Packed(both, both.quantize(weight))
    for expert in range(3):
        for half, rows in enumerate((slice(0, 20), slice(20, 40))):
            one = codec.dequantize(codec.quantize(weight[expert, rows]))
            assert torch.equal(packed[expert].dequantize()[rows], one), (expert, half)


def table(**weights: object) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {"quantization_config": {"format": "pack-quantized", "config_groups": {"group_0": group}}}


@pytest.mark.parametrize(
    ("weights", "codec"),
    [
        ({"strategy": "group", "group_size": 32}, Int4(32)),
        ({"strategy": "group", "group_size": 32, "actorder": "weight"}, Int4(32)),
        ({"strategy": "group", "group_size": 32, "symmetric": False}, Integers(4, 32, zeros=True)),
        ({"strategy": "group", "group_size": 32, "actorder": "group"}, Integers(4, 32, permuted=True)),
        ({"strategy": "channel"}, Integers(4, ROW)),
        ({"strategy": "group", "group_size": 128, "num_bits": 8}, Integers(8, 128)),
    ],
)
def test_a_config_names_the_codec(weights, codec):
    assert recognise(table(**weights)).codecs == (codec,)


def test_scales_take_the_dtype_of_the_files():
    names = {"a.weight_packed": "I32", "a.weight_scale": "F16", "b.weight_scale": "F32"}
    assert Integers(8, 32).as_stored(names).scale_dtype == "F16"
    with pytest.raises(CheckpointError, match="2 dtypes"):
        Integers(8, 32).as_stored(names | {"b.weight_packed": "I32"})


def test_parts_that_disagree_are_refused():
    codec = Integers(4, 32, zeros=True)
    parts = codec.quantize(weight_of(16, 64, torch.bfloat16))
    with pytest.raises(CheckpointError, match="weight_zero_point"):
        codec.dequantize(parts | {"weight_zero_point": parts["weight_zero_point"][:1]})
    with pytest.raises(ConfigError, match="groups of 32"):
        codec.parts(4, 40)
    with pytest.raises(ConfigError, match="not fill whole 32-bit words"):
        Integers(4, ROW).parts(4, 30)
    assert theirs("pack-quantized", weight_of(16, 64, torch.bfloat16), num_bits=4, strategy="channel")
