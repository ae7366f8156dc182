"""Panels from MXFP4 and FP8 codes against the codecs' own expansion: the same bits in another order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfreeze.kernels.expand.codes import Fp4Codes, Fp8Codes, codes_of
from unfreeze.kernels.loops import bf16_cpu, float_panels
from unfreeze.kernels.loops.bf16_tile import COLUMNS
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.mxfp4 import Mxfp4

pytestmark = pytest.mark.skipif(not bf16_cpu.available(), reason="this CPU has no AVX512-bf16")


def mxfp4(rows: int, columns: int) -> Packed:
    """All 16 codes, exponents from 2^-100 to 2^99."""
    codes = torch.arange(rows * columns // 2).to(torch.uint8).view(1, rows, -1)
    scales = (27 + torch.arange(rows * columns // 32) % 200).to(torch.uint8).view(1, rows, -1)
    return Packed(Mxfp4(), {"weight_packed": codes, "weight_scale": scales})


def fp8(rows: int, columns: int, block: tuple[int, int]) -> Packed:
    """All 256 codes but the two NaN, scales of many sizes, some negative, one zero."""
    codes = torch.arange(rows * columns).to(torch.uint8).view(1, rows, columns)
    codes[(codes & 127) == 127] = 0
    shape = (1, -(-rows // block[0]), -(-columns // block[1]))
    scales = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    scales *= torch.exp2(torch.arange(scales.numel()).view(shape) % 40 - 20)
    scales[0, 0, 0] = 0
    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales}
    return Packed(Fp8(block), parts)


WEIGHTS = {
    "mxfp4": lambda: mxfp4(128, 192),
    "mxfp4 one group": lambda: mxfp4(64, 64),
    "fp8": lambda: fp8(256, 320, (128, 128)),
    "fp8 a scale per row": lambda: fp8(128, 192, (1, 192)),
    "fp8 one scale": lambda: fp8(128, 192, (1 << 20, 1 << 20)),
}


def packed_panel(weight: Packed, way: str, first: int, panel: np.ndarray) -> None:
    codes = codes_of(weight)
    if isinstance(codes, Fp4Codes):
        getattr(float_panels, f"pack_mxfp4_{way}")(codes.codes[0], codes.scales[0], first, panel)
        return
    assert isinstance(codes, Fp8Codes)
    pack = getattr(float_panels, f"pack_fp8_{way}")
    pack(codes.codes[0], codes.scales[0], codes.rows, codes.columns, first, panel)


def bits_of(weight: Packed) -> np.ndarray:
    return weight.dequantize()[0].bfloat16().view(torch.uint16).numpy().astype(np.uint32)


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high << np.uint32(16)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_columns_of_packed_rows_are_rows(name: str):
    weight = WEIGHTS[name]()
    w = bits_of(weight)
    rows, columns = w.shape
    for first in range(0, rows, COLUMNS):
        panel = np.full((columns // 2 + 3, COLUMNS), 7, np.uint32)
        packed_panel(weight, "rows", first, panel)
        block = w[first : first + COLUMNS]
        assert (panel[: columns // 2] == pairs(block[:, 0::2], block[:, 1::2]).T).all()
        assert (panel[columns // 2 :] == 7).all()  # room for an adapter is left alone


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_columns_of_packed_columns_are_columns(name: str):
    weight = WEIGHTS[name]()
    w = bits_of(weight)
    rows, columns = w.shape
    for first in range(0, columns, COLUMNS):
        panel = np.full((rows // 2 + 3, COLUMNS), 7, np.uint32)
        packed_panel(weight, "columns", first, panel)
        here = w[:, first : first + COLUMNS]
        assert (panel[: rows // 2] == pairs(here[0::2], here[1::2])).all()
        assert (panel[rows // 2 :] == 7).all()


def test_control_arm_the_scale_of_the_next_block_is_seen():
    weight = WEIGHTS["fp8"]()
    w = bits_of(weight)
    weight.parts["weight_scale_inv"][:] = weight.parts["weight_scale_inv"].roll(1, -1)
    panel = np.empty((160, COLUMNS), np.uint32)
    packed_panel(weight, "rows", 0, panel)
    assert (panel != pairs(w[:64, 0::2], w[:64, 1::2]).T).any()


def test_a_nan_stays_one():
    weight = WEIGHTS["fp8"]()
    weight.parts["weight"].view(torch.uint8)[0, 0, 2] = 127
    weight.parts["weight_scale_inv"][0, 0, 0] = 1
    panel = np.empty((160, COLUMNS), np.uint32)
    packed_panel(weight, "rows", 0, panel)
    low = panel[1, 0].astype(np.uint32) << np.uint32(16)
    assert np.isnan(low.view(np.float32))
