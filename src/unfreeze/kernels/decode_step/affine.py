"""Products with packed weights (code - zero) · scale whose scales, zero points or codes are gathered first.

Called like `located` (located.py), by number of row. Some rows at a time, each row's pairs (scale, zero) of
float32 are written to a buffer for the kinds affine8 and signed8 (codes.py), the 16 weights of each pair for
tables4 and upper4, and its codes to another buffer if they do not lie in a row. The description, int64,
begins with HEAD numbers:

    tile, rows, parts, group    as in located.py
    layout                      ROWS, GPTQ, AWQ, BLOCKS (bitsandbytes), or UNSORTED: rows with an order
    bits                        of a code in memory
    groups                      pairs of a row
    scale_size, wide            bytes of a scale; if 2, the address of the float32 that each stands for
    zero_bits                   of a stored zero point, 32 / zero_bits in a word; INT8: a byte; 0: none
    rounds                      of 4 bits: number in ROUNDS (dots.py) of the dtype that the format rounds to
    zero, one                   the zero point if none are stored; added to each word of them
    then PART numbers for each part, "next" being bytes to the same of the next matrix:
    codes, next, next row       of the matrix; GPTQ and AWQ: of the stored array, inputs first
    scales, next, next row, next group
    zeros, next, next row of words, next group
    numbers, next               address of what the 16 codes of 4 bits stand for, float32
    order, next                 uint32 [width]: the input of each column, sorted by group; 0 for none

BLOCKS: groups are chunks; a scale serves 2^zero chunks of the flat matrix. If scale_size is 1, it is
wide[code] · zeros[code's number / 2^one] + offset. Then `zeros, next` are followed by `wide, next` (256
numbers), and the offset is at `order, next`.
"""

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.extending import overload

from unfreeze.kernels.decode_step.atomic import floats, integers, ints, octets, words
from unfreeze.kernels.decode_step.codes import CHUNK
from unfreeze.kernels.decode_step.dots import weights_of_codes
from unfreeze.kernels.decode_step.located import placed, run_of
from unfreeze.kernels.decode_step.pointer import Callee, call_products
from unfreeze.kernels.decode_step.rows import size_of
from unfreeze.kernels.decode_step.transposed import AWQ_INPUTS, SQUARE, transpose, transpose_awq
from unfreeze.kernels.loops.numba_options import inner
from unfreeze.quant.awq import ORDER

ROWS, GPTQ, AWQ, BLOCKS, UNSORTED = 0, 1, 2, 3, 4
INT8 = -8
HEAD, PART = 13, 15
FIELDS = HEAD + 2 * PART
AT_ONCE = 32  # rows of the buffer: 32 KiB for 2,048 weights of 4 bits
IN_ROWS = 8  # rows at once whose codes are in place: 8 KiB of tables for 2,048 weights in groups of 64
PLACE = tuple(ORDER.index(output) for output in range(len(ORDER)))
"""The half-byte of each of the eight outputs in AWQ's word."""


@inner
def _scales(size, wide, at, next_group, groups, out):
    """The scales of a row, to every second place of out."""
    if size == 4:
        for g in range(groups):
            out[2 * g] = floats(at + g * next_group, 1)[0]
    else:
        numbers = floats(wide, 1 << 16)
        for g in range(groups):
            out[2 * g] = numbers[words(at + g * next_group, 1)[0]]


@inner
def _zeros(bits, one, at, shift, next_group, groups, out):
    """The zero points of a row, behind its scales. `at`: the word, or byte, that has the first of them."""
    if bits == INT8:
        for g in range(groups):
            out[2 * g + 1] = np.float32(np.int8(octets(at + g * next_group, 1)[0]))
    else:
        mask = np.uint32((1 << bits) - 1)
        for g in range(groups):
            word = np.uint32(ints(at + g * next_group, 1)[0] + np.uint32(one))
            out[2 * g + 1] = np.float32(np.uint32(np.uint32(word >> np.uint32(shift)) & mask))


@inner
def _row_pairs(d, part, matrix, row, out):
    """(scale, zero) of each group of a row, float32 [groups, 2]."""
    groups, size, wide, bits, zero, one = d[6], d[7], d[8], d[9], d[10], d[11]
    p = d[part : part + PART]
    _scales(size, wide, p[3] + matrix * p[4] + row * p[5], p[6], groups, out)
    if bits == 0:
        out[1::2] = np.float32(zero)
    else:
        each = 32 // bits if bits > 0 else 1
        _zeros(bits, one, p[7] + matrix * p[8] + row // each * p[9], bits * (row % each), p[10], groups, out)


@inner
def _block_pairs(d, part, matrix, row, out):
    """(absmax, 0) of each group of a row."""
    groups, size, power, nested_power = d[6], d[7], d[10], d[11]
    p = d[part : part + PART]
    scales, nested, wide = p[3] + matrix * p[4], p[7] + matrix * p[8], p[9] + matrix * p[10]
    out[1::2] = np.float32(0.0)
    for g in range(groups):
        block = (row * groups + g) >> power
        if size == 4:
            out[2 * g] = floats(scales, block + 1)[block]
        else:
            number = floats(wide, 256)[octets(scales, block + 1)[block]]
            largest = floats(nested, (block >> nested_power) + 1)[block >> nested_power]
            out[2 * g] = np.float32(number * largest) + floats(p[13] + matrix * p[14], 1)[0]


@inner
def _column_pairs(d, part, matrix, first, between, count, out):
    """(scale, zero) of each group of `count` rows, if a group's scales of all rows follow each other."""
    layout, groups, size, wide, bits, one = d[4], d[6], d[7], d[8], d[9], np.uint32(d[11])
    p = d[part : part + PART]
    scales, zeros, mask = p[3] + matrix * p[4], p[7] + matrix * p[8], np.uint32((1 << bits) - 1)
    power = 4 if bits == 2 else 3 if bits == 4 else 2  # of two: zero points in a word
    for g in range(groups):
        at, words_at = scales + g * p[6], zeros + g * p[10]
        for i in range(count):
            row = first + i * between
            to = 2 * (i * groups + g)
            if size == 4:
                out[to] = floats(at + 4 * row, 1)[0]
            else:
                out[to] = floats(wide, 1 << 16)[words(at + 2 * row, 1)[0]]
            word = np.uint32(ints(words_at + 4 * (row >> power), 1)[0] + one)
            place = row & ((1 << power) - 1)
            if layout == AWQ:
                place = PLACE[place]
            out[to + 1] = np.float32(np.uint32(np.uint32(word >> np.uint32(bits * place)) & mask))


@inner
def _all_scales(like, d, part, matrix, first, between, count, pairs, tables, size):
    """The pairs of `count` rows, or the 16 weights of each pair, `size` bytes; return the bytes of a row."""
    layout, groups, numbers = d[4], d[6], d[part + 11] + matrix * d[part + 12]
    if layout in (GPTQ, AWQ):
        _column_pairs(d, part, matrix, first, between, count, pairs)
    for i in range(count):
        own = pairs[2 * groups * i : 2 * groups * (i + 1)]
        if layout == BLOCKS:
            _block_pairs(d, part, matrix, first + i * between, own)
        elif layout in (ROWS, UNSORTED):
            _row_pairs(d, part, matrix, first + i * between, own)
        if size > 8:
            for g in range(groups):
                to = tables + (i * groups + g) * size
                weights_of_codes(like, d[12], numbers, own[2 * g], own[2 * g + 1], to)
    return groups * size


@inner
def _gather(layout, source, next_row, bits, out_bits, order, width, first, between, count, target, stride):
    """Codes of `count` rows from any place, as words of `out_bits` codes in rows."""
    block = np.empty((SQUARE, AT_ONCE), np.uint32)
    each, mask = 32 // out_bits, np.uint32((1 << bits) - 1)
    for start in range(0, (width + each - 1) // each, SQUARE):
        block[:] = np.uint32(0)
        for column in range(start * each, min(width, (start + SQUARE) * each)):
            source_row = np.int64(ints(order, width)[column]) if order else column
            word, place = column // each - start, np.uint32(column % each * out_bits)
            to = block[word]
            shift = np.uint32(source_row * bits % 32)
            if layout == UNSORTED:
                for i in range(count):
                    word_at = source + (first + i * between) * next_row + source_row * bits // 32 * 4
                    to[i] |= np.uint32(np.uint32(np.uint32(ints(word_at, 1)[0] >> shift) & mask) << place)
            elif layout == AWQ:
                row = ints(source + source_row * next_row, (first + count * between) // 8 + 1)
                for i in range(count):
                    output = first + i * between
                    shift = np.uint32(4 * PLACE[output % 8])
                    to[i] |= np.uint32(np.uint32(np.uint32(row[output // 8] >> shift) & mask) << place)
            else:
                at = source + source_row * bits // 32 * next_row + 4 * first
                row = ints(at, count * between)
                if between == 1:
                    for i in range(count):
                        to[i] |= np.uint32(np.uint32(np.uint32(row[i] >> shift) & mask) << place)
                else:
                    for i in range(count):
                        to[i] |= np.uint32(np.uint32(np.uint32(row[i * between] >> shift) & mask) << place)
        for half in range(0, AT_ONCE, SQUARE):
            square = np.int64(block.ctypes.data) + 4 * half
            transpose(square, 4 * AT_ONCE, target + half * stride + 4 * start, stride)


@inner
def _codes(d, part, matrix, out_bits, width, first, between, count, target, stride):
    """Codes of `count` rows in rows: whole squares by shuffles, if nothing is reordered."""
    source, next_row, layout, bits = d[part] + matrix * d[part + 1], d[part + 2], d[4], d[5]
    order = d[part + 13] + matrix * d[part + 14] if d[part + 13] else 0
    plain = between == 1 and bits == out_bits and order == 0
    if layout == AWQ and plain and count == AT_ONCE and first % 8 == 0 and width % AWQ_INPUTS == 0:
        for i in range(0, width, AWQ_INPUTS):
            transpose_awq(source + i * next_row + first // 2, next_row, target + i // 2, stride)
    elif layout == GPTQ and plain and count % SQUARE == 0 and width * bits % (32 * SQUARE) == 0:
        for word in range(0, width * bits // 32, SQUARE):
            for row in range(0, count, SQUARE):
                at = source + word * next_row + 4 * (first + row)
                transpose(at, next_row, target + row * stride + 4 * word, stride)
    else:
        _gather(layout, source, next_row, bits, out_bits, order, width, first, between, count, target, stride)


def sort_x(like, x, order, width, out):  # pragma: no cover - body below
    """Write packed x with its numbers in the order of the columns, packed."""
    raise NotImplementedError("only inside numba loops")


@overload(sort_x, inline="never")
def _sort_x(like, x, order, width, out):
    if like == types.uint16:

        def of_pairs(like, x, order, width, out):
            source, target, columns = words(x, width), words(out, width), ints(order, width)
            for k in range(width):
                target[k] = source[columns[k]]

        return of_pairs

    def of_split(like, x, order, width, out):
        source, target, columns = floats(x, width), floats(out, width), ints(order, width)
        for k in range(width):
            target[_split(k, width)] = source[_split(np.int64(columns[k]), width)]

    return of_split


@inner
def _split(k, width):
    """The place of element k in split order."""
    chunk = k // CHUNK
    return k if chunk == width // CHUNK else chunk * CHUNK + k % 2 * 16 + k % CHUNK // 2


@inner
def _unsort(row, order, width):
    """Columns of a row of float32 back in the order of the inputs."""
    columns, copy = ints(order, width), row.copy()
    for k in range(width):
        row[columns[k]] = copy[k]


@Callee
def affine(like, num_rows, step, row, between, scales, scale_stride, table, group, width, xs, n, out):
    """Rows whose scales are gathered, and their codes if they do not lie in rows."""
    d = integers(table, FIELDS)
    tile, rows, parts, group, layout, bits, groups = d[:7]
    in_rows = layout in (ROWS, BLOCKS)
    # an array of which only the address is used lives as long as the loop that takes it
    at_once = min(IN_ROWS if in_rows else AT_ONCE, num_rows)
    size = 8 if bits == 8 else 16 * size_of(like)
    pairs = np.empty(2 * groups * at_once, np.float32)
    tables = np.empty(groups * at_once * size if bits < 8 else 0, np.uint8)
    # whole squares of words; an odd number of cache lines, which do not compete for the same places
    stride = ((width * max(4, bits) + 511) // 512 | 1) * 64
    buffer = np.empty(0 if in_rows else AT_ONCE * stride, np.uint8)
    sorted_x = np.empty(4 * width if d[HEAD + 13] and not in_rows else 0, np.float32)
    sorted_xs, sorted_of, sums = np.empty(4, np.int64), 0, np.empty(4 * at_once, np.float32)
    i = 0
    while i < num_rows:
        matrix, first = (row + i * between) // rows, (row + i * between) % rows
        expert, part = matrix // parts, HEAD + matrix % parts * PART
        count = min(at_once, run_of(first, between, num_rows - i, rows))
        scales = pairs.ctypes.data if bits == 8 else tables.ctypes.data
        scale_stride = _all_scales(like, d, part, expert, first, between, count, pairs, scales, size)
        codes, codes_stride = d[part] + expert * d[part + 1] + first * d[part + 2], between * d[part + 2]
        order = 0
        if not in_rows:
            _codes(d, part, expert, max(4, bits), width, first, between, count, buffer.ctypes.data, stride)
            codes, codes_stride = buffer.ctypes.data, stride
            order = d[part + 13] + expert * d[part + 14] if d[part + 13] else 0
        their_xs = xs
        if order and n:
            if order != sorted_of:
                sorted_of = order
                for j in range(n):
                    sorted_xs[j] = sorted_x.ctypes.data + 4 * j * width
                    sort_x(like, integers(xs, n)[j], order, width, sorted_xs[j])
                sorted_xs[n:] = sorted_xs[0]
            their_xs = sorted_xs.ctypes.data
        apart = n > 0 and count < num_rows
        to = out + 4 * i * width if n == 0 else (sums.ctypes.data if apart else out)
        call_products(
            tile,
            like,
            count,
            step,
            codes,
            codes_stride,
            scales,
            scale_stride,
            0,
            group,
            width,
            their_xs,
            n,
            to,
        )
        if apart:
            placed(sums, count, out, i, num_rows, n)
        if order and n == 0:
            for k in range(count):
                _unsort(floats(to + 4 * k * width, width), order, width)
        i += count
