"""Panels of float32 strips against the codecs' own expansion, of every format: the same numbers in another
order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfreeze.kernels.expand.codes import DenseWeights, codes_of
from unfreeze.kernels.expert_mlp.pack import append, pack_columns, pack_rows
from unfreeze.kernels.loops.bf16_tile import COLUMNS
from unfreeze.kernels.loops.float_tile import WIDTH
from unfreeze.kernels.loops.numba_options import array, serial
from unfreeze.kernels.loops.strips import fill_strip
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import Mxfp4


@serial
def _fill(weight, by_rows, first, panel):
    if by_rows:
        pack_rows(weight, 1, first, panel)
    else:
        pack_columns(weight, 1, first, panel)


@serial
def _append(rows, first, panel, begin, strip):
    append(rows, first, panel, begin)
    fill_strip(rows, 2, strip)


def scales(*shape: int) -> torch.Tensor:
    """Of many sizes, some negative, one zero."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(shape, generator=generator)
    made *= torch.exp2(torch.randint(-20, 20, shape, generator=generator))
    if made[1].numel() > 1:
        made[1, 0, 0] = 0
    return made


def int4(rows: int, columns: int, group: int) -> Packed:
    """All pairs of codes."""
    codes = torch.arange(2 * rows * columns // 2).to(torch.uint8).view(2, rows, -1)
    parts = {
        "weight_packed": codes.view(torch.int32),
        "weight_scale": scales(2, rows, columns // group).bfloat16(),
    }
    return Packed(
        Int4(group), parts | {"weight_shape": torch.tensor([[rows, columns]] * 2, dtype=torch.int32)}
    )


def mxfp4(rows: int, columns: int) -> Packed:
    """All pairs of codes, exponents from 2^-100 to 2^99."""
    codes = torch.arange(2 * rows * columns // 2).to(torch.uint8).view(2, rows, -1)
    exponents = (27 + torch.arange(2 * rows * columns // 32) % 200).to(torch.uint8).view(2, rows, -1)
    return Packed(Mxfp4(), {"weight_packed": codes, "weight_scale": exponents})


def fp8(rows: int, columns: int, block: tuple[int, int], scale: str = "F32") -> Packed:
    """All 256 codes but the two NaN."""
    codes = torch.arange(2 * rows * columns).to(torch.uint8).view(2, rows, columns)
    codes[(codes & 127) == 127] = 0
    made = scales(2, -(-rows // block[0]), -(-columns // block[1]))
    made = made.bfloat16() if scale == "BF16" else made
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": made}
    return Packed(Fp8(block, scale), parts)


def dense(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((2, 128, 192), generator=torch.Generator().manual_seed(0)).to(dtype)


WEIGHTS = {
    "int4": lambda: int4(128, 192, 32),
    "int4, groups of 64": lambda: int4(64, 256, 64),
    "mxfp4": lambda: mxfp4(128, 192),
    "fp8": lambda: fp8(256, 320, (128, 128)),
    "fp8, bf16 scales": lambda: fp8(128, 192, (64, 32), "BF16"),
    "fp8, a scale per row": lambda: fp8(128, 192, (1, 192)),
    "fp8, one scale": lambda: fp8(128, 192, (1 << 20, 1 << 20)),
    "dense float32": lambda: dense(torch.float32),
    "dense bf16": lambda: dense(torch.bfloat16),
}


def panel_of(weight: Packed | torch.Tensor, by_rows: bool, first: int, inner: int) -> np.ndarray:
    """[inner + 3, COLUMNS]; the last three rows were left alone."""
    panel = np.full((COLUMNS // WIDTH, inner + 3, WIDTH), 7, np.float32)
    codes = codes_of(weight) if isinstance(weight, Packed) else DenseWeights(array(weight))
    _fill(codes, by_rows, first, panel)
    assert (panel[:, inner:] == 7).all()
    return panel[:, :inner].transpose(1, 0, 2).reshape(inner, COLUMNS)


def expanded(weight: Packed | torch.Tensor) -> np.ndarray:
    """The second matrix, as the codec expands it, in float32."""
    whole = weight.dequantize() if isinstance(weight, Packed) else weight
    return whole[1].float().numpy()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_panel_is_the_weight_in_another_order(name: str):
    weight = WEIGHTS[name]()
    w = expanded(weight)
    assert np.unique(w).size > 30  # not all the same number
    for first in range(0, w.shape[0], COLUMNS):
        assert (panel_of(weight, True, first, w.shape[1]) == w[first : first + COLUMNS].T).all()
    for first in range(0, w.shape[1], COLUMNS):
        assert (panel_of(weight, False, first, w.shape[0]) == w[:, first : first + COLUMNS]).all()


@pytest.mark.parametrize("by_rows", [True, False])
def test_a_scale_of_its_neighbour_would_be_seen(by_rows: bool):
    """Control arm."""
    weight = WEIGHTS["int4"]()
    w = expanded(weight)
    weight.parts["weight_scale"][:] = weight.parts["weight_scale"].roll(1, -1)
    panel = panel_of(weight, by_rows, 0, w.shape[1 if by_rows else 0])
    assert (panel != (w[:COLUMNS].T if by_rows else w[:, :COLUMNS])).any()


def test_every_scale_rounds_as_bf16_does():
    """All 256 mantissas times all 16 codes, ties among them."""
    mantissas = (torch.arange(256) + 128 * 127).to(torch.int16).view(torch.bfloat16)
    weight = int4(128, 192, 32)
    weight.parts["weight_scale"].view(-1)[:] = mantissas.repeat(6)
    weight.parts["weight_scale"].view(2, 128, 6)[1] = mantissas.repeat(3).view(128, 6)
    w = expanded(weight)
    exact = (weight.parts["weight_scale"][1].float()[:, :, None] * torch.arange(-8.0, 8)).numpy()
    assert (exact.astype(np.float32).view(np.uint32) & 0xFFFF != 0).any()  # there is something to round
    assert (panel_of(weight, True, 64, 192) == w[64:].T).all()


def test_a_nan_stays_one():
    weight = WEIGHTS["fp8, bf16 scales"]()
    weight.parts["weight"].view(torch.uint8)[1, 3, 2] = 127
    assert np.isnan(panel_of(weight, True, 0, 192)[2, 3])
    assert np.isnan(panel_of(weight, False, 0, 128)[3, 2])


def test_factors_stand_below_the_weights_and_thin_ones_in_a_strip():
    rows = np.arange(5 * 128, dtype=np.float32).reshape(5, 128)
    panel = np.full((COLUMNS // WIDTH, 12, WIDTH), 7, np.float32)
    strip = np.full((1, 130, WIDTH), 7, np.float32)
    _append(rows, 64, panel, 6, strip)
    flat = panel.transpose(1, 0, 2).reshape(12, COLUMNS)
    assert (flat[6:11] == rows[:, 64:]).all() and (flat[:6] == 7).all() and (flat[11] == 7).all()
    assert (strip[0, :128, :3] == rows[2:].T).all() and (strip[0, :128, 3:] == 0).all()
    assert (strip[0, 128:] == 7).all()
