"""The Triton expansion against the codec's own dequantize, bit for bit; on a CPU through Triton's
interpreter."""

import importlib.util

import pytest
import torch

from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import MATRIX, Fp8Scaled
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import BLOCKS, PACKED, Mxfp4

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def fill(*args):
    from unfreeze.kernels.expand import triton_cuda

    triton_cuda.fill(*args)


def random_packed(experts, rows, columns, group, seed=0):
    """Any nibble, scales over the whole range of bf16 that stays finite (1e-30 .. 1e30) and both signs."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(
        -(2**31), 2**31 - 1, (experts, rows, -(-columns // 8)), dtype=torch.int32, generator=g
    )
    scale = torch.randn(experts, rows, columns // group, generator=g) * 10 ** (
        torch.rand(experts, rows, columns // group, generator=g) * 60 - 30
    )
    return Packed(
        Int4(group), {"weight_packed": codes.to(DEVICE), "weight_scale": scale.bfloat16().to(DEVICE)}
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "rows, columns, group", [(5, 64, 32), (3, 24, 3), (7, 40, 2), (4, 4160, 32), (2, 36, 12), (1, 16, 16)]
)
def test_bit_equal_to_dequantize(rows, columns, group, dtype):
    """Rounding is done in integers on a CPU, so bf16 is exact in the interpreter too: these numbers need no
    rounding a second time."""
    packed = random_packed(3, rows, columns, group)
    out = torch.full((3, rows, columns), 7.0, dtype=dtype, device=DEVICE)
    fill(packed, 0, out)
    assert torch.equal(out, packed.dequantize().to(dtype))


def fp8(rows, columns, dtype, block):
    """Every code, NaN among them, scales over a wide range."""
    g = torch.Generator().manual_seed(0)
    codes = torch.arange(3 * rows * columns).view(3, rows, columns).to(torch.uint8)
    scales = torch.randn(3, -(-rows // block[0]), -(-columns // block[1]), generator=g)
    scales = scales.abs() if dtype == torch.float8_e8m0fnu else scales * 2.0**-7
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales.to(dtype)}
    return Packed(Fp8(block), {name: part.to(DEVICE) for name, part in parts.items()})


def mxfp4(rows, columns, layout):
    codes = torch.arange(3 * rows * columns // 2).to(torch.uint8).view(3, rows, -1)
    scales = (torch.arange(3 * rows * columns // 32) % 255).to(torch.uint8).view(3, rows, -1)
    codes = codes.unflatten(-1, (-1, 16)) if layout.blocked else codes
    return Packed(Mxfp4(layout), {layout.codes: codes.to(DEVICE), layout.scales: scales.to(DEVICE)})


def fp8_scaled(shape, codec):
    """Every code; scales of both signs, one for a matrix or row as `codec` has them."""
    codes = torch.arange(shape[0] * shape[1] * shape[2]).view(shape).to(torch.uint8)
    generator = torch.Generator().manual_seed(1)
    scales = torch.randn(shape[0], *codec.parts(*shape[1:])[codec.scale][1], generator=generator)
    parts = {"weight": codes.view(torch.float8_e4m3fn), codec.scale: scales}
    return Packed(codec, {name: part.to(DEVICE) for name, part in parts.items()})


FLOATS = {
    "fp8": lambda: fp8(17, 140, torch.float32, (16, 64)),
    "fp8 bf16 scales": lambda: fp8(17, 140, torch.bfloat16, (16, 64)),
    "fp8 powers of two": lambda: fp8(17, 140, torch.float8_e8m0fnu, (16, 64)),
    "fp8 a scale per row": lambda: fp8(5, 1100, torch.float32, (1, 1100)),
    "fp8 per row": lambda: fp8_scaled((3, 7, 140), Fp8Scaled()),
    "fp8 per matrix": lambda: fp8_scaled((3, 7, 140), Fp8Scaled(MATRIX)),
    "mxfp4": lambda: mxfp4(9, 64, PACKED),
    "mxfp4 in blocks": lambda: mxfp4(3, 1088, BLOCKS),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_bit_equal_to_dequantize(name, dtype):
    packed = FLOATS[name]()
    if dtype == torch.bfloat16 and name.startswith("mxfp4"):
        # the interpreter's own conversion makes zeros of bf16's subnormal numbers
        packed.parts["weight_scale" if "weight_scale" in packed.parts else "scales"].clamp_(min=10)
    wanted = torch.stack([packed[expert].dequantize().to(dtype) for expert in range(3)])
    workspace = torch.full((3, wanted.shape[1] + 2, wanted.shape[2] + 5), 7.0, dtype=dtype, device=DEVICE)
    fill(packed, 0, workspace[:, : wanted.shape[1], 3 : 3 + wanted.shape[2]])
    found = workspace[:, : wanted.shape[1], 3 : 3 + wanted.shape[2]]
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    chosen = torch.empty(2, *wanted.shape[1:], dtype=dtype, device=DEVICE)
    fill(packed, torch.tensor([2, 0], device=DEVICE), chosen)
    assert torch.equal(chosen.nan_to_num(), wanted[[2, 0]].nan_to_num())


def test_control_arm_the_scales_of_another_expert_are_seen():
    packed = FLOATS["fp8"]()
    wanted = packed.dequantize()
    packed.parts["weight_scale_inv"][:] = packed.parts["weight_scale_inv"].roll(1, 0)
    out = torch.empty_like(wanted)
    fill(packed, 0, out)
    assert not torch.equal(out.nan_to_num(), wanted.nan_to_num())


@pytest.mark.nightly
def test_every_code_and_every_scale_bit_pattern_that_is_finite():
    scales = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    scales = scales[scales.isfinite()].view(1, -1, 16).to(DEVICE)
    codes = (
        torch.tensor([0x76543210, -0x01234568], dtype=torch.int32).repeat(1, scales.shape[1], 16).to(DEVICE)
    )
    packed = Packed(Int4(16), {"weight_packed": codes, "weight_scale": scales})
    out = torch.empty(packed.shape, dtype=torch.float32, device=DEVICE)
    fill(packed, 0, out)
    assert torch.equal(out, packed.dequantize().float())


def test_nan_scales_stay_nan():
    packed = random_packed(1, 2, 64, 32)
    packed.parts["weight_scale"][0, 1, 0] = float("nan")
    out = torch.empty(1, 2, 64, dtype=torch.float32, device=DEVICE)
    fill(packed, 0, out)
    assert (
        bool(out[0, 1, :32].isnan().all())
        and bool(out[0, 1, 32:].isfinite().all())
        and bool(out[0, 0].isfinite().all())
    )


@pytest.mark.parametrize("extra", [0, 8, 3])
def test_the_chosen_experts_into_their_block_of_a_workspace(extra):
    packed = random_packed(4, 24, 64, 32)
    workspace = torch.full((2, 24 + extra, 64 + extra), -3.0, device=DEVICE)
    fill(packed, torch.tensor([3, 1], device=DEVICE), workspace[:, :24, :64])
    for position, expert in enumerate([3, 1]):
        assert torch.equal(workspace[position, :24, :64], packed[expert].dequantize().float())
    workspace[:, :24, :64] = -3.0
    assert bool((workspace == -3.0).all())
    fill(packed, torch.empty(0, dtype=torch.int64, device=DEVICE), workspace[:0, :24, :64])


def test_what_it_cannot_read_is_refused():
    packed = random_packed(2, 8, 64, 32)
    with pytest.raises(ValueError, match="wanted"):
        fill(packed, 0, torch.empty(3, 8, 64, device=DEVICE))
    with pytest.raises(ValueError, match="float16"):
        fill(packed, 0, torch.empty(2, 8, 64, dtype=torch.float16, device=DEVICE))
    odd = Packed(packed.codec, {name: part.transpose(0, 1) for name, part in packed.parts.items()})
    with pytest.raises(ValueError, match="contiguous"):
        fill(odd, 0, torch.empty(8, 2, 64, device=DEVICE))


def test_control_arm_cutting_off_instead_of_rounding_is_seen():
    packed = random_packed(1, 64, 64, 32)
    want = packed.dequantize().float()
    exact = (packed.dequantize().double() * 0 + _unrounded(packed)).float()
    cut = (exact.view(torch.int32) & -65536).view(torch.float32)
    assert not torch.equal(cut, want) and torch.equal(exact.bfloat16().float(), want)


def _unrounded(packed):
    from unfreeze.quant.int4 import unpack_int4

    codes = (
        unpack_int4(packed.parts["weight_packed"], packed.shape[-1])
        .double()
        .unflatten(-1, (-1, packed.codec.group_size))
    )
    return (codes * packed.parts["weight_scale"].double().unsqueeze(-1)).flatten(-2)
