"""Packed weights in the products of a step: the numbers of each codec's own dequantize, bit for bit, and sums within
float32's rounding of float64's. In a bf16 model a weight is rounded to bf16 once more, as in training."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from unfreeze.kernels.decode_step.formats import FORMATS, packed_weight
from unfreeze.kernels.decode_step.pointer import call_products
from unfreeze.kernels.decode_step.weights import CannotRecord, dense_weight
from unfreeze.kernels.loops.bf16_cpu import available
from unfreeze.kernels.loops.numba_options import serial
from unfreeze.quant import fp8_scaled, integers, mxfp4, nvfp4
from unfreeze.quant.awq import Awq
from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.gptq import Gptq
from unfreeze.quant.halves import Halves
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4

ROUNDING = 1e-6  # of Σ |w x|
WIDE, ODD = (2, 80, 256), (3, 48, 176)
"""Experts, rows and columns. 80 rows: two runs of 32 and one of 16; 176 columns: a rest of 16."""
SHAPES = {
    "INT4": (Int4(32), WIDE),
    "INT4, float16 scales": (Int4(64, "F16"), WIDE),
    "INT4, float32 scales, a scale per row": (Int4(176, "F32"), ODD),
    "FP8 blocks": (Fp8((32, 64)), ODD),
    "FP8 blocks, bf16 scales": (Fp8((16, 64), "BF16"), ODD),
    "FP8 blocks, float16 scales": (Fp8((128, 128), "F16"), ODD),
    "FP8 blocks, powers of two": (Fp8((32, 32), "F8_E8M0"), WIDE),
    "FP8 rows": (Fp8Scaled(fp8_scaled.COLUMN), (3, 48, 171)),
    "FP8 matrix": (Fp8Scaled(fp8_scaled.MATRIX), ODD),
    "MXFP8": (Mxfp8(), WIDE),
    "MXFP4": (Mxfp4(), WIDE),
    "MXFP4 of gpt-oss": (Mxfp4(mxfp4.BLOCKS), WIDE),
    "NVFP4": (Nvfp4(), ODD),
    "NVFP4 of modelopt": (Nvfp4(nvfp4.MODELOPT), ODD),
    "GPTQ": (Gptq(4, 64), WIDE),
    "GPTQ, no index, zeros as they are": (Gptq(4, 32, minus_one=False, indexed=False), ODD),
    "GPTQ act-order": (Gptq(4, 32), (2, 80, 172)),
    "GPTQ 8 bits": (Gptq(8, 64), WIDE),
    "GPTQ 8 bits act-order": (Gptq(8, 32), (2, 48, 161)),
    "GPTQ 2 bits": (Gptq(2, 64), ODD),
    "GPTQ, a scale per row, bf16": (Gptq(4, -1, scale_dtype="BF16"), ODD),
    "AWQ": (Awq(128), WIDE),
    "AWQ, odd": (Awq(16 * 11), ODD),
    "NF4": (Bits4(), WIDE),
    "NF4, blocks across rows": (Bits4(block=128, double=False, dtype="F32"), (2, 48, 96)),
    "FP4": (Bits4("fp4", block=256, block2=64, dtype="F16"), WIDE),
    "LLM.int8": (Bits8(), (3, 48, 171)),
    "integers of 4 bits with zeros": (Integers(4, 32, zeros=True), WIDE),
    "integers of 4 bits act-order": (Integers(4, 32, zeros=True, permuted=True), WIDE),
    "integers of 8 bits with zeros": (Integers(8, 32, zeros=True), WIDE),
    "integers of 8 bits act-order": (Integers(8, 64, permuted=True), WIDE),
    "integers of 8 bits in rows": (Integers(8, integers.ROW, packed=False), (3, 48, 171)),
    "integers of 8 bits in rows with zeros": (Integers(8, 64, zeros=True, packed=False), WIDE),
    "integers of 8 bits in a matrix": (Integers(8, integers.MATRIX, packed=False, scale_dtype="F32"), ODD),
}
"""Every codec with an operation (FORMATS), in its variants: kinds of codes.py, dtypes of scales, layouts."""
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@serial
def _products(address, like, numbers):
    a = numbers
    return call_products(
        address, like, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]
    )


def in_order(x, pairs):
    """x [n, K] as dots.py says: bf16, or each 32 numbers as even ones, then odd ones."""
    if pairs:
        return x.bfloat16()
    whole = x.shape[1] // 32 * 32
    return torch.cat((x[:, :whole].unflatten(1, (-1, 16, 2)).mT.flatten(1), x[:, whole:]), 1).contiguous()


def products(weight, pairs, x, rows: range, step=1):
    """[n, rows] of x [n, K]; the weights themselves, [rows, K], if n = 0."""
    (n, K), num_rows, packed = x.shape, len(rows), in_order(x, pairs)
    # for n = 3 a fourth x is read, and its sums are written
    xs = np.array([packed[min(j, n - 1)].data_ptr() if n else 0 for j in range(4)])
    out = torch.full((4 if n else K, num_rows), float("nan"))
    numbers = [num_rows, step, weight.codes + rows.start * weight.stride, rows.step * weight.stride]
    numbers += [weight.scales + rows.start * weight.scale_stride, rows.step * weight.scale_stride]
    numbers += [weight.table, weight.group, K, xs.ctypes.data, n, out.data_ptr()]
    assert _products(weight.tile, np.uint16(0) if pairs else np.float32(0), np.array(numbers)) == 0
    return out[:n] if n else out.view(num_rows, K)


def quantized(name, halves=False):
    """Random matrices of very different size in that format."""
    codec, (E, O, K) = SHAPES[name]
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(E, O, K, generator=draw) * torch.rand(E, O, 1, generator=draw).add(0.01)
    if isinstance(codec, Int4 | Integers) or (isinstance(codec, Fp8) and codec.scale_dtype in TORCH):
        weight = weight.to(TORCH[codec.scale_dtype])  # the dtype of scales that are made
    codec = Halves(codec) if halves else codec
    parts = codec.quantize(weight)
    for suffix, part in parts.items():
        if isinstance(codec, Fp8) and suffix == codec.scale and codec.scale_dtype in TORCH:
            parts[suffix] = part.to(TORCH[codec.scale_dtype])
        if suffix.endswith("g_idx") and "act-order" in name:
            parts[suffix] = part[:, torch.randperm(K, generator=draw)]
    return Packed(codec, parts)


def as_multiplied(packed, pairs):
    """The weights [E · O, K] in float32, as the codec gives them to a float32 or a bf16 model."""
    weight = packed.dequantize().flatten(0, 1)
    if not pairs:
        return weight.float()
    narrow = weight.float().bfloat16().float()
    return torch.where(narrow.abs() < 2.0**-126, 0, narrow)  # vdpbf16ps takes these for zero


def assert_right(packed, pairs):
    weight, want = packed_weight(packed, pairs), as_multiplied(packed, pairs)
    (rows, K), O = want.shape, packed.shape[1]
    assert torch.equal(products(weight, pairs, torch.empty(0, K), range(rows)), want)
    # within a matrix, across two, every second row, the last ones
    some = (range(8, 14), range(O // 2 - 3, O + 2), range(1, 19, 2), range(rows - 33, rows))
    for n, step, these in itertools.product((1, 2, 3, 4), (1, 4), some):
        x = torch.randn(n, K, generator=torch.Generator().manual_seed(n))
        got = products(weight, pairs, x, these, step)
        exact = (x.bfloat16() if pairs else x).double(), want[these.start : these.stop : these.step].double()
        sums, size = exact[0] @ exact[1].t(), exact[0].abs() @ exact[1].abs().t()
        assert ((got - sums).abs() <= ROUNDING * size).all(), (n, step, these)


@pytest.fixture(params=["float32", "bf16 pairs"])
def pairs(request):
    if request.param == "bf16 pairs" and not available():
        pytest.skip("no AVX512-bf16")
    return request.param == "bf16 pairs"


def test_every_format_with_an_operation_is_here():
    assert {type(codec) for codec, _ in SHAPES.values()} == FORMATS.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_weights_have_the_bits_of_the_codec_and_sums_are_float64s(pairs, name):
    assert_right(quantized(name), pairs)


@pytest.mark.parametrize("name", ["INT4", "FP8 rows", "FP8 matrix", "NVFP4", "GPTQ act-order", "AWQ", "NF4"])
def test_gate_and_up_with_parts_of_their_own(pairs, name):
    packed = quantized(name, halves=True)
    assert isinstance(packed.codec, Halves)
    assert_right(packed, pairs)


def test_a_matrix_is_a_stack_of_one(pairs):
    packed = quantized("FP8 blocks")[1]
    weight = packed_weight(packed, pairs)
    want = as_multiplied(Packed(packed.codec, {k: v[None] for k, v in packed.parts.items()}), pairs)
    assert torch.equal(products(weight, pairs, torch.empty(0, want.shape[1]), range(len(want))), want)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("FP8 blocks", lambda parts: {"weight_scale_inv": parts["weight_scale_inv"].roll(1, 2)}),
        ("MXFP4", lambda parts: {"weight_scale": parts["weight_scale"].roll(1, 2)}),
        ("NVFP4", lambda parts: {"weight_packed": parts["weight_packed"] >> 4 | parts["weight_packed"] << 4}),
        ("GPTQ", lambda parts: {"scales": parts["scales"].roll(1, 1)}),
        ("GPTQ act-order", lambda parts: {"g_idx": parts["g_idx"].roll(1, 1)}),
        ("AWQ", lambda parts: {"qzeros": parts["qzeros"].roll(1, 2)}),
        ("NF4", lambda parts: {"weight": parts["weight"] >> 4 | parts["weight"] << 4}),
        ("LLM.int8", lambda parts: {"SCB": parts["SCB"].roll(1, 1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_control_another_scale_or_half_of_a_byte_is_seen(pairs, name, plant):
    packed = quantized(name)
    planted = Packed(packed.codec, {**packed.parts, **plant(packed.parts)})
    want = as_multiplied(packed, pairs)
    x = torch.randn(1, want.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16().float()
    got = products(packed_weight(planted, pairs), pairs, x, range(len(want)))
    assert ((got[0] - want @ x[0]).abs() > 100 * ROUNDING * (want.abs() @ x[0].abs())).float().mean() > 0.5


def test_float16_matrices(pairs):
    matrix = torch.randn(40, 100, generator=torch.Generator().manual_seed(0)).half()
    weight = dense_weight(matrix, pairs)
    want = matrix.bfloat16().float() if pairs else matrix.float()
    assert torch.equal(products(weight, pairs, torch.empty(0, 100), range(40)), want)


CANNOT = {
    "INT4 in groups of 48": Packed(Int4(48), Int4(48).quantize(torch.randn(8, 192))),
    "INT4 in groups of 16": Packed(Int4(16), Int4(16).quantize(torch.randn(8, 192))),
    "codes of 2 bits in rows": Packed(
        Integers(2, 32, scale_dtype="F32"), Integers(2, 32).quantize(torch.randn(8, 64))
    ),
    "blocks of 4 bits that end inside of 32 columns": Packed(Bits4(), Bits4().quantize(torch.randn(8, 80))),
    "groups of several sizes": Packed(
        Gptq(4, 32), Gptq(4, 32).quantize(torch.randn(8, 64)) | {"g_idx": (torch.arange(64) > 30).int()}
    ),
    "FP8 with scales of 256": Packed(
        Fp8Scaled(),
        {"weight": torch.ones(8, 32).to(torch.float8_e4m3fn), "weight_scale": torch.full((8, 1), 256.0)},
    ),
}


@pytest.mark.parametrize("name", CANNOT)
def test_other_sizes_cannot_be_recorded(pairs, name):
    with pytest.raises(CannotRecord):
        packed_weight(CANNOT[name], pairs)


NARROW = """
import unfreeze, sys
sys.path.insert(0, {folder!r})
import test_tiles_formats as here
from unfreeze.core import cpu
assert cpu.cpu_class() == "cpu-avx2" and not cpu.loops_have("cpu-avx512")
for name in {names!r}:
    here.assert_right(here.quantized(name), False)
print("right")
"""


@pytest.mark.nightly  # 14 s: every format is compiled again for other instructions
def test_without_512_bit_instructions_the_bits_are_the_same():
    """In a process of its own: the class of a CPU is chosen before numba is imported."""
    names = ["INT4", "NVFP4", "GPTQ act-order"]
    code = NARROW.format(folder=os.path.dirname(__file__), names=names)
    narrow = {**os.environ, "UNFREEZE_CPU_CLASS": "avx2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=narrow, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "right", done.stderr[-2000:]
