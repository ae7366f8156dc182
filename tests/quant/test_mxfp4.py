"""Claims about MXFP4, against transformers' conversion of gpt-oss and compressed-tensors' compressor."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Packed
from unfreeze.quant.codec import Unreadable
from unfreeze.quant.mxfp4 import (
    BLOCKS,
    FORMAT,
    PACKED,
    Mxfp4,
    pack_e2m1,
    read_blocks,
    read_packed,
    round_to_e2m1,
    unpack_e2m1,
)

SCHEME: QuantizationScheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "group",
    "group_size": 32,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}


def random_parts(*shape: int, low: int = 0, high: int = 256, seed: int = 0) -> dict[str, torch.Tensor]:
    """Any codes, scales low..high - 1, as compressed-tensors names them. shape [..., out, in]."""
    generator = torch.Generator().manual_seed(seed)
    *rows, columns = shape
    return {
        "weight_packed": torch.randint(0, 256, (*rows, columns // 2), generator=generator).byte(),
        "weight_scale": torch.randint(low, high, (*rows, columns // 32), generator=generator).byte(),
    }


def as_blocks(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"blocks": parts["weight_packed"].unflatten(-1, (-1, 16)), "scales": parts["weight_scale"]}


def same(found: torch.Tensor, oracle: torch.Tensor) -> bool:
    """Bit for bit, signs of zeros included; any NaN is a NaN."""
    number = ~oracle.isnan()
    return torch.equal(found.isnan(), oracle.isnan()) and torch.equal(
        found.view(torch.int16)[number], oracle.view(torch.int16)[number]
    )


def theirs_quantized(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), SCHEME.weights)
    return MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)


def test_every_byte_with_every_scale_equals_both_libraries():
    """16 columns of all 256 bytes (each code, in both halves) in each of 256 scales, 0 and 255 among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1).flatten(1)
    parts = {"weight_packed": codes, "weight_scale": torch.arange(256).byte()[:, None].repeat(1, 16)}
    found = Mxfp4(PACKED).dequantize(parts)
    assert found.dtype == torch.bfloat16 and found.shape == (256, 512)
    blocks = as_blocks({name: part[None] for name, part in parts.items()})
    theirs = convert_moe_packed_tensors(**blocks)[0].t()
    assert same(found[:255], theirs[:255].contiguous())
    assert not found[255].isfinite().any() and theirs[255].isfinite().any()  # a NaN to the specification
    assert same(found, MXFP4PackedCompressor.decompress(dict(parts), SCHEME)["weight"])


@pytest.mark.parametrize("shape", [(5, 32), (3, 4, 96)])
def test_the_two_layouts_are_one_format(shape):
    parts = random_parts(*shape)
    packed, blocks = Packed(Mxfp4(PACKED), parts), Packed(Mxfp4(BLOCKS), as_blocks(parts))
    assert packed.shape == blocks.shape == shape and same(packed.dequantize(), blocks.dequantize())
    for one in (packed, blocks):
        made = {name: ("U8", tuple(part.shape[len(shape) - 2 :])) for name, part in one.parts.items()}
        assert made == one.codec.parts(*shape[-2:])
        assert one.codec.nbytes(*shape[-2:]) * (shape[0] if len(shape) > 2 else 1) == one.nbytes


def test_a_stack_of_experts_is_read_like_gpt_oss_with_rows_interleaved_as_published():
    parts = random_parts(4, 24, 64, high=250)
    oracle = convert_moe_packed_tensors(**as_blocks(parts))  # [E, in, out], as its forward takes it
    found = Packed(Mxfp4(BLOCKS), as_blocks(parts))
    assert same(found.dequantize().transpose(1, 2).contiguous(), oracle)
    assert same(found[2].dequantize(), found.dequantize()[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_like_compressed_tensors_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 512, generator=generator) * torch.logspace(-30, 30, 64)[:, None]
    weight[3, 32:64] = 0
    weight = weight.to(dtype)
    oracle, found = theirs_quantized(weight), Mxfp4(PACKED).quantize(weight)
    assert torch.equal(found["weight_scale"], oracle["weight_scale"])
    assert torch.equal(found["weight_packed"], oracle["weight_packed"])
    blocks = Mxfp4(BLOCKS).quantize(weight)
    assert torch.equal(blocks["blocks"].flatten(-2), found["weight_packed"])


def test_half_way_goes_to_the_even_code_like_compressed_tensors():
    """Each value between two codes, half-way, and a step of float32 to both sides; the group's largest is 6."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    steps = [torch.nextafter(middle, middle + side) for side in (-1, 1)]
    row = torch.cat([middle, *steps, torch.tensor([6.0]), torch.zeros(10)])
    weight = torch.stack((row, -row))
    weight[1, -10:] = 0  # -0.0 itself loses its sign there and keeps it here
    found = Mxfp4(PACKED).quantize(weight)
    assert torch.equal(found["weight_packed"], theirs_quantized(weight)["weight_packed"])
    read = Mxfp4(PACKED).dequantize(found).float()
    assert read[0, :7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    truncated = unpack_e2m1(pack_e2m1(round_to_e2m1(weight * 0.999))).float()  # control arm: not to even
    assert truncated[0, :7].tolist() != read[0, :7].tolist()


def test_every_float32_exponent_gets_compressed_tensors_scale():
    """absmax of 1, of just under and just at 1.75, at each exponent; from subnormal numbers to the last one
    whose scale they find."""
    exponents = torch.arange(-149, 127, dtype=torch.float64).exp2()
    mantissas = torch.tensor([1.0, 1.7499999, 1.75, 1.9999999], dtype=torch.float64)
    largest = (exponents[:, None] * mantissas).float().flatten()
    weight = torch.zeros(len(largest), 32)
    weight[:, 7] = largest
    assert torch.equal(Mxfp4().quantize(weight)["weight_scale"], theirs_quantized(weight)["weight_scale"])
    huge = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert int(theirs_quantized(huge)["weight_scale"]) == 127  # that of numbers around 1
    assert Mxfp4().dequantize(Mxfp4().quantize(huge)).unique().tolist() == [6 * 2.0**125]


def test_what_was_quantized_comes_back_the_same_numbers():
    parts = random_parts(64, 256, high=250)
    first = Mxfp4().dequantize(parts)
    assert torch.equal(Mxfp4().dequantize(Mxfp4().quantize(first)), first)
    again = Mxfp4().quantize(Mxfp4().dequantize(Mxfp4().quantize(first)))
    once = Mxfp4().quantize(first)
    assert all(torch.equal(again[name], part) for name, part in once.items())


def test_another_order_of_halves_is_not_equal():
    """Control arm: the two numbers of a byte the other way round."""
    parts = random_parts(8, 64, high=250)
    swapped = parts | {"weight_packed": (parts["weight_packed"] << 4) | (parts["weight_packed"] >> 4)}
    oracle = MXFP4PackedCompressor.decompress(dict(parts), SCHEME)["weight"]
    assert not same(Mxfp4().dequantize(swapped), oracle)


def test_scales_of_torchs_own_e8m0_are_the_same_bytes():
    parts = random_parts(8, 64, high=250)
    typed = parts | {"weight_scale": parts["weight_scale"].view(torch.float8_e8m0fnu)}
    codec = Mxfp4().as_stored(
        {"a.weight_packed": "U8", "a.weight_scale": "F8_E8M0", "b.weight_scale": "BF16"}
    )
    assert codec.scale_dtype == "F8_E8M0" and same(codec.dequantize(typed), Mxfp4().dequantize(parts))
    assert codec.quantize(torch.ones(2, 32))["weight_scale"].dtype == torch.float8_e8m0fnu
    two = {
        "a.weight_packed": "U8",
        "a.weight_scale": "F8_E8M0",
        "b.weight_packed": "U8",
        "b.weight_scale": "U8",
    }
    with pytest.raises(CheckpointError, match="2 dtypes"):
        Mxfp4().as_stored(two)
    gpt_oss = {"e.gate_up_proj_blocks": "U8", "e.gate_up_proj_scales": "U8"}
    assert Mxfp4(BLOCKS).as_stored(gpt_oss) == Mxfp4(BLOCKS)


def test_what_does_not_belong_together_is_refused():
    parts = random_parts(8, 64)
    for wrong in (
        {"weight_packed": parts["weight_packed"][:, :-1]},
        {"weight_packed": parts["weight_packed"].to(torch.int32)},
        {"weight_scale": parts["weight_scale"][:, :1]},
    ):
        with pytest.raises(CheckpointError, match=r"in groups of 32 needs torch\.uint8"):
            Mxfp4().dequantize(parts | wrong)
    with pytest.raises(CheckpointError, match=r"in groups of 32 needs torch\.uint8"):
        Mxfp4(BLOCKS).dequantize({"blocks": parts["weight_packed"], "scales": parts["weight_scale"]})
    with pytest.raises(ConfigError, match="48 input columns"):
        Mxfp4().parts(8, 48)
    weight = torch.ones(2, 32)
    weight[0, 3] = float("inf")
    with pytest.raises(CheckpointError, match="1 of 64 weights"):
        Mxfp4().quantize(weight)
    Mxfp4().dequantize(parts)  # control arm


def test_a_weight_takes_17_bytes_for_32_of_them():
    for layout in (PACKED, BLOCKS):
        assert Mxfp4(layout).nbytes(5760, 2880) * 32 == 17 * 5760 * 2880


def test_the_tables_that_say_so_are_read():
    assert read_packed("here", WEIGHTS) == Mxfp4(PACKED)
    assert read_blocks("here", {"quant_method": "mxfp4"}) == Mxfp4(BLOCKS)
    written = SCHEME.weights.model_dump()
    assert read_packed("here", written) == Mxfp4(PACKED) and set(written) <= FORMAT[1].known


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"type": "int"}, "int weights with num_bits 4"),
        ({"num_bits": 8}, "float weights with num_bits 8"),
        ({"symmetric": False}, "asymmetric"),
        ({"dynamic": True}, "dynamic"),
        ({"group_size": 16}, "group_size 16"),
        ({"strategy": "tensor_group"}, 'strategy "tensor_group"'),
        ({"actorder": "group"}, "actorder 'group'"),
        ({"block_structure": [128, 128]}, "block_structure"),
        ({"zero_point": True}, "zero_point True"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(change, named):
    with pytest.raises(Unreadable) as error:
        read_packed("here", WEIGHTS | change)
    assert named in str(error.value)
