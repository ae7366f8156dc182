"""The tile of the float32 GEMMs against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfreeze.kernels.loops.float_tile import ROWS, WIDTH, tile
from unfreeze.kernels.loops.numba_options import serial


@serial
def _tile(a, strip, inner, fresh, out):
    tile(
        a.ctypes.data,
        a.strides[0],
        strip.ctypes.data,
        strip.strides[0],
        inner,
        fresh,
        out.ctypes.data,
        out.strides[0],
    )


def operands(inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a [ROWS, inner] and w [inner, WIDTH], both of wider matrices."""
    generator = torch.Generator().manual_seed(inner)
    a = torch.randn((ROWS, inner + 3), generator=generator)[:, :inner]
    return a, torch.randn((inner, WIDTH + 5), generator=generator)[:, :WIDTH]


def outside(out: np.ndarray, before: torch.Tensor, a: torch.Tensor, w: torch.Tensor, inner: int) -> bool:
    """Whether any sum is further from float64 than 2^-24 of its terms' sizes for each addition."""
    exact = before.double() + a.double() @ w.double()
    scale = before.double().abs() + a.double().abs() @ w.double().abs()
    return bool(((torch.from_numpy(out).double() - exact).abs() > scale * (inner + 1) * 2**-24).any())


@pytest.mark.parametrize("inner", [1, 2, 17, 520])
def test_a_tile_is_the_product(inner: int):
    a, w = operands(inner)
    out = np.full((ROWS, WIDTH + 5), np.nan, np.float32)
    _tile(a.numpy(), w.numpy(), inner, 1, out)
    assert not outside(out[:, :WIDTH], torch.zeros(ROWS, WIDTH), a, w, inner)
    assert np.isnan(out[:, WIDTH:]).all()  # what stands beside it is left alone


def test_it_adds_to_what_is_there():
    """And two halves, one added to the other, are the whole to the bit: each sum has one order."""
    a, w = operands(520)
    whole, halves = np.empty((ROWS, WIDTH), np.float32), np.empty((ROWS, WIDTH), np.float32)
    _tile(a.numpy(), w.numpy(), 520, 1, whole)
    _tile(a.numpy(), w.numpy(), 256, 1, halves)
    _tile(a[:, 256:].numpy(), w[256:].numpy(), 264, 0, halves)
    assert (whole == halves).all()


def test_a_lost_index_is_seen():
    """Control arm: the same bound rejects a product without its last term."""
    a, w = operands(520)
    out = np.empty((ROWS, WIDTH), np.float32)
    _tile(a.numpy(), w.numpy(), 519, 1, out)
    assert outside(out, torch.zeros(ROWS, WIDTH), a, w, 520)
