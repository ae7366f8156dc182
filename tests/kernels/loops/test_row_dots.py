"""Weight rows times vectors inside numba loops: the weights bit for bit those of the format, the sums within
float32's rounding of float64's."""

import numba
import numpy as np
import pytest
import torch

from unfreeze.kernels.loops import row_dots as module
from unfreeze.kernels.loops.numba_options import array
from unfreeze.quant.int4 import Int4


def loops():
    """(int4, bf16): compiled now, so that a changed `_looks_up` shows. Each: a stack of rows times rows of x
    (in halves)."""
    dots = numba.njit(module.row_dots.py_func)
    make_int4, make_bf16 = numba.njit(module.int4_row.py_func), numba.njit(module.bf16_row.py_func)

    @numba.njit
    def int4(codes, scales, half, x, rows, out):
        for o in range(out.shape[0]):
            dots(make_int4(codes[o], scales[o], half), x, rows, out[o])

    @numba.njit
    def bf16(weights, x, rows, out):
        for o in range(out.shape[0]):
            dots(make_bf16(weights[o]), x, rows, out[o])

    return int4, bf16


def in_halves(x: torch.Tensor) -> np.ndarray:
    return torch.cat((x[:, 0::2], x[:, 1::2]), 1).contiguous().numpy()


@pytest.fixture(scope="module", params=["looked up", "computed"])
def compiled(request):
    """Once for all tests: compiling takes seconds. numba asks `_looks_up` at the first call, here too."""
    if request.param == "looked up" and not module._looks_up():
        pytest.skip("no AVX-512")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "computed":
            patch.setattr(module, "_looks_up", lambda: False)
        yield request.param, *loops()


def every_code(group: int) -> dict[str, torch.Tensor]:
    """All 16 codes under 2,048 scales drawn from all bf16 numbers: subnormal, huge, infinite and NaN ones
    included."""
    scales = (
        torch.randint(-(2**15), 2**15, (256, 8), generator=torch.Generator().manual_seed(0))
        .to(torch.int16)
        .view(torch.bfloat16)
    )
    codes = torch.arange(group).repeat(256, 8) * 5 % 16
    packed = (codes.view(256, -1, 8) << (4 * torch.arange(8))).sum(-1)
    return {"weight_packed": packed.to(torch.uint32).view(torch.int32), "weight_scale": scales}


@pytest.mark.parametrize("group", [32, 64])
def test_every_weight_has_the_bits_of_the_format(compiled, group):
    """Oracle: quant/int4.py, equal to compressed-tensors. A unit vector picks out one weight: 0 · w is exact
    where w is finite."""
    kind, int4, _ = compiled
    parts = every_code(group)
    want = Int4(group).dequantize(parts).float()
    rows, width = want.shape
    codes, scales = parts["weight_packed"].view(torch.uint8).numpy(), array(parts["weight_scale"])
    got = torch.empty(rows, width)
    int4(codes, scales, group // 2, in_halves(torch.eye(width)), np.arange(width), got.numpy())
    finite = want.isfinite().all(1)
    assert finite.sum() > 200 and torch.equal(got[finite], want[finite])
    assert kind == "computed" or module._looks_up()
    # control: one step more in the nibble is another weight almost everywhere
    int4(codes ^ np.uint8(1), scales, group // 2, in_halves(torch.eye(width)), np.arange(width), got.numpy())
    assert not torch.equal(got[finite], want[finite])


@pytest.mark.parametrize("num_rows", range(1, 10))
def test_sums_are_float64s(compiled, num_rows):
    """Any number of vectors at once, in any order. float32 sums of 192 terms: 192 · 2^-24 of the sum of
    absolute values at the very most."""
    _, int4, bf16 = compiled
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(9, 192, generator=generator)
    rows = torch.randperm(9, generator=generator)[:num_rows]
    parts = Int4(32).quantize(torch.randn(7, 192, generator=generator))
    dense = torch.randn(7, 192, generator=generator).bfloat16()
    for weight in (Int4(32).dequantize(parts), dense):
        out = np.empty((7, num_rows), np.float32)
        if weight is dense:
            bf16(array(dense), in_halves(x), rows.numpy(), out)
        else:
            int4(
                parts["weight_packed"].view(torch.uint8).numpy(),
                array(parts["weight_scale"]),
                16,
                in_halves(x),
                rows.numpy(),
                out,
            )
        want, bound = weight.double() @ x[rows].double().T, weight.double().abs() @ x[rows].double().abs().T
        assert ((torch.from_numpy(out) - want).abs() <= 192 * 2**-24 * bound).all()


def test_halves_puts_even_elements_first():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = np.empty((3, 8), np.float32)
    numba.njit(module.halves.py_func)(array(x), out)
    assert np.array_equal(out, in_halves(x.float()))
