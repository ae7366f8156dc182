"""Packed weights for the products of a step: which kind of codes.py reads each format of quant/, and where.

E experts, O outputs, K inputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.decode_step import affine, tiles
from unfreeze.kernels.decode_step.codes import CHUNK
from unfreeze.kernels.decode_step.lookup import float32_of, int4_values, mxfp4_values, powers
from unfreeze.kernels.decode_step.weights import (
    Affine,
    Blocks,
    CannotRecord,
    Gathered,
    Located,
    Weight,
    located_weight,
)
from unfreeze.quant.awq import Awq
from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.gptq import ONES, Gptq
from unfreeze.quant.grids import WHOLE_COLUMN
from unfreeze.quant.halves import Halves
from unfreeze.quant.int4 import OFFSET, Int4
from unfreeze.quant.integers import MATRIX, Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4

ONE_SCALE = 40  # chunks of a scale as a power of two: more than any row has
ROUNDS = {torch.float32: "", torch.float8_e8m0fnu: "", torch.bfloat16: "bf16", torch.float16: "f16"}
"""Dtype of the scales -> the dtype that weights are rounded to. Powers of two change no digit of a code."""


def packed_weight(weight: Packed, pairs: bool) -> Weight:
    """Codes, read in place. Raises CannotRecord for a format, or sizes of it, that no products read."""
    parts = {name: part if len(weight.shape) == 3 else part[None] for name, part in weight.parts.items()}
    if any(part.device.type != "cpu" or not part.is_contiguous() for part in parts.values()):
        raise CannotRecord(f"{weight.codec.name} that is not contiguous on a CPU")
    codec = weight.codec.codec if isinstance(weight.codec, Halves) else weight.codec
    each = [parts for _, parts in weight.codec.each(parts)] if isinstance(weight.codec, Halves) else [parts]
    read = FORMATS.get(type(codec))
    if read is None:
        raise CannotRecord(codec.name)
    return read(codec, each, pairs)


def _power(columns: int, width: int, what: str) -> int:
    """Chunks of a scale for `columns` columns, as a power of two. Raises CannotRecord."""
    chunks, rest = divmod(columns, CHUNK)
    if columns >= width:
        return ONE_SCALE
    if rest or chunks & (chunks - 1):
        raise CannotRecord(f"{what} in groups of {columns}")
    return chunks.bit_length() - 1


Parts = dict[str, Tensor]


def _two(codec: Codec, parts: Parts) -> tuple[Tensor, Tensor]:
    """Codes and scales: each format's first two parts."""
    codes, scales = codec.suffixes[:2]
    return parts[codes], parts[scales]


def _int4(codec: Int4, parts: Sequence[Parts], pairs: bool) -> Weight:
    codes, scales = _two(codec, parts[0])
    (_, O, groups), K = scales.shape, scales.shape[-1] * codec.group_size
    if scales.dtype != torch.bfloat16 or K % CHUNK:
        return _int4_of_any_scale(codec, parts, pairs)
    values, group = torch.from_numpy(int4_values(pairs)).flatten(), _power(codec.group_size, K, codec.name)
    if len(parts) > 1:
        each = [Located(*_two(codec, one), table=values) for one in parts]
        return located_weight("int4", O, group, each, pairs)
    # rows need no formula: all of the stack lie behind each other
    return Weight(
        tiles.int4.address(pairs),
        -1,
        codes.data_ptr(),
        K // 2,
        scales.data_ptr(),
        2 * groups,
        values.data_ptr(),
        group,
        holds=(codes, scales, values),
    )


def _fp8(codec: Fp8 | Fp8Scaled, parts: Sequence[Parts], pairs: bool) -> Weight:
    each, rounds = [], ""
    E, O, K = parts[0]["weight"].shape
    rows, columns = codec.block if isinstance(codec, Fp8) else (1 if "out" in codec.scales else O, K)
    for one in parts:
        scales = one[codec.scale]
        rounds = ROUNDS[scales.dtype]
        # a scale per 16,384 weights, or per row: a copy costs nothing
        wide = _moved(scales.float()).reshape(E, -(-O // rows), -1)
        each.append(Located(one["weight"], wide, rows))
    return located_weight("fp8", O, _power(columns, K, codec.name), each, pairs, rounds)


def _moved(scales: Tensor) -> Tensor:
    """The scales of e4m3 as codes.py takes them. Raises CannotRecord if they leave the range of float32."""
    moved = scales * 2.0**120
    if bool(scales.isfinite().logical_and(moved.isinf()).any()):
        raise CannotRecord("FP8 with scales of 256 and more")
    return moved


def _mxfp8(codec: Mxfp8, parts: Sequence[Parts], pairs: bool) -> Weight:
    O = parts[0]["weight"].shape[1]
    for one in parts:
        _moved(powers()[int(_two(codec, one)[1].view(torch.uint8).amax())])
    table = powers() * 2.0**120
    each = [Located(*_two(codec, one), table=table) for one in parts]
    return located_weight("mxfp8", O, 0, each, pairs)


def _mxfp4(codec: Mxfp4, parts: Sequence[Parts], pairs: bool) -> Weight:
    O = _two(codec, parts[0])[0].shape[1]
    each = [Located(*_two(codec, one), table=mxfp4_values(pairs)) for one in parts]
    return located_weight("mxfp4", O, 0, each, pairs)


def _nvfp4(codec: Nvfp4, parts: Sequence[Parts], pairs: bool) -> Weight:
    whole = codec.suffixes[2]
    E, O, _ = _two(codec, parts[0])[0].shape
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    each = [
        Located(*_two(codec, one), table=codec.effective(every, one[whole].reshape(E, 1))) for one in parts
    ]
    return located_weight("nvfp4", O, 0, each, pairs, "bf16" if codec.names.divides else "")


def _int8(codec: Bits8, parts: Sequence[Parts], pairs: bool) -> Weight:
    O = parts[0]["weight"].shape[1]
    each = [Located(one["weight"], one["SCB"][..., None]) for one in parts]
    return located_weight("int8", O, ONE_SCALE, each, pairs)


def _affine(kind: str, O: int, K: int, group: int, scales: Tensor, **more: Any) -> Affine:
    """The description but for its parts. scales [E, O, G]; group: columns of one."""
    power = _power(group, K, kind)
    narrow = scales.dtype != torch.float32
    return Affine(
        kind,
        O,
        power,
        groups=1 if power == ONE_SCALE else -(-K // group),
        wide=float32_of(scales.dtype) if narrow else None,
        scale_size=2 if narrow else 4,
        rounds=ROUNDS[scales.dtype],
        **more,
    )


def _sixteen() -> Tensor:
    return torch.arange(16, dtype=torch.float32)


def _int4_of_any_scale(codec: Int4, parts: Sequence[Parts], pairs: bool) -> Weight:
    _, scales = _two(codec, parts[0])
    O, K = scales.shape[1], scales.shape[2] * codec.group_size
    form = _affine("tables4", O, K, codec.group_size, scales, layout=affine.ROWS, bits=4, zero=OFFSET)
    each = [Gathered(*_two(codec, one), numbers=_sixteen()) for one in parts]
    return form.weight(each, pairs)


def _integers(codec: Integers, parts: Sequence[Parts], pairs: bool) -> Weight:
    if codec.bits == 2 and not codec.permuted:
        raise CannotRecord("codes of 2 bits in rows")
    kind = "signed8" if not codec.packed else "affine8" if codec.bits == 8 else "tables4"
    E, O, K = Packed(codec, parts[0]).shape
    each: list[Gathered] = []
    for one in parts:
        codes, scales = _two(codec, one)
        if codec.group == MATRIX:
            scales = scales.reshape(E, 1, 1).expand(E, O, 1)
        zeros = one.get("weight_zero_point")
        if zeros is not None and codec.group == MATRIX:
            zeros = zeros.reshape(E, 1, 1).expand(E, O, 1)
        order = _order(one["weight_g_idx"], codec.group) if codec.permuted else None
        each.append(Gathered(codes, scales, zeros, _sixteen(), order))
    form = _affine(
        kind,
        O,
        K,
        codec.group if codec.group > 0 else K,
        each[0].scales,
        layout=affine.UNSORTED if codec.permuted else affine.ROWS,
        bits=codec.bits,
        zero_bits=0 if not codec.zeros else codec.bits if codec.packed else affine.INT8,
        zero=1 << (codec.bits - 1) if codec.packed else 0,
    )
    return form.weight(each, pairs)


def _gptq(codec: Gptq, parts: Sequence[Parts], pairs: bool) -> Weight:
    _, O, K = Packed(codec, parts[0]).shape
    size = K if codec.group_size == WHOLE_COLUMN else codec.group_size
    each: list[Gathered] = []
    for one in parts:
        scales, zeros = one["scales"].mT, one["qzeros"].mT
        order = _order(one["g_idx"], size) if codec.indexed else None
        each.append(Gathered(one["qweight"], scales, zeros, _sixteen(), order))
    form = _affine(
        "affine8" if codec.bits == 8 else "tables4",
        O,
        K,
        size,
        each[0].scales,
        layout=affine.GPTQ,
        bits=codec.bits,
        zero_bits=codec.bits,
        one=ONES[codec.bits] if codec.minus_one else 0,
    )
    return form.weight(each, pairs)


def _order(groups: Tensor, size: int) -> Tensor | None:
    """Columns sorted by group, int32 [E, K]; None if they are already. Raises CannotRecord.

    groups int32 [E, K], the group of each column. A group but the last must have `size` columns.
    """
    E, K = groups.shape
    ordered, order = groups.sort(dim=1, stable=True)
    if not torch.equal(ordered, (torch.arange(K) // size).to(groups.dtype).expand(E, K)):
        raise CannotRecord("groups of several sizes")
    return None if torch.equal(ordered, groups) else order.to(torch.int32)


def _awq(codec: Awq, parts: Sequence[Parts], pairs: bool) -> Weight:
    _, O, K = Packed(codec, parts[0]).shape
    size = K if codec.group_size == WHOLE_COLUMN else codec.group_size
    each = [Gathered(one["qweight"], one["scales"].mT, one["qzeros"].mT, _sixteen()) for one in parts]
    form = _affine("tables4", O, K, size, each[0].scales, layout=affine.AWQ, bits=4, zero_bits=4)
    return form.weight(each, pairs)


def _bits4(codec: Bits4, parts: Sequence[Parts], pairs: bool) -> Weight:
    _, O, K = Packed(codec, parts[0]).shape
    if K % CHUNK:
        raise CannotRecord("blocks that end inside of 32 columns")
    power = (codec.block // CHUNK).bit_length() - 1
    whole = K % codec.block == 0  # else a block continues in the next row, and each chunk has its own scale
    form = Affine(
        "upper4",
        O,
        power if whole else 0,
        layout=affine.BLOCKS,
        bits=4,
        groups=K // codec.block if whole else K // CHUNK,
        scale_size=1 if codec.double else 4,
        zero=0 if whole else power,
        one=codec.block2.bit_length() - 1,
        rounds={"BF16": "bf16", "F16": "f16", "F32": ""}[codec.dtype],
    )
    each = [
        Blocks(
            one["weight"],
            one["weight_absmax"][:, None],
            one["weight_nested_absmax"][:, None] if codec.double else None,
            one["weight_quant_map"],
            one[codec.text],
            one.get("weight_nested_quant_map"),
        )
        for one in parts
    ]
    return form.weight(each, pairs)


FORMATS: dict[type, Callable[[Any, Sequence[Parts], bool], Weight]] = {
    Int4: _int4,
    Integers: _integers,
    Fp8: _fp8,
    Fp8Scaled: _fp8,
    Mxfp8: _mxfp8,
    Mxfp4: _mxfp4,
    Nvfp4: _nvfp4,
    Gptq: _gptq,
    Awq: _awq,
    Bits4: _bits4,
    Bits8: _int8,
}
