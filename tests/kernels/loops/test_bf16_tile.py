"""The tile of the bf16 GEMMs against float64, and its rounding against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfreeze.kernels.loops import bf16_cpu
from unfreeze.kernels.loops.bf16_tile import COLUMNS, ROWS, narrow_tile, tile
from unfreeze.kernels.loops.numba_options import serial

pytestmark = pytest.mark.skipif(not bf16_cpu.available(), reason="this CPU has no AVX512-bf16")


@serial
def _tile(a, panel, pairs, out):
    tile(a.ctypes.data, a.strides[0], panel.ctypes.data, pairs, out.ctypes.data, out.strides[0])


@serial
def _narrow(a, panel, pairs, out):
    narrow_tile(a.ctypes.data, a.strides[0], panel.ctypes.data, pairs, out.ctypes.data, out.strides[0])


def bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint16).numpy()


def operands(pairs: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """a [ROWS, 2 pairs] of a wider matrix, w [2 pairs, COLUMNS], and w as a panel."""
    generator = torch.Generator().manual_seed(pairs)
    a = torch.randn((ROWS, 2 * pairs + 10), generator=generator).bfloat16()[:, : 2 * pairs]
    w = torch.randn((2 * pairs, COLUMNS), generator=generator).bfloat16()
    low, high = bits(w[0::2].contiguous()).astype(np.uint32), bits(w[1::2].contiguous()).astype(np.uint32)
    return a, w, low | high << np.uint32(16)


@pytest.mark.parametrize("pairs", [1, 2, 17, 520])
def test_a_tile_is_the_product_in_float32(pairs: int):
    a, w, panel = operands(pairs)
    out = np.full((ROWS, COLUMNS), 7, np.float32)
    _tile(bits(a), panel, pairs, out)
    exact = a.double() @ w.double()
    # what rounding of a sum is relative to: 2^-24 each of `pairs` additions at most
    scale = a.double().abs() @ w.double().abs()
    assert ((torch.from_numpy(out).double() - exact).abs() <= scale * pairs * 2**-24 + 1e-30).all()


def test_a_lost_pair_is_seen():
    """Control arm: the same bound rejects a product without its last pair."""
    a, w, panel = operands(520)
    out = np.empty((ROWS, COLUMNS), np.float32)
    _tile(bits(a), panel, 519, out)
    exact, scale = a.double() @ w.double(), a.double().abs() @ w.double().abs()
    assert not ((torch.from_numpy(out).double() - exact).abs() <= scale * 520 * 2**-24).all()


@pytest.mark.parametrize("pairs", [1, 17, 520])
def test_the_narrow_tile_is_the_tile_rounded_as_torch_rounds(pairs: int):
    a, _, panel = operands(pairs)
    wide, narrow = np.empty((ROWS, COLUMNS), np.float32), np.full((ROWS, COLUMNS + 5), 7, np.uint16)
    _tile(bits(a), panel, pairs, wide)
    _narrow(bits(a), panel, pairs, narrow)
    assert (narrow[:, :COLUMNS] == bits(torch.from_numpy(wide).bfloat16())).all()
    assert (narrow[:, COLUMNS:] == 7).all()  # what stands beside it is left alone


def test_halves_are_rounded_to_even_and_nan_stays_nan():
    a, panel = torch.zeros(ROWS, 2, dtype=torch.bfloat16), np.zeros((1, COLUMNS), np.uint32)
    a[:, 0] = 1
    a[:, 1] = 2**-8
    one = int(bits(torch.ones(1).bfloat16())[0])
    panel[0, 0] = one | one << 16  # 1 + 2^-8: half way between 1 and 1 + 2^-7, to even is 1
    three = int(bits(torch.tensor([1 + 2**-7]).bfloat16())[0])
    panel[0, 1] = three | one << 16  # (1 + 2^-7) + 2^-8: to even is 1 + 2^-6
    panel[0, 2] = int(bits(torch.tensor([float("nan")]).bfloat16())[0])
    out = np.empty((ROWS, COLUMNS), np.uint16)
    _narrow(bits(a), panel, 1, out)
    found = torch.from_numpy(out).view(torch.bfloat16)
    assert found[0, 0] == 1 and found[0, 1] == 1 + 2**-6 and found[0, 2].isnan()
