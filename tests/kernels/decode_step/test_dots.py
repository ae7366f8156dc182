"""Products of weight rows with packed rows of x: weights have the bits of their format, sums are within float32's
rounding of float64's, and nothing is read beyond a row."""

import ctypes
import faulthandler
import itertools
import mmap
import os
import signal

import numba
import numpy as np
import pytest
import torch

from unfreeze.core import cpu
from unfreeze.kernels.decode_step import codes, dots, tiles
from unfreeze.kernels.decode_step.lookup import int4_values
from unfreeze.kernels.decode_step.pointer import call_products
from unfreeze.kernels.loops.bf16_cpu import available
from unfreeze.kernels.loops.numba_options import serial
from unfreeze.quant.int4 import Int4, pack_int4

ROUNDING = 1e-6  # of Σ |w x|: 8 units of float32, for sums of up to 300 numbers in 8 to 128 chains


@serial
def _products(address, like, numbers):
    a = numbers
    return call_products(
        address, like, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]
    )


@pytest.fixture(params=["float32", "bf16 pairs"])
def pairs(request):
    if request.param == "bf16 pairs" and not available():
        pytest.skip("no AVX512-bf16")
    return request.param == "bf16 pairs"


def packed(x: torch.Tensor, pairs: bool) -> torch.Tensor:
    """x [n, width] as dots.py says: bf16 in order, or each 32 numbers as even ones, then odd ones."""
    if pairs:
        return x.bfloat16()
    whole = x.shape[1] // 32 * 32
    split = x[:, :whole].unflatten(1, (-1, 16, 2)).mT.flatten(1)
    return torch.cat((split, x[:, whole:]), 1).contiguous()


def call(tile, pairs, weights, x, step, *, width=None, scales=None, group=0):
    """out [n, rows] of weights [rows, …] (codes for INT4), which may be strided."""
    x_packed, n, num_rows = packed(x, pairs), len(x), len(weights)
    # for n = 3 the tile reads a fourth x
    xs = np.array([x_packed[min(j, n - 1)].data_ptr() for j in range(4)])
    out = torch.full((4, num_rows), float("nan"))
    values = int4_values(pairs)
    numbers = [num_rows, step, weights.data_ptr(), weights.stride(0) * weights.element_size()]
    if scales is None:
        numbers += [0, 0, 0, 0]
    else:
        numbers += [scales.data_ptr(), 2 * scales.stride(0), values.ctypes.data, group.bit_length() - 6]
    numbers += [width or x.shape[1], xs.ctypes.data, n, out.data_ptr()]
    like = np.uint16(0) if pairs else np.float32(0)
    assert _products(tile.address(pairs), like, np.array(numbers)) == 0
    return out[: n if n != 3 else 4][:n]


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [7, 32, 45, 96, 300])
def test_dense_rows_equal_float64(pairs, kind, width):
    """Widths with and without a rest, no whole chunk, an odd number of chunks. Rows lie apart."""
    tile = tiles.float32 if kind == torch.float32 else tiles.bf16
    for num_rows, n, step in itertools.product((1, 4, 6), (1, 2, 3, 4), (1, 4)):
        weights, x = draw(num_rows, width + 3, dtype=kind)[:, :width], draw(n, width, seed=1).float()
        got = call(tile, pairs, weights, x, step)
        want, size = x.double() @ weights.double().t(), x.double().abs() @ weights.double().abs().t()
        assert ((got - want).abs() <= ROUNDING * size).all(), (num_rows, n, step)
        assert torch.equal(got, call(tile, pairs, weights, x, step))
        # control: without the last number of each row
        assert not ((got - x[:, :-1].double() @ weights[:, :-1].double().t()).abs() <= ROUNDING * size).any()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_rows_equal_float64(pairs, group):
    for num_rows, n, step, width in itertools.product((1, 4, 6), (1, 2, 3, 4), (1, 4), (group, 3 * group)):
        codec = Int4(group)
        parts = codec.quantize(draw(num_rows, width, dtype=torch.float32))
        x, weights = draw(n, width, seed=1).float(), codec.dequantize(parts).double()
        options = {"scales": parts["weight_scale"].view(torch.int16), "group": group}
        got = call(tiles.int4, pairs, parts["weight_packed"], x, step, **options)
        want, size = x.double() @ weights.t(), x.double().abs() @ weights.abs().t()
        assert ((got - want).abs() <= ROUNDING * size).all(), (num_rows, n, step, width)
        # control: the scales of the group before
        options["scales"] = options["scales"].roll(1, 1 if width > group else 0)
        if options["scales"].numel() > 1:
            other = call(tiles.int4, pairs, parts["weight_packed"], x, step, **options)
            assert not ((other - want).abs() <= ROUNDING * size).all()


def every_code(group: int) -> dict[str, torch.Tensor]:
    """All 16 codes under 512 scales drawn from all bf16 numbers: subnormal, huge, infinite and NaN ones too."""
    drawn = torch.randint(-(2**15), 2**15, (256, 2), generator=torch.Generator().manual_seed(0))
    codes = torch.arange(2 * group).repeat(256, 1) * 5 % 16 - 8
    return {
        "weight_packed": pack_int4(codes.to(torch.int8)),
        "weight_scale": drawn.to(torch.int16).view(torch.bfloat16),
    }


def assert_bits_of_the_codec(weights, want: torch.Tensor, pairs: bool) -> None:
    """weights(x) are the products with unit vectors: 0 · w is exact where w is finite."""
    width = want.shape[1]
    got = torch.cat([weights(x) for x in torch.eye(width).split(4)]).t()
    if pairs:  # vdpbf16ps takes subnormal numbers for zero
        want = torch.where(want.abs() < 2.0**-126, 0, want)
    finite = want.isfinite().all(1)
    assert finite.sum() > 200 and torch.equal(got[finite], want[finite])


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_weights_have_the_bits_of_the_codec(pairs, group):
    """Oracle: quant/int4.py, equal to compressed-tensors."""
    parts = every_code(group)
    codes, scales = parts["weight_packed"], parts["weight_scale"].view(torch.int16)
    want = Int4(group).dequantize(parts).float()

    def weights(codes, step):
        return lambda x: call(tiles.int4, pairs, codes, x, step, scales=scales, group=group)

    for step in (1, 4):
        assert_bits_of_the_codec(weights(codes, step), want, pairs)
    with pytest.raises(AssertionError):  # control: the nibbles of a byte exchanged
        bytes_ = codes.view(torch.uint8)
        assert_bits_of_the_codec(weights((bytes_ >> 4) | (bytes_ << 4), 4), want, pairs)


@pytest.fixture(scope="module")
def without_permutations():
    """tiles.int4 as on a CPU without AVX-512, compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "loops_have", lambda name: False)
        loop = numba.njit(tiles.int4.loop.py_func)
        loop.compile((numba.float32, *[numba.int64] * tiles.int4.arguments))
    return loop


def test_without_512_bit_permutations_the_bits_are_the_same(request):
    group, parts = 64, every_code(64)
    scales = parts["weight_scale"].view(torch.int16)

    def weights(x):
        x_packed, n, num_rows = packed(x, False), len(x), len(scales)
        xs, out = np.array([row.data_ptr() for row in x_packed]), torch.empty(4, num_rows)
        codes = parts["weight_packed"]
        arguments = [codes.data_ptr(), 4 * codes.stride(0), scales.data_ptr(), 2 * scales.stride(0)]
        arguments += [int4_values(False).ctypes.data]
        arguments += [1, x.shape[1], xs.ctypes.data, n, out.data_ptr()]
        loop(np.float32(0), num_rows, 4, *arguments)
        return out[:n]

    if cpu.loops_have("cpu-avx512"):
        loop = request.getfixturevalue("without_permutations")
        (compiled,) = loop.inspect_llvm().values()
    else:  # the loop is without them as it is, and is not compiled a second time

        def weights(x):
            return call(tiles.int4, False, parts["weight_packed"], x, 4, scales=scales, group=group)

        compiled = row_of_int4()
    assert "permvar" not in compiled
    want = Int4(group).dequantize(parts).float()
    assert_bits_of_the_codec(weights, want, pairs=False)
    with pytest.raises(AssertionError):  # control: bf16 rounding left out
        exact = want * (1 + 2.0**-9)
        assert_bits_of_the_codec(weights, exact, pairs=False)


def test_permutations_are_used_where_the_cpu_has_them():
    """So that the test above compares two forms."""
    if not cpu.loops_have("cpu-avx512"):
        pytest.skip("no AVX-512")
    assert "permvar.sf" in row_of_int4()


def row_of_int4() -> str:
    """What reads a row's codes, before LLVM has seen it."""
    builder, function = _builder()
    row = codes.row("int4", builder, *(dots.I64(0) for _ in range(4)))
    row.floats(dots.I64(0))
    return str(function)


def _builder():
    from llvmlite import ir

    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), []), "test")
    return ir.IRBuilder(function.append_basic_block()), function


# --- memory


class _Guarded:
    """Memory whose last byte is the last that may be read."""

    def __init__(self):
        self.pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.end = self.start + 3 * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(self.end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def place(self, tensor: torch.Tensor) -> int:
        """Copy the bytes of a contiguous tensor to the end; return their address."""
        where = self.end - tensor.numel() * tensor.element_size()
        ctypes.memmove(where, tensor.data_ptr(), self.end - where)
        return where


def _signal_of(function) -> int:
    """The signal that ends a child process which runs function(); 0 for none."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("kind", ["float32", "bf16", "int4"])
def test_nothing_is_read_beyond_weights_scales_and_x(pairs, kind):
    width = 96 if kind == "int4" else 101
    tile, num_rows = getattr(tiles, kind), 6
    x = packed(draw(4, width, dtype=torch.float32), pairs)
    if kind == "int4":
        parts = Int4(32).quantize(draw(num_rows, width))
        codes, scales, stride, scale_stride = *parts.values(), width // 2, 2 * (width // 32)
    else:
        codes = draw(num_rows, width, dtype=getattr(torch, {"bf16": "bfloat16"}.get(kind, kind)))
        scales, stride, scale_stride = torch.zeros(1), width * codes.element_size(), 0
    memory = [_Guarded() for _ in range(3)]
    addresses = memory[0].place(codes), memory[1].place(scales), memory[2].place(x)
    xs = np.array([addresses[2] + j * width * x.element_size() for j in range(4)])
    out, values = np.empty(4 * num_rows, np.float32), int4_values(pairs)
    like, address = (np.uint16(0) if pairs else np.float32(0)), tile.address(pairs)

    def run(beyond=0):
        for n, step in itertools.product((1, 2, 3, 4), (1, 4)):
            numbers = [num_rows, step, addresses[0], stride, addresses[1], scale_stride, values.ctypes.data]
            numbers += [0, width + beyond, xs.ctypes.data, n, out.ctypes.data]
            _products(address, like, np.array(numbers))

    run()  # compiled
    assert _signal_of(run) == 0
    assert _signal_of(lambda: run(32)) in (-signal.SIGSEGV, -signal.SIGBUS)  # control: a chunk more
