"""Panels from INT4 codes against the codec's own expansion: the same bits in another order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unfreeze.kernels.expand.codes import Int4Codes, int4_codes
from unfreeze.kernels.loops import bf16_cpu, int4_panels, panels
from unfreeze.kernels.loops.bf16_tile import COLUMNS
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

pytestmark = pytest.mark.skipif(not bf16_cpu.available(), reason="this CPU has no AVX512-bf16")


def packed(rows: int, columns: int, group: int) -> tuple[Int4Codes, np.ndarray]:
    """(codes and scales, bits of the expanded matrix). All 16 codes occur; scales of many sizes, some
    negative, one zero."""
    generator = torch.Generator().manual_seed(rows + columns + group)
    codec = Int4(group)
    parts = codec.quantize(torch.randn((1, rows, columns), generator=generator).bfloat16())
    scales = parts["weight_scale"]
    scales *= torch.exp2(torch.randint(-20, 20, scales.shape, generator=generator)).bfloat16()
    scales[:, ::3] *= -1
    scales[0, 0, 0] = 0
    weight = Packed(codec, parts)
    return int4_codes(weight), weight.dequantize()[0].view(torch.uint16).numpy().astype(np.uint32)


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low | high << np.uint32(16)


SHAPES = [(64, 64, 32), (128, 96, 32), (192, 256, 64), (64, 256, 128), (320, 64, 32)]


@pytest.mark.parametrize(("rows", "columns", "group"), SHAPES)
def test_the_columns_of_packed_rows_are_rows(rows: int, columns: int, group: int):
    weight, w = packed(rows, columns, group)
    for first in range(0, rows, COLUMNS):
        panel = np.full((columns // 2 + 3, COLUMNS), 7, np.uint32)
        int4_panels.pack_int4_rows(weight.codes[0], weight.scales[0], weight.group_bytes, first, panel)
        block = w[first : first + COLUMNS]
        assert (panel[: columns // 2] == pairs(block[:, 0::2], block[:, 1::2]).T).all()
        assert (panel[columns // 2 :] == 7).all()  # room for an adapter is left alone


@pytest.mark.parametrize(("rows", "columns", "group"), [shape for shape in SHAPES if shape[1] % COLUMNS == 0])
def test_the_columns_of_packed_columns_are_columns(rows: int, columns: int, group: int):
    weight, w = packed(rows, columns, group)
    for first in range(0, columns, COLUMNS):
        panel = np.full((rows // 2 + 3, COLUMNS), 7, np.uint32)
        int4_panels.pack_int4_columns(weight.codes[0], weight.scales[0], weight.group_bytes, first, panel)
        assert (
            panel[: rows // 2] == pairs(w[0::2, first : first + COLUMNS], w[1::2, first : first + COLUMNS])
        ).all()
        assert (panel[rows // 2 :] == 7).all()


def test_a_swapped_nibble_would_be_seen():
    """Control arm: with high nibbles first the panel differs."""
    weight, w = packed(64, 64, 32)
    swapped = (weight.codes[0] << 4) | (weight.codes[0] >> 4)
    panel = np.empty((32, COLUMNS), np.uint32)
    int4_panels.pack_int4_rows(swapped, weight.scales[0], weight.group_bytes, 0, panel)
    assert (panel != pairs(w[:, 0::2], w[:, 1::2]).T).any()
    assert (panel == pairs(w[:, 1::2], w[:, 0::2]).T).all()


def test_bf16_columns_are_packed_two_rows_a_word():
    rows = np.arange(4 * 128, dtype=np.uint16).reshape(4, 128)
    panel = np.full((5, COLUMNS), 7, np.uint32)
    panels.pack_bf16_columns(rows, 64, panel, 2)
    wide = rows.astype(np.uint32)[:, 64:]
    assert (
        (panel[2:4] == pairs(wide[0::2], wide[1::2])).all()
        and (panel[:2] == 7).all()
        and (panel[4] == 7).all()
    )
