"""W' = W + ΔW in float32, rounded once by the format, and how much of ΔW survives the rounding.

    size      ‖Q(W + ΔW) − W‖ / ‖ΔW‖           1 if nothing is lost; on a coarse grid far below or above 1
    cosine    of the angle between Q(W + ΔW) − W and ΔW
    kept      size · cosine: the share of ΔW that is in the merged weight, along ΔW
    noise     size · √(1 − cosine²): the part of the change that is across ΔW, relative to ‖ΔW‖
    error     ‖Q(W + ΔW) − W − ΔW‖ / ‖ΔW‖ = √((1 − kept)² + noise²)

Norms are Frobenius norms, summed in float64. W is the base's dequantized weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.checkpoint.nested import in_model
from unfreeze.checkpoint.shard import Shard
from unfreeze.checkpoint.tensors import TORCH_DTYPE, stored_tensor
from unfreeze.compress.deltas import Changes, MatrixPlace
from unfreeze.compress.quantize.formats import stored_tensors
from unfreeze.compress.work import MergeWork, Out, Weight, WeightHome
from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.experts import Experts
from unfreeze.quant.aimed import aimed, factor_of
from unfreeze.quant.codec import Codec, kept_suffixes, texted
from unfreeze.quant.kept import can_keep, kept, refitted
from unfreeze.quant.nvfp4 import Nvfp4
from unfreeze.quant.requantize import Scales, below, row_blocks
from unfreeze.quant.spelling import canonical

PLAIN = "BF16"  # the format that --to bf16 writes


@dataclass(frozen=True)
class Rounded:
    """Result of one way of rounding ΔW. `anew`: number of scales that could not be kept."""

    size: float
    cosine: float
    anew: int = 0

    @property
    def kept(self) -> float:
        return self.size * self.cosine

    @property
    def noise(self) -> float:
        return self.size * math.sqrt(max(0.0, 1 - self.cosine**2))

    @property
    def error(self) -> float:
        return math.hypot(1 - self.kept, self.noise)


@dataclass(frozen=True)
class Row:
    """The rounding of one matrix. delta, weight: ‖ΔW‖ and ‖W‖.

    ways: "refit", "keep", or a dtype; "BF16" is always included, as the result of --to bf16.
    numbers: of an NVFP4 matrix, its number before and after; empty if it was kept.
    """

    module: str
    group: str
    weight: float
    delta: float
    written: str
    ways: dict[str, Rounded]
    numbers: Sequence[float] = ()


def write_weight(
    work: MergeWork,
    weight: Weight,
    deltas: Changes,
    shard: Shard,
    wanted: Mapping[str, object],
    scales: Scales,
) -> list[Row]:
    """Write a weight's outputs that `wanted` names into the shard.

    One matrix at a time: each expert of a stack separately. A weight whose parts are in several files is
    computed for each of them, but its rounding is reported once.
    """
    if weight.instead is not None:
        for name, (dtype, _) in weight.outputs.items():
            if name in wanted:
                shard.put(name, weight.instead.to(TORCH_DTYPE[dtype]))
        return []
    if weight.to is None:
        for info in weight.parts.values():
            if info.name in wanted:
                shard.copy(info.name, info)
        return []
    rows = []
    for expert in weight.experts():
        W, parts = _read(weight, work, expert)
        change = deltas.of(_place(weight.home, expert), W) if weight.adapted and weight.home else None
        if change is not None and not change.any():  # an expert without tokens: as if not adapted
            change = None
        measured: dict[str, Rounded] = {}
        numbers: tuple[float, ...] = ()
        if weight.in_place and weight.codec is not None:
            way = scales
            if change is not None:
                before = parts
                parts, measured = _requantized(weight.codec, W, change, parts, scales)
                numbers = _numbers(weight.codec, before, parts)
            outputs = [(weight.parts[suffix].name, parts[suffix]) for suffix in _made(weight.codec)]
        else:
            outputs, value, way = _rounded(weight, W if change is None else W + change, work, expert)
            if change is not None:
                measured = {way: _measure(value - W, change)}
        if change is not None and PLAIN not in measured:
            measured[PLAIN] = _measure((W + change).bfloat16().float() - W, change)
        for name, tensor in outputs:
            if name in wanted:
                shard.put(name, tensor, expert * tensor.numel() if _stacked(weight, name) else 0)
        if change is not None and next(iter(weight.outputs)) in wanted:
            module = weight.name + (f"[{expert}]" if weight.home and weight.home.experts else "")
            rows.append(Row(module, weight.group, _norm(W), _norm(change), way, measured, numbers))
    if weight.in_place and weight.codec is not None:  # the extras beside the codes, such as their shape
        for suffix, info in weight.parts.items():
            if suffix not in _made(weight.codec) and info.name in wanted:
                shard.copy(info.name, info)
    return rows


def _numbers(codec: Codec, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> tuple[float, ...]:
    """The number of an NVFP4 matrix before and after; empty if they are equal, and in other formats."""
    if not isinstance(codec, Nvfp4):
        return ()
    old, new = (float(parts[codec.names.whole]) for parts in (before, after))
    return () if old == new else (old, new)


def merged(work: MergeWork, weight: Weight, deltas: Changes, expert: int) -> Tensor:
    """W + ΔW float32 [out, in] of one matrix: W dequantized, `expert` its number in a stack."""
    W, _ = _read(weight, work, expert)
    if weight.adapted and weight.home is not None:
        return W + deltas.of(_place(weight.home, expert), W)
    return W


def packed(work: MergeWork, weight: Weight, shard: Shard) -> Iterator[tuple[Tensor, Tensor]]:
    """Write a weight of a dense base in its new format -> (Q(W), W) float32 [out, in] of each matrix."""
    for expert in weight.experts():
        W, _ = _read(weight, work, expert)
        outputs, value, _ = _rounded(weight, W, work, expert)
        for name, tensor in outputs:
            shard.put(name, tensor, expert * tensor.numel() if _stacked(weight, name) else 0)
        yield value, W


def _made(codec: Codec) -> tuple[str, ...]:
    """The parts that are computed again: a text beside them stays valid (quant/bitsandbytes.py: refit)."""
    text = codec.text if texted(codec) else None
    return tuple(suffix for suffix in kept_suffixes(codec) if suffix != text)


def _read(weight: Weight, work: MergeWork, expert: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(W float32 [out, in], its parts as they are stored) of one matrix."""
    home = weight.home
    if weight.codec is None:
        stored = stored_tensor(weight.parts[""])
        matrix = stored[expert] if home and home.experts else stored
        return (matrix.t() if home and home.transposed else matrix).float(), {}
    rows, columns = work.shape(weight)
    parts: dict[str, Tensor] = {}
    for suffix in kept_suffixes(weight.codec):
        if suffix not in weight.parts:
            raise CheckpointError(f"{weight.name}.{suffix} is missing")
        info, shape = weight.parts[suffix], weight.codec.parts(rows, columns)[suffix][1]
        stored = stored_tensor(info)
        if texted(weight.codec) and suffix == weight.codec.text:
            numbers = weight.codec.parse(bytes(stored.tolist()), info.name, rows, columns)
            parts[suffix] = torch.tensor(numbers).view(shape)
            continue
        parts[suffix] = (stored[expert] if home and home.experts else stored).view(shape)
    return weight.codec.dequantize(parts).float(), parts


def _requantized(
    codec: Codec, W: Tensor, change: Tensor, stored: dict[str, Tensor], scales: Scales
) -> tuple[dict[str, Tensor], dict[str, Rounded]]:
    """(the parts of Q(W + ΔW) in W's format, the rounding for each way of choosing scales).

    Some rows at a time if rows are quantized independently: temporaries stay in the cores' caches.
    """
    factor = factor_of(codec, W, change, stored) if scales == "keep-change" else 1.0
    chosen: list[dict[str, Tensor]] = []
    sums: dict[str, list[float]] = {}
    for first, last, parts in row_blocks(codec, W.shape, stored):
        w, delta = W[first:last], change[first:last]
        fresh = refitted(codec, w + delta, parts)
        ways: dict[str, tuple[dict[str, Tensor], int]] = {"refit": (fresh, 0)}
        if can_keep(codec):
            ways["keep"] = kept(codec, w + delta, parts, fresh)
        if scales == "keep-change":
            ways[scales] = aimed(codec, w + factor * delta, ways["keep"])
        for way, (requantized, anew) in ways.items():
            moved = codec.dequantize(requantized).float() - w
            terms = _norm(moved) ** 2, float((moved * delta).sum(dtype=torch.float64)), anew
            sums[way] = [old + new for old, new in zip(sums.get(way, [0.0, 0.0, 0]), terms, strict=True)]
        chosen.append(ways[scales][0])
    whole = chosen[0]
    if len(chosen) > 1:
        whole = {suffix: below([block[suffix] for block in chosen]) for suffix in whole}
    wanted = _norm(change)
    return whole, {
        way: Rounded(
            math.sqrt(square) / wanted, dot / math.sqrt(square) / wanted if square else 0.0, int(anew)
        )
        for way, (square, dot, anew) in sums.items()
    }


def _rounded(
    weight: Weight, merged: Tensor, work: MergeWork, expert: int
) -> tuple[list[tuple[str, Tensor]], Tensor, str]:
    """([(name, tensor to write)], its dequantized value, the way): dense, or in another format."""
    to = weight.to
    assert to is not None
    outs = _outs(weight, work, expert)
    if isinstance(to, str):
        whole = merged.to(TORCH_DTYPE[to])
        outputs = [
            (name, half.t() if out.transposed else half)
            for name, out, half in _cut(work, weight, whole, outs)
        ]
        return outputs, whole.float(), to
    # into another format: all scales are new
    assert work.packing is not None
    outputs, pieces = [], []
    for name, out, half in _cut(work, weight, merged, outs):
        module = canonical(in_model(work.manifest.prefix, name)) + (f"[{expert}]" if out.whole else "")
        fresh, scales = work.packing.round(half, to, module), work.packing.scales
        piece = to.dequantize(fresh).float()
        pieces.append(piece if scales is None else scales.unscaled(piece, module))
        stored = stored_tensors(to, fresh, *half.shape)
        outputs += [(work.part_name(name, suffix), part) for suffix, part in stored.items()]
    whole = pieces[0] if len(pieces) == 1 else _joined(work, weight, pieces)
    return outputs, whole, "refit"


def _outs(weight: Weight, work: MergeWork, expert: int) -> list[Out]:
    """The outputs of the matrix, in place or under new names."""
    if not weight.in_place:
        return work.outs(weight, expert)
    transposed = weight.home is not None and weight.home.transposed
    return [Out(next(iter(weight.parts.values())).name, whole=True, transposed=transposed)]


def _cut(
    work: MergeWork, weight: Weight, whole: Tensor, outs: list[Out]
) -> Iterator[tuple[str, Out, Tensor]]:
    """(name, output, rows) for each output of a matrix; gate and up separately if they are two."""
    for out in outs:
        rows = whole if out.half is None else _halves(work, weight, whole)[out.half]
        dense = isinstance(weight.to, str) and not out.whole
        yield f"{out.name}.weight" if dense else out.name, out, rows.contiguous()


def _halves(work: MergeWork, weight: Weight, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Gate's and up's rows of an expert's gate_up, as views."""
    assert weight.home is not None
    owner = work.model.get_submodule(weight.home.place.site)
    assert isinstance(owner, Experts)
    return owner.activation.split(whole, 0)


def _joined(work: MergeWork, weight: Weight, pieces: list[Tensor]) -> Tensor:
    """Gate's and up's rows in the base's order."""
    whole = torch.empty(sum(len(piece) for piece in pieces), pieces[0].shape[1])
    for rows, piece in zip(_halves(work, weight, whole), pieces, strict=True):
        rows.copy_(piece)
    return whole


def _place(home: WeightHome, expert: int) -> MatrixPlace:
    """The place of a matrix; in a stack, by its number."""
    if home.experts is None:
        return home.place
    return MatrixPlace(home.place.site, home.place.projection, expert)


def _stacked(weight: Weight, name: str) -> bool:
    """True if an output holds all experts, each at its number."""
    if weight.home is None or weight.home.experts is None:
        return False
    # one name for all experts: as many outputs as one matrix has parts
    parts = 1 if weight.to is None or isinstance(weight.to, str) else len(weight.to.suffixes)
    return weight.in_place or len(weight.outputs) == parts


def _measure(change: Tensor, delta: Tensor) -> Rounded:
    size, wanted = _norm(change), _norm(delta)
    dot = float((change * delta).sum(dtype=torch.float64))
    return Rounded(size / wanted, dot / (size * wanted) if size else 0.0)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64))
