"""Claims about the reference of expand: rows at a time it writes what dequantize gives of the whole, and holds little."""

from __future__ import annotations

import pytest
import torch

from unfreeze.kernels.expand import expand, expand_stack, reference
from unfreeze.quant import Fp8, Packed, nvfp4
from unfreeze.quant.codec import ByRows
from unfreeze.quant.fp8_scaled import COLUMN, MATRIX, ONE, ROWS, Fp8Scaled
from unfreeze.quant.halves import stacked
from unfreeze.quant.integers import MATRIX as WHOLE
from unfreeze.quant.integers import ROW, Integers
from unfreeze.quant.nvfp4 import Nvfp4

CODECS = [
    Fp8((16, 32)),
    *(Fp8Scaled(scales) for scales in (MATRIX, ONE, ROWS, COLUMN)),
    Nvfp4(),
    Nvfp4(nvfp4.MODELOPT),
    Integers(4, 32, zeros=True),
    Integers(2, 32, zeros=True),
    Integers(8, 32, permuted=True),
    Integers(8, ROW, zeros=True, packed=False),
    Integers(8, WHOLE, zeros=True, packed=False),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("at_once", [1, 64 * 21, 10**6])
def test_rows_at_a_time_are_the_rows_of_the_whole(codec, at_once, monkeypatch):
    """52 rows, in steps of one block of rows, of some, and of all; gate and up of a stack too."""
    monkeypatch.setattr(reference, "AT_ONCE", {"cpu": at_once})
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 52, 64, generator=generator) * torch.rand(3, 52, 1, generator=generator)
    both = stacked(codec, 52, 64)
    for packed in (Packed(codec, codec.quantize(weight)), Packed(both, both.quantize(weight))):
        out = torch.full((52, 64), float("nan"))
        reference.expand_reference(packed, 2, out)
        assert torch.equal(out, packed.dequantize()[2].float())
    assert isinstance(codec, ByRows)


def test_control_arm_scales_of_other_rows_are_seen(monkeypatch):
    monkeypatch.setattr(reference, "AT_ONCE", {"cpu": 64 * 8})
    weight = torch.randn(32, 64) * torch.rand(32, 1)

    class Shifted(Fp8Scaled):
        def rows(self, parts, first, last):
            return super().rows(parts, first, last) | {"weight_scale": parts["weight_scale"][: last - first]}

    packed = Packed(Shifted(), Shifted().quantize(weight))
    out = reference.expand_reference(packed, None, torch.empty(32, 64))
    assert torch.equal(out[:8], packed.dequantize()[:8]) and not torch.equal(out, packed.dequantize())


@pytest.mark.parametrize("codec", [Fp8((16, 32)), Fp8Scaled(MATRIX), Nvfp4()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_half_of_a_stack_is_expanded_by_what_reads_it(codec, dtype):
    """24 rows are no whole blocks of 16, so gate and up have their own parts; out lies within a wider workspace."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 48, 64, generator=generator)
    weight[:, 24:] *= 30
    both = stacked(codec, 48, 64)
    packed = Packed(both, both.quantize(weight))
    assert both is not codec
    space = torch.full((3, 50, 72), float("nan"), dtype=dtype)
    out, experts = space[:, :48, :64], (2, 0, 3)
    expand_stack(packed, experts, out)
    assert torch.equal(out, packed.dequantize()[list(experts)].to(dtype)) and space[:, 48:].isnan().all()
    space.fill_(float("nan"))
    assert torch.equal(expand(packed, 1, out[0]), packed.dequantize()[1].to(dtype))
