"""The Triton expansion of every format against the codec's own dequantize (itself bit-equal to each library in
tests/quant), bit for bit in float32 and bf16, in Triton's interpreter on a CPU: all codes, odd shapes, scales of
every size, chosen experts into strided places."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from unfreeze.kernels.expand import OP, expand, expand_reference, expand_stack
from unfreeze.kernels.expand.bucket import bucket, triton_kind
from unfreeze.kernels.expand.cases import KERNELS, buckets, drawn
from unfreeze.quant.awq import Awq
from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.codec import Packed
from unfreeze.quant.formats import FORMATS
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import COLUMN, MATRIX, ONE, ROWS, Fp8Scaled
from unfreeze.quant.gptq import Gptq
from unfreeze.quant.halves import stacked
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import MATRIX as WHOLE
from unfreeze.quant.integers import ROW, Integers
from unfreeze.quant.mxfp4 import BLOCKS, PACKED, Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import MODELOPT, Nvfp4

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

STACKS = [
    (Nvfp4(), 5, 48),
    (Nvfp4(MODELOPT), 3, 80),
    (Mxfp4(PACKED, "F8_E8M0"), 3, 96),
    (Mxfp4(BLOCKS), 2, 64),
    (Bits4(), 5, 56),  # 280 numbers: blocks go on in the next row, and the last one is partial
    (Bits4(block2=32, block=32), 7, 160),  # several absmax2
    (Bits4("fp4", double=False), 4, 64),
    (Bits4(double=False, dtype="F16"), 3, 22),  # rows are no whole words
    (Bits4(double=True, dtype="F32"), 3, 34),
    (Bits8(), 5, 70),
    (Integers(8, ROW, packed=False, scale_dtype="F16"), 4, 33),
    (Integers(8, WHOLE, zeros=True, packed=False), 5, 20),
    (Integers(8, 16, zeros=True, packed=False, scale_dtype="F32"), 3, 48),
    (Integers(4, 32, zeros=True), 35, 96),  # the last word of zero points is partial
    (Integers(4, 12, zeros=True), 9, 36),  # odd groups, and a partial word
    (Integers(8, 64, zeros=True, scale_dtype="F16"), 6, 192),
    (Integers(2, ROW, zeros=True, scale_dtype="F32"), 18, 48),
    (Integers(8, WHOLE), 3, 24),
    (Integers(4, 16, zeros=True, permuted=True), 34, 64),
    (Integers(4, 16, permuted=True, scale_dtype="F16"), 5, 160),
    (Awq(32), 16, 96),
    (Awq(-1), 40, 20),
    (Awq(12, "BF16"), 8, 36),
    (Awq(256), 8, 512),
    (Gptq(indexed=False, group_size=32), 40, 96),
    (Gptq(4, 32), 9, 84),  # the last group and the last word are partial
    (Gptq(2, 16, minus_one=False), 17, 48),
    (Gptq(8, 32, indexed=False, scale_dtype="F32"), 6, 64),
    (Gptq(8, -1), 5, 24),
    (Gptq(4, 256, indexed=False), 3, 512),
    (Fp8((16, 24), "F16"), 17, 60),
    (Fp8((1, 64)), 3, 100),
    (Fp8Scaled(ROWS, scale_dtype="BF16"), 5, 30),
    (Fp8Scaled(ONE, scale_dtype="F16"), 5, 30),
    (Fp8Scaled(COLUMN), 5, 30),
    (Fp8Scaled(MATRIX), 5, 30),
    (Mxfp8(), 5, 96),
    (Mxfp8(above=True, scale_dtype="F8_E8M0"), 2, 64),
    (Int4(32, "F16"), 5, 96),
    (Int4(3, "F32"), 5, 21),
    (Int4(5), 3, 35),
]


def stack(codec, rows, columns, seed=0):
    """Three matrices: random codes, then all of them in order; scales of 16 bits and more over their whole range."""
    generator = torch.Generator().manual_seed(seed)
    codes = codec.suffixes[0]
    packed = drawn(
        replace(codec, scale_dtype="U8") if is_power(codec) else codec, 3, rows, columns, generator
    )
    parts = dict(packed.parts)
    raw = parts[codes].view(torch.uint8)
    raw[1] = torch.arange(raw[1].numel()).to(torch.uint8).view(raw[1].shape)
    for name, part in parts.items():
        if part.dtype == torch.float32 and "map" not in name and "quant_state" not in name:
            part *= 10 ** (torch.rand(part.shape, generator=generator) * 76 - 38)
        if part.dtype in (torch.float16, torch.bfloat16):
            bits = torch.randint(-(2**15), 2**15, part.shape, dtype=torch.int16, generator=generator)
            parts[name] = torch.where(bits.view(part.dtype).isfinite(), bits.view(part.dtype), part)
        if is_power(codec) and name == codec.suffixes[1]:
            part[2] = torch.arange(part[2].numel()).to(torch.uint8).view(part[2].shape)
            if codec.scale_dtype == "F8_E8M0":
                parts[name] = part.view(torch.float8_e8m0fnu)
    return Packed(codec, {name: part.to(DEVICE) for name, part in parts.items()})


def is_power(codec):
    return isinstance(codec, (Mxfp4, Mxfp8))


def wanted(packed, dtype):
    weight = packed.dequantize()
    return (weight.float() if weight.dtype == torch.float16 else weight).to(dtype)


def same_bits(found, want):
    word = torch.int16 if found.dtype == torch.bfloat16 else torch.int32
    return bool(((found.view(word) == want.view(word)) | (found.isnan() & want.isnan())).all())


def fill(*args):
    from unfreeze.kernels.expand import triton_cuda

    triton_cuda.fill(*args)


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec, rows, columns", STACKS, ids=lambda value: repr(value))
def test_bit_equal_to_dequantize(codec, rows, columns, dtype):
    packed = stack(codec, rows, columns)
    want = wanted(packed, dtype)
    assert float(want.isfinite().float().mean()) > 0.3 and float((want != 0).float().mean()) > 0.3
    # a block at an odd place of a wider workspace
    workspace = torch.full((3, rows + 2, columns + 5), 7.0, dtype=dtype, device=DEVICE)
    block = workspace[:, :rows, 3 : 3 + columns]
    fill(packed, 0, block)
    assert same_bits(block.contiguous(), want)
    block.fill_(7.0)
    assert bool((workspace == 7.0).all())
    # chosen experts, and those from the second on
    chosen = torch.empty(2, rows, columns, dtype=dtype, device=DEVICE)
    fill(packed, torch.tensor([2, 0], device=DEVICE), chosen)
    assert same_bits(chosen, want[[2, 0]])
    fill(packed, 1, chosen)
    assert same_bits(chosen, want[1:])


def test_every_format_that_can_be_read_has_a_kernel():
    """The codecs of FORMATS are those above: a format that is added is added here, or said to have none."""
    tried = {type(codec) for codec, _, _ in STACKS}
    modules = {format.read.__module__ for format in FORMATS.values()}
    assert {module.removeprefix("unfreeze.quant.") for module in modules} == {
        codec.__module__.removeprefix("unfreeze.quant.") for codec in tried
    } - {"fp8", "int4"}  # read by fp8_scaled and integers
    assert all(triton_kind(stack(*one)) for one in STACKS)


def test_control_arm_the_zero_points_of_other_rows_are_seen():
    packed = stack(Awq(32), 16, 96)
    want = wanted(packed, torch.float32)
    packed.parts["qzeros"].copy_(packed.parts["qzeros"].roll(1, -1))
    out = torch.empty_like(want)
    fill(packed, 0, out)
    assert not same_bits(out, want)


@pytest.mark.parametrize("codec", [Nvfp4(), Awq(32), Bits4()], ids=repr)
def test_gate_and_up_with_parts_of_their_own(codec):
    both = stacked(codec, 16, 64)
    parts = both.quantize(torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0)))
    packed = Packed(both, {name: part.to(DEVICE) for name, part in parts.items()})
    out = torch.empty(2, 16, 64, device=DEVICE)
    expand_stack(packed, [2, 1], out, "triton")
    assert torch.equal(out, packed.dequantize()[[2, 1]].float())
    assert torch.equal(expand(packed, 0, out[0], "triton"), packed.dequantize()[0].float())


def test_a_view_of_some_words_is_left_to_the_reference():
    packed = stack(Awq(32), 16, 96)
    some = Packed(packed.codec, {name: part[..., ::2] for name, part in packed.parts.items()})
    assert triton_kind(some) == "" and bucket(some, None, torch.empty(3, 8, 96)) == "other"
    with pytest.raises(ValueError, match="contiguous"):
        fill(some, 0, torch.empty(3, 8, 96))


@pytest.mark.parametrize("kind", KERNELS)
def test_each_kind_is_predicted_on_a_gpu_and_computed_by_its_candidate_alone(kind):
    able = [
        name
        for name, candidate in OP.candidates.items()
        if name != "numba" and candidate.predicted("cuda", buckets(kind)[1])
    ]
    assert able == ["triton" if kind == "int4" else f"triton_{kind}"]
    assert OP.candidates[able[0]].computes == buckets(kind)
    out = torch.empty(64, 256)
    packed = drawn(KERNELS[kind].codec, 2, 64, 256, torch.Generator().manual_seed(0))
    assert bucket(packed, 1, out) == buckets(kind)[0]
    assert same_bits(expand(packed, 1, out), expand_reference(packed, 1, torch.empty(64, 256)))  # on this CPU
