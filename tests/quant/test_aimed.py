"""merge --scales keep-change: the elements nearest to the next code move, as many as hold the length of ΔW."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfreeze.compress.rounding import _requantized
from unfreeze.quant import Fp8, aimed
from unfreeze.quant.aimed import factor_of
from unfreeze.quant.int4 import Int4, unpack_int4
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.nvfp4 import Nvfp4

SHAPE = (96, 256)
FORMATS = {"int4": Int4(32), "fp8": Fp8((32, 32)), "mxfp4": Mxfp4(), "nvfp4": Nvfp4()}


def matrix(codec, size: float):
    """(W on its grid, its parts, ΔW of rank 4 with ‖ΔW‖ = size ‖W‖)."""
    generator = torch.Generator().manual_seed(0)
    parts = codec.quantize(0.02 * torch.randn(SHAPE, generator=generator))
    W = codec.dequantize(parts).float()
    change = torch.randn(SHAPE[0], 4, generator=generator) @ torch.randn(4, SHAPE[1], generator=generator)
    return W, parts, change * (size * W.norm() / change.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_the_change_keeps_its_length_where_the_nearest_code_drops_it(name):
    codec = FORMATS[name]
    W, parts, change = matrix(codec, 0.01 if name != "fp8" else 0.004)
    written, ways = _requantized(codec, W, change, parts, "keep-change")
    assert ways["keep-change"].kept == pytest.approx(1, abs=0.02)
    assert ways["keep"].kept < 0.6  # the control arm: the nearest codes
    moved = (codec.dequantize(written).float() - W).double()
    assert float((moved * change).sum() / change.double().square().sum()) == pytest.approx(
        ways["keep-change"].kept, abs=1e-6
    )


def test_the_moved_codes_are_those_of_the_smallest_sufficient_factor():
    """Against numpy in float64, which tries every c at which some code moves, from the smallest on."""
    codec = FORMATS["int4"]
    W, parts, change = matrix(codec, 0.01)
    written, _ = _requantized(codec, W, change, parts, "keep-change")
    codes = unpack_int4(written["weight_packed"], SHAPE[1]).numpy().astype(int)
    before = unpack_int4(parts["weight_packed"], SHAPE[1]).numpy().astype(int)
    scale = np.repeat(parts["weight_scale"].double().numpy(), 32, axis=1)
    delta = change.double().numpy()
    steps, off = delta / scale, W.double().numpy() / scale - before  # W = bf16(code · scale)
    assert np.abs(steps).max() < 0.5  # else the nearest would move codes by itself

    def moves(c: float) -> np.ndarray:
        return np.clip(before + np.rint(off + c * steps), -8, 7) - before

    halves = [(half - np.sign(steps) * off) / np.abs(steps) for half in (0.5, 1.5)]
    tried = np.sort(np.concatenate(halves, axis=None)) * (1 + 1e-9)
    along = (np.sum(scale * moves(c) * delta) for c in tried)
    first = next(c for c, length in zip(tried, along, strict=True) if length >= np.sum(delta**2))
    count = int((moves(first) != 0).sum())
    assert count > 100
    different = int((codes - before != moves(first)).sum())
    assert different <= 0.02 * count  # c stops within 1 % of the length


def test_a_large_change_is_rounded_to_the_nearest_codes():
    codec = FORMATS["int4"]
    W, parts, change = matrix(codec, 1.0)
    assert factor_of(codec, W, change, parts) == pytest.approx(1, abs=0.01)
    near, _ = _requantized(codec, W, change, parts, "keep")
    aim, ways = _requantized(codec, W, change, parts, "keep-change")
    same = near["weight_packed"].eq(aim["weight_packed"]).float().mean()
    assert same > 0.95 and ways["keep-change"].kept > 0.99


@pytest.mark.parametrize("name", FORMATS)
def test_a_change_that_is_zero_or_not_finite_has_the_factor_1(name):
    codec = FORMATS[name]
    W, parts, change = matrix(codec, 0.004)
    assert factor_of(codec, W, change, parts) > 1  # control arm
    assert factor_of(codec, W, 0 * change, parts) == 1.0
    for value in (torch.nan, torch.inf, -torch.inf):
        bad = change.clone()
        bad[3, 5] = value
        assert factor_of(codec, W, bad, parts) == 1.0


def test_rows_at_a_time_share_one_factor(monkeypatch):
    """c is of the first rows alone: what it is found on is a sample of a large matrix."""
    codec = FORMATS["int4"]
    W, parts, change = matrix(codec, 0.01)
    whole = factor_of(codec, W, change, parts)
    W[5] = change[5] = 0  # a padded row, whose scales are 0, tells nothing
    parts = codec.quantize(W)
    assert factor_of(codec, W, change, parts) == pytest.approx(whole, rel=0.01)
    assert factor_of(codec, W, change / 100, parts) > 100  # the steps of a small learning rate
    monkeypatch.setattr("unfreeze.quant.requantize.BLOCK", 32 * SHAPE[1])
    assert factor_of(codec, W, change, parts) == pytest.approx(whole, rel=0.1)
    change[:32] = 0  # rows without a change tell nothing
    assert 1 < factor_of(codec, W, change, parts) < aimed.LARGEST
