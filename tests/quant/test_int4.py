"""Claims about INT4 pack-quantized, against compressed-tensors itself (the program that wrote the
releases)."""

from __future__ import annotations

import time

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import (
    PackedQuantizationCompressor,
    pack_to_int32,
    unpack_from_int32,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st

from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Int4, Packed
from unfreeze.quant.int4 import MAX_SCALE, pack_int4, unpack_int4

# (group, in): groups that are and are not multiples of a word, rows whose last int32 is not full.
SHAPES = [(32, 128), (128, 256), (8, 64), (16, 48), (4, 12), (3, 21), (1, 5), (64, 64)]


def scheme(group: int) -> QuantizationScheme:
    return QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=group)
    )


def random_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator)
    return (rows * torch.rand(*shape[:-1], 1, generator=generator)).bfloat16()


def every_scale() -> torch.Tensor:
    """All bf16 numbers from 0 (subnormals included) to the largest whose 7-fold is finite: 32,274 of them."""
    scale = torch.arange(0, 2**15, dtype=torch.int16).view(torch.bfloat16)
    return scale[scale.isfinite() & (scale.double() <= MAX_SCALE)]


@pytest.mark.parametrize(("group", "columns"), SHAPES)
def test_pack_and_unpack_equal_compressed_tensors(group: int, columns: int) -> None:
    codes = torch.randint(
        -8, 8, (6, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(columns)
    )
    packed = pack_int4(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(unpack_int4(packed, columns), unpack_from_int32(packed, 4, codes.shape))
    assert torch.equal(unpack_int4(packed, columns), codes)


def test_nibbles_are_offset_binary_lowest_first() -> None:
    """Codes -8..-1 pack to 0x76543210. Control: two's complement would give 0xfedcba98."""
    codes = torch.arange(-8, 0, dtype=torch.int8)[None]
    assert pack_int4(codes).item() == 0x76543210
    twos_complement = sum((int(code) & 0xF) << (4 * i) for i, code in enumerate(codes[0]))
    assert twos_complement == 0xFEDCBA98


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "columns"), SHAPES)
def test_dequantize_equals_compressed_tensors_bit_for_bit(
    group: int, columns: int, scale_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(group)
    parts = {
        "weight_packed": pack_int4(
            torch.randint(-8, 8, (10, columns), dtype=torch.int8, generator=generator)
        ),
        "weight_scale": torch.rand(10, columns // group, generator=generator).to(scale_dtype),
    }
    state = {**parts, "weight_shape": torch.tensor([10, columns])}
    expected = PackedQuantizationCompressor.decompress(state, scheme(group))["weight"]
    assert torch.equal(Int4(group).dequantize(parts), expected)
    exact = unpack_int4(parts["weight_packed"], columns).double() * parts[
        "weight_scale"
    ].double().repeat_interleave(group, 1)
    assert torch.equal(expected, exact.to(scale_dtype))  # one rounding of the exact product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("group", "columns"), SHAPES)
def test_quantize_equals_compressed_tensors_at_kimis_scale(
    group: int, columns: int, dtype: torch.dtype
) -> None:
    weight = random_weight(12, columns, seed=group).to(dtype)
    parts = Int4(group).quantize(weight)
    scale = (weight.unflatten(-1, (-1, group)).abs().amax(-1).float() / 7).bfloat16()
    assert torch.equal(parts["weight_scale"], scale)
    theirs = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme(group))
    assert torch.equal(parts["weight_packed"], theirs["weight_packed"])
    assert list(Int4(group).disk_extras(12, columns)["weight_shape"]) == theirs["weight_shape"].tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    group=st.sampled_from([4, 8, 32, 128]),
    exponent=st.integers(-125, 120),
    dtype=st.sampled_from(["bf16", "f32"]),
)
def test_dequantize_then_quantize_is_the_identity(seed: int, group: int, exponent: int, dtype: str) -> None:
    """From weights of any size, tiny and huge, in bf16 or float32, with a zero group among them.

    Weights and codes come back to the bit. So does the scale, unless a group's codes are 0 and ±7 only: then
    two neighbouring scales can give the same weights, 7 s being rounded to the same bf16.
    """
    weight = torch.randn(8, 4 * group, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[0, :group] = 0
    weight = weight.bfloat16() if dtype == "bf16" else weight
    codec = Int4(group)
    once = codec.quantize(weight)
    expanded = codec.dequantize(once)
    twice = codec.quantize(expanded)
    assert torch.equal(once["weight_packed"], twice["weight_packed"])
    assert torch.equal(codec.dequantize(twice), expanded)
    codes = unpack_int4(once["weight_packed"], 4 * group).unflatten(1, (-1, group))
    told = ((codes != 0) & (codes.abs() != 7)).any(-1) | (codes == 0).all(-1)
    assert torch.equal(once["weight_scale"][told], twice["weight_scale"][told])
    assert bool((expanded[0, :group] == 0).all())


def test_identity_holds_for_every_bf16_scale() -> None:
    """Exhaustive over scales. Control: plain absmax / 7 without `_exact_neighbour` fails, and only where 7 m
    is half-way."""
    scale = every_scale()
    assert scale.numel() == 32_274
    codes = torch.randint(
        -7, 8, (scale.numel(), 32), dtype=torch.int8, generator=torch.Generator().manual_seed(1)
    )
    codes[:, 0] = 7
    codes[:, 1] = -1
    codes[scale == 0] = 0
    parts = {"weight_packed": pack_int4(codes), "weight_scale": scale[:, None].clone()}
    weight = Int4(32).dequantize(parts)
    assert bool(weight.isfinite().all())
    again = Int4(32).quantize(weight)
    assert torch.equal(again["weight_scale"], parts["weight_scale"])
    assert torch.equal(again["weight_packed"], parts["weight_packed"])

    plain = (weight.abs().amax(-1).float() / 7).bfloat16()
    lost = plain != scale
    mantissa = (scale.view(torch.int16) & 0x7F) + 128
    normal = scale.double() >= 2.0**-126
    assert 0 < int(lost.sum()) < scale.numel() // 8
    assert bool((mantissa[lost & normal] % 8 == 4).all()) and bool((mantissa[lost & normal] >= 148).all())


def test_identity_holds_for_groups_of_every_absmax() -> None:
    """Every bf16 absmax there is, the other weights of the group at random below it. Control: among normal
    numbers plain absmax / 7 is
    already a fixed point (a release needs no correction), among subnormal ones it is not."""
    absmax = torch.arange(0, 2**15, dtype=torch.int16).view(torch.bfloat16)
    absmax = absmax[absmax.isfinite()]
    weight = (torch.rand(absmax.numel(), 16, generator=torch.Generator().manual_seed(2)) * 2 - 1) * absmax[
        :, None
    ].float()
    weight[:, 3] = absmax.float()
    codec = Int4(16)
    once = codec.quantize(weight.bfloat16())
    expanded = codec.dequantize(once)
    assert bool(expanded.isfinite().all())
    twice = codec.quantize(expanded)
    assert torch.equal(once["weight_scale"], twice["weight_scale"])
    assert torch.equal(once["weight_packed"], twice["weight_packed"])
    plain = (expanded.abs().amax(-1).float() / 7).bfloat16()
    lost = plain != once["weight_scale"][:, 0]
    assert 0 < int(lost.sum()) < 10 and bool((absmax[lost].double() < 2.0**-126).all())


def test_requantizing_with_another_grid_loses_the_property() -> None:
    """Control for the two above: absmax / 7.5 with codes to -8 (other quantizers) does not return the release
    it was given."""
    codec = Int4(32)
    once = codec.quantize(random_weight(16, 128))
    weight = codec.dequantize(once)
    scale = (weight.unflatten(-1, (-1, 32)).abs().amax(-1).float() / 7.5).bfloat16()
    assert not torch.equal(scale, once["weight_scale"])


def test_leading_dims_and_indexing() -> None:
    weight = random_weight(3, 16, 64)
    codec = Int4(32)
    packed = Packed(codec, codec.quantize(weight))
    assert packed.shape == (3, 16, 64)
    assert packed.nbytes == 3 * codec.nbytes(16, 64) == 3 * (16 * 32 + 16 * 2 * 2)
    assert torch.equal(packed[1].dequantize(), packed.dequantize()[1])
    # a view
    assert packed[1].parts["weight_packed"].data_ptr() == packed.parts["weight_packed"][1].data_ptr()
    for suffix, (dtype, shape) in codec.parts(16, 64).items():
        part = packed[0].parts[suffix]
        assert (part.dtype, tuple(part.shape)) == (TORCH_DTYPE[dtype], shape)


def test_quantize_handles_millions_of_weights_a_second() -> None:
    weight = random_weight(1024, 1024)
    started = time.perf_counter()
    Int4(32).quantize(weight)
    # 0.02 s measured; the limit is loose because machines are shared
    assert time.perf_counter() - started < 2.0


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = random_weight(4, 32)
    weight[2, 3] = float("nan")
    with pytest.raises(CheckpointError, match="1 of 128 weights are NaN"):
        Int4(32).quantize(weight)


def test_the_largest_bf16_weights_stay_finite() -> None:
    weight = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    codec = Int4(32)
    once = codec.quantize(weight)
    assert bool(codec.dequantize(once).isfinite().all())
    plain = (weight[0, :1].float() / 7).bfloat16()
    assert not bool((plain * 7).isfinite())  # control: without the clamp the weight would become infinite


def test_parts_that_disagree_are_refused() -> None:
    codec = Int4(32)
    parts = codec.quantize(random_weight(4, 64))
    with pytest.raises(CheckpointError, match="group 16"):
        Int4(16).dequantize(parts)
    with pytest.raises(ConfigError, match="groups of 32"):
        codec.parts(4, 40)
