"""Expansion on CUDA: any number of matrices of a stack in one launch, each into its block of a workspace.

    _four      codes of 4 bits in rows: INT4, e2m1 (MXFP4, NVFP4), a table of 16 (NF4, FP4)
    _bytes     a code a byte: e4m3 (FP8, MXFP8), int8 (LLM.int8, int-quantized)
    _integers  codes of 2, 4 or 8 bits in words, with zero points or in any order: AWQ, GPTQ, pack-quantized

_four and _bytes: a program per row and block of columns. M requested matrices, O output rows, I columns.
"""

# A launch takes numbers for constexpr parameters, and num_warps, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.choice.op import Config, Implementation
from unfreeze.kernels.expand.bucket import triton_kind
from unfreeze.kernels.expand.triton_numbers import e2m1, e4m3, put, scale_of
from unfreeze.kernels.loops.triton_options import interpreted, power_of_two
from unfreeze.quant.awq import Awq
from unfreeze.quant.bitsandbytes import INVERSE_127, Bits4, Bits8
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.gptq import ONES, Gptq
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import MATRIX, Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4


@triton.jit
def _four(
    packed,
    scale,
    whole,  # NVFP4: the matrix's number; NF4: the map of its 16 codes
    scale2,  # double quantization: absmax of 256 of the scales, the map of their codes, and the offset
    map2,
    offset,
    experts,
    first,
    out,
    rows,
    columns,
    words,  # of a row
    scales,  # of a matrix
    scales2,
    matrix_stride,
    row_stride,
    GROUP: tl.constexpr,
    GROUP2: tl.constexpr,
    PER: tl.constexpr,
    NUMBERS: tl.constexpr,
    SCALE: tl.constexpr,
    WHOLE: tl.constexpr,
    ROUND: tl.constexpr,
    CHOSEN: tl.constexpr,
    BY_HAND: tl.constexpr,
    WORDS: tl.constexpr,
):
    """out[m, o, c] = number(code) * scale[(o columns + c) // GROUP].

    Matrix m is experts[m] of the stack (CHOSEN), or first + m. PER codes of 4 bits are loaded as one word.
    NUMBERS: "int4", "e2m1", or "table": whole[code], where the first code of a byte is its upper half.
    WHOLE: scales are "times" or "over" the matrix's number.
    SCALE "nested": scale b is map2[code2] * scale2[b // GROUP2] + offset.
    """
    job = tl.program_id(0).to(tl.int64)
    m, o = job // rows, job % rows
    expert = first + m
    if CHOSEN:
        expert = tl.load(experts + m).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, PER)
    column = word[:, None] * PER + lane[None, :]
    inside = column < columns
    bits = tl.load(packed + (expert * rows + o) * words + word, mask=word < words, other=0).to(tl.int32)
    place = lane
    if NUMBERS == "table":
        place = lane ^ 1
    code = (bits[:, None] >> (place * 4)[None, :]) & 15

    # one scale for the codes of a word, unless groups are odd
    start = o * columns
    if GROUP % PER == 0:
        at, known = (start % GROUP).to(tl.int32) + word * PER, word < words
    else:
        at, known = (start % GROUP).to(tl.int32) + column, inside
    at = expert * scales + start // GROUP + at // GROUP
    if SCALE == "nested":
        code2 = tl.load(scale + at, mask=known, other=0).to(tl.int32)
        outer = tl.load(scale2 + expert * scales2 + (at - expert * scales) // GROUP2, mask=known, other=0.0)
        factor = tl.load(map2 + expert * 256 + code2, mask=known, other=0.0) * outer
        factor = factor + tl.load(offset + expert)
    else:
        factor = scale_of(scale + at, known, SCALE)
    if WHOLE == "times":
        factor = factor * tl.load(whole + expert)
    if WHOLE == "over":
        factor = tl.div_rn(factor, tl.load(whole + expert))
    if GROUP % PER == 0:
        factor = factor[:, None]

    if NUMBERS == "int4":
        number = (code - 8).to(tl.float32)
    elif NUMBERS == "table":
        number = tl.load(whole + expert * 16 + code, mask=inside, other=0.0)
    else:
        number = e2m1(code)
        if WHOLE == "times":
            number = tl.where(code == 8, 0.0, number)  # modelopt reads the code of -0.0 as 0.0
    put(out + m * matrix_stride + o * row_stride + column, number * factor, inside, ROUND, BY_HAND)


@triton.jit
def _bytes(
    packed,
    scale,
    zero,
    experts,
    first,
    out,
    rows,
    columns,
    down,
    across,
    block_rows,
    block_columns,
    again,
    matrix_stride,
    row_stride,
    NUMBERS: tl.constexpr,
    SCALE: tl.constexpr,
    ZEROS: tl.constexpr,
    AGAIN: tl.constexpr,
    ROUND: tl.constexpr,
    CHOSEN: tl.constexpr,
    BY_HAND: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[m, o, c] = (number(code) - zero) * scale, both of block [o // block_rows, c // block_columns].

    NUMBERS: "e4m3" or "int8". AGAIN: the product * again.
    """
    job = tl.program_id(0).to(tl.int64)
    m, o = job // rows, job % rows
    expert = first + m
    if CHOSEN:
        expert = tl.load(experts + m).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < columns
    code = tl.load(packed + (expert * rows + o) * columns + column, mask=inside, other=0).to(tl.int32)
    at = (expert * down + o // block_rows) * across + column // block_columns
    number = e4m3(code) if NUMBERS == "e4m3" else code.to(tl.float32)
    if ZEROS:
        number = number - tl.load(zero + at, mask=inside, other=0).to(tl.float32)
    values = number * scale_of(scale + at, inside, SCALE)
    if AGAIN:
        values = values * again
    put(out + m * matrix_stride + o * row_stride + column, values, inside, ROUND, BY_HAND)


@triton.jit
def _integers(
    packed,
    scale,
    zero,
    order,
    experts,
    first,
    out,
    rows,
    columns,
    words,  # of a matrix's codes; zeros and scales: of its zero points and scales
    zeros,
    scales,
    word_down,  # from one word to that of the next rows, and of the next columns
    word_across,
    zero_down,
    zero_across,
    scale_down,
    scale_across,
    group,
    ones,
    matrix_stride,
    row_stride,
    BITS: tl.constexpr,
    DOWN: tl.constexpr,
    SHUFFLED: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDER: tl.constexpr,
    SCALE: tl.constexpr,
    ROUND: tl.constexpr,
    CHOSEN: tl.constexpr,
    BY_HAND: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out[m, o, c] = (code - zero) * scale, both of [o, g]; g = c // group, or order[c] (ORDER).

    A word has 32 / BITS codes of neighbouring columns, or rows (DOWN); SHUFFLED: in AWQ's order.
    A word of zero points has those of neighbouring rows; `ones` is added to it. Without ZEROS all are
    2^(BITS - 1). A program computes a tile; it has GROUPS groups of equal width.
    """
    tiles = tl.cdiv(rows, OUT)
    job = tl.program_id(0).to(tl.int64)
    m, tile = job // tiles, (job % tiles).to(tl.int32)
    expert = first + m
    if CHOSEN:
        expert = tl.load(experts + m).to(tl.int64)
    PER: tl.constexpr = 32 // BITS
    lane = tl.arange(0, PER)
    of_row = lane * BITS
    if SHUFFLED:
        of_row = ((lane & 1) * 4 + (lane >> 1)) * BITS
    row, column = tile * OUT + tl.arange(0, OUT), tl.program_id(1) * IN + tl.arange(0, IN)

    # codes [OUT, IN]: the codes of a word become neighbours
    if DOWN:
        down, across = tile * (OUT // PER) + tl.arange(0, OUT // PER), column
        known = (down[:, None] * PER < rows) & (across[None, :] < columns)
    else:
        down, across = row, tl.program_id(1) * (IN // PER) + tl.arange(0, IN // PER)
        known = (down[:, None] < rows) & (across[None, :] * PER < columns)
    at = packed + expert * words + down[:, None] * word_down + across[None, :] * word_across
    bits = tl.load(at, mask=known, other=0)
    if DOWN:
        spread = bits[:, None, :] >> of_row[None, :, None]
    else:
        spread = bits[:, :, None] >> (lane * BITS)[None, None, :]
    code = tl.reshape(spread & ((1 << BITS) - 1), (OUT, IN))

    # zero points and scales [OUT, GROUPS]
    begin = tl.program_id(1) * IN + tl.arange(0, GROUPS) * (IN // GROUPS)
    g = begin // group
    if ORDER:
        g = tl.load(order + expert * columns + begin, mask=begin < columns, other=0)
    known = (row[:, None] < rows) & (begin[None, :] < columns)
    factor = scale_of(
        scale + expert * scales + row[:, None] * scale_down + g[None, :] * scale_across, known, SCALE
    )
    middle = tl.full((OUT, GROUPS), 1 << (BITS - 1), tl.int32)
    if ZEROS:
        down = tile * (OUT // PER) + tl.arange(0, OUT // PER)
        at = zero + expert * zeros + down[:, None] * zero_down + g[None, :] * zero_across
        known = (down[:, None] * PER < rows) & (begin[None, :] < columns)
        bits = tl.load(at, mask=known, other=0) + ones
        spread = (bits[:, None, :] >> of_row[None, :, None]) & ((1 << BITS) - 1)
        middle = tl.reshape(spread, (OUT, GROUPS))

    steps = tl.reshape(code, (OUT, GROUPS, IN // GROUPS)) - middle[:, :, None]
    values = tl.reshape(steps.to(tl.float32) * factor[:, :, None], (OUT, IN))
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    target = out + m * matrix_stride + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    put(target, values, inside, ROUND, BY_HAND)


SCALES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e8m0fnu: "power",
    torch.float8_e4m3fn: "e4m3",
    torch.uint8: "power",
}
HALVES = {"BF16": "bfloat16", "F16": "float16", "F32": ""}


def fill(packed: Packed, experts: Tensor | int, out: Tensor, config: Config | None = None) -> None:
    """out[m] = weight[experts[m]], or weight[experts + m] if `experts` is a number: one launch.

    Reads only the requested matrices. packed: a format of `bucket.triton_kind`, [E, O, I]; experts int on the
    device; out [M, O, I] bf16 or float32, last stride 1. config: of INT4's launch, WORDS and num_warps.
    """
    if not triton_kind(packed):
        raise ValueError(
            f"not a {packed.codec.name} weight this kernel can read: contiguous parts, and scales as in"
            " expand/bucket.py"
        )
    chosen = isinstance(experts, Tensor)
    matrices = experts.numel() if isinstance(experts, Tensor) else min(len(out), packed.shape[0] - experts)
    _, rows, columns = packed.shape
    if (
        out.shape != (matrices, rows, columns)
        or out.stride(-1) != 1
        or out.dtype not in (torch.bfloat16, torch.float32)
    ):
        wanted = f"bfloat16 or float32 {[matrices, rows, columns]}, last stride 1"
        raise ValueError(f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}, wanted {wanted}")
    if not out.numel():
        return
    by_hand = interpreted()
    common: dict[str, Any] = {
        "experts": experts if chosen else out,  # consecutive ones need no list: any tensor in its place
        "first": 0 if chosen else experts,
        "out": out.view(torch.int16) if by_hand and out.dtype == torch.bfloat16 else out,
        "rows": rows,
        "columns": columns,
        "matrix_stride": out.stride(0),
        "row_stride": out.stride(1),
        "CHOSEN": chosen,
        "BY_HAND": by_hand,
    }
    codec = packed.codec
    if isinstance(codec, (Int4, Mxfp4, Nvfp4, Bits4)):
        _fill_four(packed, matrices, common, dict(config or {}))
    elif isinstance(codec, (Awq, Gptq)) or (isinstance(codec, Integers) and codec.packed):
        _fill_integers(packed, matrices, common)
    else:
        _fill_bytes(packed, matrices, common)


def _fill_four(packed: Packed, matrices: int, common: dict[str, Any], config: dict[str, int]) -> None:
    codec, rows, columns = packed.codec, common["rows"], common["columns"]
    codes, scales = (packed.parts[suffix] for suffix in codec.suffixes[:2])
    words = codes.flatten(2)
    per = 8 if words.dtype == torch.int32 else 2
    if per == 2 and not (words.shape[-1] % 4 or words.storage_offset() % 4):
        words, per = words.view(torch.int32), 8
    numbers, group, group2, kind, times, rounds = "e2m1", 0, 1, SCALES[scales.dtype], "", "bfloat16"
    scales = _plain(scales)
    whole = scale2 = map2 = offset = scales  # in the place of what a format has not
    if isinstance(codec, Int4):
        numbers, group, rounds = "int4", codec.group_size, HALVES[codec.scale_dtype]
    elif isinstance(codec, Bits4):
        numbers, group, rounds = "table", codec.block, HALVES[codec.dtype]
        whole = packed.parts["weight_quant_map"]
        if codec.double:
            kind, group2 = "nested", codec.block2
            scale2, map2 = (
                packed.parts[name] for name in ("weight_nested_absmax", "weight_nested_quant_map")
            )
            offset = packed.parts[codec.text]
    elif isinstance(codec, Mxfp4):
        group = codec.group
    else:
        assert isinstance(codec, Nvfp4)
        group, whole = codec.group, packed.parts[codec.names.whole]
        times, rounds = ("over", "bfloat16") if codec.names.divides else ("times", "")
    width = -(-columns // per)
    options = {"WORDS": min(power_of_two(width), 512)} | config
    _four[(matrices * rows, triton.cdiv(width, options["WORDS"]))](
        packed=words,
        scale=scales,
        whole=whole,
        scale2=scale2,
        map2=map2,
        offset=offset,
        words=words.shape[-1],
        scales=scales.numel() // len(scales),
        scales2=scale2.numel() // len(scale2),
        GROUP=group,
        GROUP2=group2,
        PER=per,
        NUMBERS=numbers,
        SCALE=kind,
        WHOLE=times,
        ROUND=rounds,
        # a product plus the offset is rounded twice, as the format has it: not fused
        enable_fp_fusion=kind != "nested",
        **options,
        **common,
    )


def _fill_bytes(packed: Packed, matrices: int, common: dict[str, Any]) -> None:
    codec, rows, columns = packed.codec, common["rows"], common["columns"]
    codes, scales = (packed.parts[suffix] for suffix in codec.suffixes[:2])
    zero, again = scales, 1.0
    if isinstance(codec, Fp8):
        block = codec.block
    elif isinstance(codec, Bits8):
        block, again, scales = (1, columns), INVERSE_127, scales.unsqueeze(-1)
    elif isinstance(codec, Mxfp8):
        block = (1, codec.group)
    elif isinstance(codec, Integers):
        block = (rows if codec.group == MATRIX else 1, codec.group if codec.group > 0 else columns)
        scales = scales.reshape(len(codes), -1, scales.shape[-1])
        zero = packed.parts["weight_zero_point"] if codec.zeros else scales
    else:
        assert isinstance(codec, Fp8Scaled)
        scales = scales.reshape(len(codes), -1, 1)
        block = (1 if "out" in codec.scales else rows, columns)
    kind = SCALES[scales.dtype]
    wide = min(power_of_two(columns), 1024)
    _bytes[(matrices * rows, triton.cdiv(columns, wide))](
        packed=codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes,
        scale=_plain(scales),
        zero=zero if zero.dtype == torch.int8 else codes.view(torch.uint8),
        down=scales.shape[-2],
        across=scales.shape[-1],
        block_rows=block[0],
        block_columns=block[1],
        again=again,
        NUMBERS="e4m3" if codes.dtype == torch.float8_e4m3fn else "int8",
        SCALE=kind,
        ZEROS=zero.dtype == torch.int8,
        AGAIN=again != 1.0,
        # powers of two change no digit of a code: such weights are bf16
        ROUND={"float32": "", "power": "bfloat16"}.get(kind, kind),
        WIDE=wide,
        **common,
    )


def _fill_integers(packed: Packed, matrices: int, common: dict[str, Any]) -> None:
    codec, rows, columns, parts = packed.codec, common["rows"], common["columns"], packed.parts
    if isinstance(codec, Integers):
        bits, size, words, scales = codec.bits, codec.group, parts["weight_packed"], parts["weight_scale"]
        zeros, order = parts.get("weight_zero_point"), parts.get("weight_g_idx")
        word_strides, by_groups = (words.shape[-1], 1), (scales.shape[-1], 1)
        if codec.group == MATRIX:
            by_groups = (0, 0)
        zero_strides, ones = by_groups, 0
    else:
        assert isinstance(codec, (Awq, Gptq))
        bits, ones = (codec.bits, ONES[codec.bits]) if isinstance(codec, Gptq) else (4, 0)
        ones = ones if isinstance(codec, Gptq) and codec.minus_one else 0
        size, words, scales, zeros = (codec.group_size, parts["qweight"], parts["scales"], parts["qzeros"])
        order = parts.get("g_idx")
        word_strides, by_groups, zero_strides = (1, words.shape[-1]), (1, rows), (1, zeros.shape[-1])
    per = 32 // bits
    outs, ins = max(32, per), max(per, min(128, power_of_two(columns)))
    size = size if 0 < size < columns else 1 << 30  # one group
    groups = ins // size if ins % size == 0 else 1 if size % ins == 0 else ins
    groups = ins if order is not None else groups
    _integers[(matrices * triton.cdiv(rows, outs), triton.cdiv(columns, ins))](
        packed=words,
        scale=scales,
        zero=words if zeros is None else zeros,
        order=words if order is None else order,
        words=words.numel() // len(words),
        zeros=0 if zeros is None else zeros.numel() // len(zeros),
        scales=scales.numel() // len(scales),
        word_down=word_strides[0],
        word_across=word_strides[1],
        zero_down=zero_strides[0],
        zero_across=zero_strides[1],
        scale_down=by_groups[0],
        scale_across=by_groups[1],
        group=size,
        ones=ones,
        BITS=bits,
        DOWN=isinstance(codec, Awq),
        SHUFFLED=isinstance(codec, Awq),
        ZEROS=zeros is not None,
        ORDER=order is not None,
        SCALE=SCALES[scales.dtype],
        ROUND=SCALES[scales.dtype].replace("float32", ""),
        OUT=outs,
        IN=ins,
        GROUPS=groups,
        **common,
    )


def _plain(scales: Tensor) -> Tensor:
    """Scales of one byte as uint8, which Triton reads on every GPU."""
    return scales.view(torch.uint8) if scales.itemsize == 1 else scales


class Expand:
    """The candidate: expand() as in kernels.expand, and `fill` for many matrices in one launch."""

    def __init__(self, config: Config | None = None):
        self.config = config

    def configured(self, config: Config) -> Implementation:
        return Expand(config)

    def fill(self, packed: Packed, experts: Tensor | int, out: Tensor) -> None:
        fill(packed, experts, out, self.config)

    def __call__(self, packed: Packed, expert: int | None, out: Tensor) -> Tensor:
        one = packed if expert is None else packed[expert]
        self.fill(
            Packed(one.codec, {name: part.unsqueeze(0) for name, part in one.parts.items()}),
            0,
            out.unsqueeze(0),
        )
        return out
