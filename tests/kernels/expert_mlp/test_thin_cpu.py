"""The thin bf16 GEMMs against float64: as exact as float32 sums are, whatever the strides, and refused where
they cannot run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp import thin_cpu

needed = pytest.mark.skipif(not thin_cpu.available(), reason="this CPU has no AVX512-bf16")


def random(rows: int, width: int, beside: int = 0) -> Tensor:
    """[rows, width] bf16, a block of a matrix that is wider by `beside` columns."""
    generator = torch.Generator().manual_seed(rows * 1000 + width)
    return torch.randn((rows, width + beside), generator=generator).bfloat16()[:, :width]


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted).norm() / wanted.norm())


@needed
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 16, 112, 128])
@pytest.mark.parametrize(("width", "columns"), [(32, 8), (96, 16), (1024, 8), (512, 32)])
def test_dots_equal_float64_to_one_rounding(rows: int, width: int, columns: int):
    a, b = random(rows, width, 8), random(columns, width)
    whole = torch.full((rows, width + columns), 7.0, dtype=torch.bfloat16)
    assert thin_cpu.dots(a, b, whole[:, width:])
    exact = a.double() @ b.double().t()
    # half a step of bf16 (2^-9) of each number, and the float32 sum of `width` products, which is far below
    # it
    near = (whole[:, width:].double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * width**0.5
    assert near.all()
    assert (whole[:, :width] == 7).all()  # what stands beside the result is left alone


@needed
@pytest.mark.parametrize("rows", [2, 16, 112, 130])
@pytest.mark.parametrize(("width", "columns"), [(32, 8), (96, 16), (1024, 16), (512, 32)])
def test_outer_equals_float64_to_float32(rows: int, width: int, columns: int):
    a, b = random(rows, columns, width), random(rows, width, 16)
    out = torch.full((columns + 1, width), 7.0)
    assert thin_cpu.outer(a, b, out[:columns])
    # float32 sums of up to 130 products: 2^-24 · sqrt(130)
    assert error(out[:columns], a.double().t() @ b.double()) < 1e-6
    assert (out[columns] == 7).all()


@needed
def test_the_tolerance_sees_a_lost_row():
    """Control arm: without its last pair of rows the same sum is far outside."""
    a, b, out = random(112, 8), random(112, 64), torch.empty(8, 64)
    assert thin_cpu.outer(a[:110], b[:110], out)
    assert error(out, a.double().t() @ b.double()) > 1e-2


def test_what_does_not_suit_is_refused_and_left_alone():
    out = torch.full((16, 8), 7.0, dtype=torch.bfloat16)
    assert not thin_cpu.dots(random(16, 40), random(8, 40), out)  # width
    assert not thin_cpu.dots(random(16, 64).float(), random(8, 64).float(), out)  # dtype
    assert not thin_cpu.dots(random(64, 16).t(), random(8, 64), out)  # stride
    # too many columns
    assert not thin_cpu.dots(random(16, 64), random(40, 64), torch.empty(16, 40, dtype=torch.bfloat16))
    wide = torch.full((8, 64), 7.0)
    assert not thin_cpu.outer(random(15, 8), random(15, 64), wide)  # an odd row has no pair
    assert not thin_cpu.outer(random(16, 8), random(16, 40), wide[:, :40])
    assert not thin_cpu.outer(random(16, 8), random(16, 64), wide.bfloat16())
    assert (out == 7).all() and (wide == 7).all()
