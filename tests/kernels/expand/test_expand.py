"""expand against the codec's own dequantize (itself bit-equal to compressed-tensors in tests/quant): every
bit, every layout of `out`."""

import pytest
import torch

from unfreeze.kernels.expand import expand, expand_reference
from unfreeze.kernels.expand.codes import expandable
from unfreeze.kernels.expand.numba_cpu import Expander
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import MATRIX, Fp8Scaled
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import BLOCKS, PACKED, Mxfp4


def random_packed(experts, rows, columns, group, seed=0, spread=True):
    """Any nibble, scales over the whole range of bf16 that stays finite (1e-30 .. 1e30) and both signs."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(
        -(2**31), 2**31 - 1, (experts, rows, -(-columns // 8)), dtype=torch.int32, generator=g
    )
    scale = torch.randn(experts, rows, columns // group, generator=g)
    if spread:
        scale *= 10 ** (torch.rand(scale.shape, generator=g) * 60 - 30)
    return Packed(Int4(group), {"weight_packed": codes, "weight_scale": scale.bfloat16()})


@pytest.mark.parametrize("group", [2, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bit_equal_to_dequantize(group, dtype):
    packed = random_packed(3, 40, 256, group)
    for expert in range(3):
        out = torch.full((40, 256), 7.0, dtype=dtype)
        assert expand(packed, expert, out) is out
        assert torch.equal(out, packed[expert].dequantize().to(dtype))
    assert torch.equal(
        expand(packed[1], None, torch.empty(40, 256, dtype=dtype)), packed[1].dequantize().to(dtype)
    )


def fp8(experts, rows, columns, dtype, block=(128, 128), seed=0):
    """Every code in order, NaN among them; scales over a wide range and of both signs."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.arange(experts * rows * columns).view(experts, rows, columns).to(torch.uint8)
    down, across = -(-rows // block[0]), -(-columns // block[1])
    scales = torch.randn(experts, down, across, generator=g)
    if dtype == torch.float8_e8m0fnu:
        scales = scales.abs()
    else:
        scales = scales * 10 ** (torch.rand(scales.shape, generator=g) * 60 - 30)
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales.to(dtype)}
    return Packed(Fp8(block), parts)


def mxfp4(experts, rows, columns, layout):
    """Every code, every scale but 255."""
    codes = torch.arange(experts * rows * columns // 2).to(torch.uint8).view(experts, rows, -1)
    scales = (torch.arange(experts * rows * columns // 32) % 255).to(torch.uint8).view(experts, rows, -1)
    if layout.blocked:
        codes = codes.unflatten(-1, (-1, 16))
    return Packed(Mxfp4(layout), {layout.codes: codes, layout.scales: scales})


def fp8_scaled(shape, codec):
    """Every code; scales of both signs, one for a matrix or row as `codec` has them."""
    codes = torch.arange(shape[0] * shape[1] * shape[2]).view(shape).to(torch.uint8)
    generator = torch.Generator().manual_seed(1)
    scales = torch.randn(shape[0], *codec.parts(*shape[1:])[codec.scale][1], generator=generator)
    parts = {"weight": codes.view(torch.float8_e4m3fn), codec.scale: scales}
    return Packed(codec, parts)


FLOATS = {
    "fp8": lambda: fp8(3, 140, 260, torch.float32),
    "fp8 bf16 scales": lambda: fp8(3, 140, 260, torch.bfloat16),
    "fp8 powers of two": lambda: fp8(3, 140, 260, torch.float8_e8m0fnu),
    "fp8 a scale per row": lambda: fp8(2, 40, 260, torch.float32, (1, 260)),
    "fp8 per row": lambda: fp8_scaled((3, 40, 260), Fp8Scaled()),
    "fp8 per matrix": lambda: fp8_scaled((3, 40, 260), Fp8Scaled(MATRIX)),
    "mxfp4": lambda: mxfp4(3, 40, 256, PACKED),
    "mxfp4 in blocks": lambda: mxfp4(3, 40, 256, BLOCKS),
}


def same_bits(found, wanted):
    word = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    return bool(((found.view(word) == wanted.view(word)) | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floats_are_bit_equal_to_dequantize(name, dtype):
    packed = FLOATS[name]()
    assert expandable(packed)
    for expert in range(len(packed.parts[packed.codec.suffixes[0]])):
        wanted = packed[expert].dequantize().to(dtype)
        assert same_bits(expand(packed, expert, torch.full(wanted.shape, 7.0, dtype=dtype), "numba"), wanted)
    workspace = torch.full((2, *(size + 5 for size in wanted.shape)), -3.0, dtype=dtype)
    block = workspace[:, : wanted.shape[0], 3 : 3 + wanted.shape[1]]  # an odd place: pairs of bf16 do not fit
    Expander(packed).fill([1, 0], block)
    for position, expert in enumerate([1, 0]):
        assert same_bits(block[position].contiguous(), packed[expert].dequantize().to(dtype))
    block.fill_(-3.0)
    assert bool((workspace == -3.0).all())


def test_control_arm_an_exponent_off_by_one_is_seen():
    packed = mxfp4(1, 40, 256, PACKED)
    wanted = packed[0].dequantize()
    packed.parts["weight_scale"].add_(1)
    assert not same_bits(expand(packed, 0, torch.empty_like(wanted), "numba"), wanted)


def test_every_code_and_every_scale_bit_pattern_that_is_finite():
    scales = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    scales = scales[scales.isfinite()].view(-1, 16)
    # 0..7 then 8..15, lowest first
    codes = torch.tensor([0x76543210, -0x01234568], dtype=torch.int32).repeat(scales.shape[0], 16)
    packed = Packed(Int4(16), {"weight_packed": codes, "weight_scale": scales})
    out = expand(packed, None, torch.empty(packed.shape, dtype=torch.bfloat16))
    want = packed.dequantize()
    same = (out.view(torch.uint16) == want.view(torch.uint16)) | ((out == 0) & (want == 0))
    assert bool(same.all())  # large scales overflow to the same infinities, subnormal ones round alike


def test_nan_scales_stay_nan():
    packed = random_packed(1, 2, 64, 32)
    packed.parts["weight_scale"][0, 1, 0] = float("nan")
    out = expand(packed, 0, torch.empty(2, 64, dtype=torch.bfloat16))
    assert (
        bool(out[1, :32].isnan().all())
        and bool(out[1, 32:].isfinite().all())
        and bool(out[0].isfinite().all())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("extra, offset", [(16, 0), (3, 0), (4, 1)])
def test_writes_only_its_block_of_a_workspace(dtype, extra, offset):
    packed = random_packed(4, 24, 64, 32)
    workspace = torch.full((2, 30, 64 + extra), -3.0, dtype=dtype)
    Expander(packed).fill([3, 1], workspace[:, :24, offset : offset + 64])
    for position, expert in enumerate([3, 1]):
        assert torch.equal(
            workspace[position, :24, offset : offset + 64], packed[expert].dequantize().to(dtype)
        )
    workspace[:, :24, offset : offset + 64] = -3.0
    assert bool((workspace == -3.0).all())


def test_a_weight_the_loops_cannot_read_goes_to_the_reference():
    odd = random_packed(2, 8, 24, 3)
    assert not expandable(odd) and expandable(random_packed(2, 8, 24, 2))
    assert torch.equal(expand(odd, 1, torch.empty(8, 24)), odd[1].dequantize().float())
    with pytest.raises(ValueError, match="not a packed weight"):
        Expander(odd)
    with pytest.raises(ValueError, match="wanted"):
        Expander(random_packed(2, 8, 64, 32)).fill([0], torch.empty(1, 8, 32))
    with pytest.raises(ValueError, match="float16"):
        Expander(random_packed(2, 8, 64, 32)).fill([0], torch.empty(1, 8, 64, dtype=torch.float16))
    with pytest.raises(ValueError, match="the weight is"):
        expand_reference(odd, 1, torch.empty(8, 25))


def test_control_arm_truncation_instead_of_rounding_is_seen():
    packed = random_packed(1, 64, 256, 32, spread=False)
    codes = ((packed.parts["weight_packed"].unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15).flatten(-2) - 8
    product = codes.float() * packed.parts["weight_scale"].float().repeat_interleave(32, dim=-1)
    truncated = (product.view(torch.int32) & -65536).view(torch.float32).flatten()
    exact = expand(packed, 0, torch.empty(64, 256)).flatten()
    assert torch.equal(product.flatten().bfloat16().float(), exact) and not torch.equal(truncated, exact)


def test_an_unwritable_cache_folder_is_said_and_survived(forkserver):
    """A read-only site-packages and no home: numba refuses to cache, the kernels must still compile."""
    script = (
        "import sys, torch\n"
        "from unfreeze.kernels.loops import numba_options\n"
        "real = numba_options.njit\n"
        "def njit(*a, **k):\n"
        "    if k.get('cache'): raise RuntimeError('cannot cache function: no locator available')\n"
        "    return real(*a, **k)\n"
        "numba_options.njit = njit\n"
        "for name in [name for name in sys.modules if name.startswith('unfreeze.kernels.expand')]:\n"
        "    del sys.modules[name]\n"  # its loops come into being where they are imported
        "from unfreeze.kernels.expand import expand\n"
        "from unfreeze.quant.codec import Packed\n"
        "from unfreeze.quant.int4 import Int4\n"
        "p = Packed(Int4(32), Int4(32).quantize(torch.randn(1, 4, 64)))\n"
        "assert torch.equal(expand(p, 0, torch.empty(4, 64), 'numba'), p[0].dequantize().float())\n"
    )
    done = forkserver.run(["-c", script], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "compiled again in each process" in done.stderr
