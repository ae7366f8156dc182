"""The loop that rounds into INT4 against the codec and quant/kept.py, bit for bit."""

import pytest
import torch

from unfreeze.kernels import int4_requantize as loop
from unfreeze.quant.aimed import aimed, factor_of
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import MAX_SCALE, Int4
from unfreeze.quant.kept import kept, refitted
from unfreeze.quant.requantize import requantized


def groups(kind: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(W as it is before packing, ΔW) [N, M], where the rounding has something to decide."""
    g = torch.Generator().manual_seed(0)
    W, change = (torch.randn(48, 4 * group, generator=g) * size for size in (1.0, 0.05))
    if kind == "large":  # many groups no longer fit their scale
        change *= 40
    if kind == "unchanged":  # every second row, and groups of zeros
        change[::2] = 0
        W[3:6, :group] = 0
        change[3, :group] = 0
        change[4, 0] = 1e-3
    if kind == "scales":  # every bf16 scale's neighbourhood, subnormal ones and the largest
        bits = torch.arange(1, 0x7F20, 0x7F20 // (48 * 4) + 1, dtype=torch.int16)[: 48 * 4]
        scale = bits.view(torch.bfloat16).float().clamp(max=MAX_SCALE).reshape(48, 4, 1)
        codes = torch.randint(-7, 8, (48, 4, group), generator=g)
        codes[..., 0] = 7
        W = (codes * scale).bfloat16().float().flatten(1)
        change = torch.zeros_like(W)
        change[1::3, ::group] = scale[1::3, :, 0] / 5
    if kind == "ties":
        W = torch.randint(-7, 8, (48, 4 * group), generator=g).float()
        W[:, ::group] = 7
        change = torch.randint(-2, 3, W.shape, generator=g) / 2
    return W, change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", ["refit", "keep"])
@pytest.mark.parametrize("kind", ["small", "large", "unchanged", "scales", "ties"])
@pytest.mark.parametrize("group", [32, 8])
def test_its_numbers_are_the_codecs_to_the_bit(group, kind, scales, dtype):
    codec, (W, change) = Int4(group), groups(kind, group)
    base = Packed(codec, codec.quantize(W.bfloat16()))
    merged = base.dequantize().float() + change
    theirs = codec.dequantize(requantized(codec, merged, base.parts, scales)).to(dtype)
    out = torch.full((48, W.shape[1] + 16), torch.nan, dtype=dtype)
    place = out[:, : W.shape[1]]  # rows of a larger workspace
    assert loop.rounds(codec, change, place)
    loop.requantize_int4(codec, merged, place, base if scales == "keep" else None)
    assert torch.equal(place, theirs) and out[:, W.shape[1] :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 3.7, 900.0])
@pytest.mark.parametrize("kind", ["small", "large", "unchanged", "scales", "ties"])
def test_codes_that_keep_the_length_are_those_of_quant_aimed(kind, factor, dtype):
    codec, (W, change) = Int4(32), groups(kind, 32)
    base = Packed(codec, codec.quantize(W.bfloat16()))
    w = base.dequantize().float()
    on = kept(codec, w + change, base.parts, refitted(codec, w + change, base.parts))
    theirs = codec.dequantize(aimed(codec, w + factor * change, on)[0]).to(dtype)
    out = torch.full(W.shape, torch.nan, dtype=dtype)
    loop.requantize_int4(codec, w, out, base, change, factor)
    assert torch.equal(out, theirs)
    if factor > 1 and kind == "small":  # control arm: the nearest codes are others
        loop.requantize_int4(codec, w, out, base, change)
        assert not torch.equal(out, theirs)


def test_a_number_that_is_not_finite_spoils_its_group_alone():
    codec, (W, change) = Int4(32), groups("small", 32)
    change[0, 0], change[1, 40] = torch.nan, torch.inf
    out = torch.empty_like(W)
    loop.requantize_int4(codec, W + change, out)
    assert out[0, :32].isnan().all() and out[1, 32:64].isnan().all() and int(out.isnan().sum()) == 64


def test_other_formats_and_layouts_are_left_to_the_codec():
    w = torch.zeros(4, 64)
    assert not loop.rounds(Int4(32, "F16"), w, w) and not loop.rounds(object(), w, w)
    across = torch.zeros(64, 4).t()
    assert not loop.rounds(Int4(32), across, w) and not loop.rounds(Int4(32), w, across)
    assert not loop.rounds(Int4(32), w, w.double()) and loop.rounds(Int4(32), w, w)


@pytest.mark.parametrize("kind", ["small", "large", "unchanged", "scales", "ties"])
@pytest.mark.parametrize("group, size", [(32, 1.0), (32, 0.03), (8, 0.1), (6, 0.3)])
def test_its_factor_is_that_of_quant_aimed(group, size, kind, monkeypatch):
    codec, (W, change) = Int4(group), groups(kind, group)
    change = (change * size).contiguous()
    base = Packed(codec, codec.quantize(W.bfloat16()))
    w = base.dequantize().float()
    theirs = factor_of(codec, w, change, base.parts)
    asked = []
    monkeypatch.setattr(loop, "factor_of", lambda *own: asked.append(own) or theirs)
    assert loop.factor_int4(codec, w, change, base) == theirs
    # a share of exactly 1 is asked for again: both sums may end on either side of it
    assert not asked or kind in ("ties", "scales")
    if kind == "small" and size < 1:  # control arm: another ΔW has another factor
        assert loop.factor_int4(codec, w, change * 2, base) != theirs > 1


def test_a_change_in_later_rows_alone_has_its_factor():
    """c is of the first block of rows that change, as in a merge."""
    codec = Int4(32)
    W = torch.randn(4096, 256, generator=torch.Generator().manual_seed(1))
    base = Packed(codec, codec.quantize(W.bfloat16()))
    w, change = base.dequantize().float(), torch.zeros(4096, 256)
    assert loop.factor_int4(codec, w, change, base) == 1.0
    change[3000:] = 0.01 * torch.randn(1096, 256, generator=torch.Generator().manual_seed(2))
    factor = loop.factor_int4(codec, w, change, base)
    assert factor == factor_of(codec, w, change, base.parts) > 1
    for value in (torch.nan, torch.inf):  # no row of that block tells anything, and no other changes
        change[2048, 7] = value
        assert loop.factor_int4(codec, w, change, base) == factor_of(codec, w, change, base.parts)
    change[2048:], change[5, 5] = 0, torch.inf
    assert loop.factor_int4(codec, w, change, base) == 1.0
