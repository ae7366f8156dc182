"""New codes on existing scales: for a weight that was quantized before and has changed a little.

    code = the nearest to w / scale

A group's scale, and its zero point if it has one, is kept if its codes can hold every w of the group within
half a step; otherwise it is computed again. A format that is not in `ONTO`, and has no grid (quant/grids.py),
has no such function yet: its scales can only be computed again, by `quantize`.

Shapes: W [out, in]; scales as in the codec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.codec import Codec
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.grids import Gridded
from unfreeze.quant.int4 import OFFSET, Int4, pack_int4
from unfreeze.quant.integers import MATRIX, Integers, pack
from unfreeze.quant.mxfp4 import GROUP, Mxfp4, pack_e2m1, round_to_e2m1
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4
from unfreeze.quant.scaled import MAX_E4M3, by_exponents, to_e4m3

if TYPE_CHECKING:
    from torch import Tensor

Parts = Mapping[str, "Tensor"]


def can_keep(codec: Codec) -> bool:
    """True if this format's codes can be computed on existing scales."""
    plain = not isinstance(codec, Integers) or not (codec.zeros or codec.permuted)
    return isinstance(codec, Gridded) or (type(codec) in ONTO and plain)


def by_rows(codec: Codec) -> bool:
    """True if ranges of rows, split at the codec's `rows_at`, are quantized independently."""
    if isinstance(codec, Fp8Scaled):
        return "out" in codec.scales
    if isinstance(codec, Integers):
        return codec.group != MATRIX and not codec.zeros
    return isinstance(codec, (Int4, Fp8, Mxfp4, Mxfp8))


def refitted(codec: Codec, weight: Tensor, stored: Parts | None = None) -> dict[str, Tensor]:
    """`codec.quantize` of float32 W, with every part in its dtype in `stored`.

    If the cast rounds a scale, it is no longer the one that the codes were computed with. Then the codes are
    computed again; or, if that is not implemented, W is rounded to the scales' dtype first. NVFP4 keeps the
    number of the matrix in `stored`, which others share, while it serves W.
    """
    import torch

    if stored is None:
        return codec.quantize(weight)
    if isinstance(codec, Gridded):  # columns keep the base's groups
        grid = codec.grid(stored).made_for(weight)
        return codec.written(grid.codes(weight)[0], grid)
    if isinstance(codec, Bits4):
        return codec.refit(weight, stored)
    dtype = stored[codec.suffixes[1]].dtype
    half = dtype in (torch.bfloat16, torch.float16) and not can_keep(codec)
    fresh = _anew(codec, weight.to(dtype) if half else weight, stored)
    cast = {suffix: part.to(stored[suffix].dtype) for suffix, part in fresh.items()}
    rounded = any(
        part.dtype != cast[suffix].dtype and bool((cast[suffix].to(part.dtype) != part).any())
        for suffix, part in fresh.items()
    )
    return ONTO[type(codec)](codec, weight, cast)[0] if rounded and can_keep(codec) else cast


def _anew(codec: Codec, weight: Tensor, stored: Parts) -> dict[str, Tensor]:
    if isinstance(codec, Nvfp4):
        whole = stored[codec.names.whole]
        if whole.numel() and codec.keeps(weight, whole):
            return codec.quantize(weight, whole)
    return codec.quantize(weight)


def kept(codec: Codec, weight: Tensor, parts: Parts, fresh: Parts) -> tuple[dict[str, Tensor], int]:
    """(parts on the scales of `parts`, number of scales that could not be kept and come from `fresh`)."""
    import torch

    if isinstance(codec, Gridded):
        grid = codec.grid(parts)
        codes, over = grid.codes(weight)
        if over.any():
            grid = grid.mixed(codec.grid(fresh), over)
            codes, _ = grid.codes(weight)
        return codec.written(codes, grid), int(over.sum())
    onto, scale = ONTO[type(codec)], codec.suffixes[1]
    requantized, over = onto(codec, weight, parts)
    count = int(over.sum())
    if count:
        if isinstance(codec, Nvfp4):  # with the per-tensor scale unchanged
            fresh = {scale: _nvfp4_scales(codec, weight, parts)}
        mixed = torch.where(over, fresh[scale].float(), parts[scale].float()).to(parts[scale].dtype)
        requantized, _ = onto(codec, weight, {**parts, scale: mixed})
    return requantized, count


def on_scales(codec: Codec, weight: Tensor, parts: Parts) -> dict[str, Tensor]:
    """The nearest codes on the scales of `parts`; a weight beyond their range gets the outermost code."""
    if isinstance(codec, Gridded):
        grid = codec.grid(parts)
        return codec.written(grid.codes(weight)[0], grid)
    return ONTO[type(codec)](codec, weight, parts)[0]


def _int4(codec: Int4, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:
    """Codes -8..7: the format holds -8, though Kimi's own quantizer does not use it."""
    import torch

    scale = parts["weight_scale"]
    steps = weight.float().reshape(*scale.shape, codec.group_size) / _nonzero(scale).unsqueeze(-1)
    over = (steps.amax(-1) > OFFSET - 0.5) | (steps.amin(-1) < -OFFSET - 0.5)
    over |= (scale == 0) & weight.reshape(steps.shape).ne(0).any(-1)
    codes = steps.round().clamp(-OFFSET, OFFSET - 1).masked_fill((scale == 0).unsqueeze(-1), 0)
    return {"weight_packed": pack_int4(codes.to(torch.int8).flatten(-2)), "weight_scale": scale}, over


def _fp8(codec: Fp8, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:
    """A block with |w / scale| above 448 + 16, half a step over the largest code, cannot keep its scale."""
    import torch

    name, (rows, columns) = codec.suffixes[1], codec.block
    scale, (out_features, in_features) = parts[name], weight.shape[-2:]
    each = _nonzero(scale).repeat_interleave(rows, -2)[..., :out_features, :]
    steps = weight.float() / each.repeat_interleave(columns, -1)[..., :in_features]
    down, across = scale.shape[-2:]
    blocks = torch.zeros(*steps.shape[:-2], down * rows, across * columns)
    blocks[..., :out_features, :in_features] = steps.abs()
    over = blocks.view(*steps.shape[:-2], down, rows, across, columns).amax((-3, -1)) > MAX_E4M3 + 16
    codes = to_e4m3(steps)
    return {"weight": codes.contiguous(), name: scale}, over


def _mxfp4(codec: Mxfp4, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:
    """A group with |w / scale| above 7, half a step (1) over the largest code 6, cannot keep its scale."""

    scales = parts[codec.names.scales]
    steps = by_exponents(weight.float().reshape(*scales.shape, GROUP), scales)
    codes = codec.laid_out(pack_e2m1(round_to_e2m1(steps)))
    return {codec.names.codes: codes, codec.names.scales: scales}, steps.abs().amax(-1) > 7


def _fp8_scaled(codec: Fp8Scaled, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:
    """As for blocks, with a scale per row or matrix."""

    scale = parts[codec.scale]
    rows = weight.shape[-2] if "out" in codec.scales else 1
    steps = weight.float() / _nonzero(scale).reshape(rows, 1)
    over = steps.abs().amax(-1) > MAX_E4M3 + 16
    over = over.reshape(scale.shape) if rows > 1 or "out" in codec.scales else over.any().reshape(scale.shape)
    return {"weight": to_e4m3(steps), codec.scale: scale}, over


def _mxfp8(codec: Mxfp8, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:

    scales = parts["weight_scale"]
    steps = by_exponents(weight.float().reshape(*scales.shape, GROUP), scales)
    codes = to_e4m3(steps.flatten(-2))
    return {"weight": codes, "weight_scale": scales}, steps.abs().amax(-1) > MAX_E4M3 + 16


def _nvfp4(codec: Nvfp4, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:
    """The per-tensor (global) scale is always kept."""
    codes, scale, whole = codec.suffixes
    each = codec.effective(parts[scale].float(), parts[whole].reshape(1, 1))
    steps = weight.float().reshape(*each.shape, -1) / _nonzero(each).unsqueeze(-1)
    packed = {
        codes: pack_e2m1(round_to_e2m1(steps.flatten(-2) + 0.0)),
        scale: parts[scale],
        whole: parts[whole],
    }
    return packed, steps.abs().amax(-1) > 7


def _nvfp4_scales(codec: Nvfp4, weight: Tensor, parts: Parts) -> Tensor:
    """Group scales from each group's absmax, the per-tensor scale unchanged; at most 448, e4m3's maximum."""
    import torch

    _, scale, whole = codec.suffixes
    absmax = weight.float().reshape(*parts[scale].shape, -1).abs().amax(-1)
    one = codec.effective(torch.ones(()), parts[whole].reshape(()))  # the factor that a scale of 1 means
    return (absmax / 6 / one).clamp(2.0**-9, MAX_E4M3).to(torch.float8_e4m3fn)


def _integers(codec: Integers, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:
    """Codes from -2 ** (bits - 1), without zero points."""
    import torch

    scale, low, high = parts["weight_scale"], -(1 << (codec.bits - 1)), (1 << (codec.bits - 1)) - 1
    each = _nonzero(scale).reshape(-1, scale.shape[-1] if scale.dim() > 1 else 1)
    steps = weight.float().reshape(weight.shape[0], each.shape[-1], -1) / each.unsqueeze(-1)
    over = (steps > high + 0.5) | (steps < low - 0.5)
    over = over.any(-1) if scale.dim() > 1 else over.any().reshape(scale.shape)
    codes = steps.round().clamp(low, high).flatten(-2).to(torch.int8)
    return {codec.codes: pack(codes, codec.bits) if codec.packed else codes, "weight_scale": scale}, over


def _bits8(codec: Bits8, weight: Tensor, parts: Parts) -> tuple[dict[str, Tensor], Tensor]:
    """SCB is the absmax of a row, 127 steps."""
    import torch

    scale = parts["SCB"]
    steps = weight.float() * (127 / _nonzero(scale)).unsqueeze(-1)
    over = (steps.amax(-1) > 127.5) | (steps.amin(-1) < -128.5)
    over |= (scale == 0) & weight.ne(0).any(-1)
    return {"weight": steps.round().clamp(-128, 127).to(torch.int8), "SCB": scale}, over


def _nonzero(scale: Tensor) -> Tensor:
    """The scale in float32, with 1 for a scale of 0."""
    import torch

    numbers = scale.float()
    return torch.where(numbers == 0, 1.0, numbers)


ONTO: dict[type, Callable[[Any, Tensor, Parts], tuple[dict[str, Tensor], Tensor]]] = {
    Int4: _int4,
    Fp8: _fp8,
    Fp8Scaled: _fp8_scaled,
    Mxfp4: _mxfp4,
    Mxfp8: _mxfp8,
    Nvfp4: _nvfp4,
    Integers: _integers,
    Bits8: _bits8,
}
"""(codec, W, parts whose scales are used) -> (parts, True for each scale that could not hold W)."""
