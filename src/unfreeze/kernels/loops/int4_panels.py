"""INT4 weights expanded directly into the panels of `bf16_tile` (panels.py), 64 columns at a time.

Values are the format's, bit for bit: bf16(float32(code - 8) · scale); but magnitudes under 1e-38 become 0, as
they do in the multiplication. A group (32 weights or more) has 16 possible values: a table in one register,
indexed by the nibble (more in row_dots.py).

N rows of W, M columns, B = M / 2 bytes of a row, `group_bytes` bytes of a group, a multiple of 16.
"""

from __future__ import annotations

from llvmlite import ir

from unfreeze.kernels.loops.bf16_tile import COLUMNS, FLOATS, I16, I32, LINE, everywhere, narrowed, prefetch
from unfreeze.kernels.loops.llvm import Value, instruction
from unfreeze.kernels.loops.numba_options import serial
from unfreeze.kernels.loops.panels import AHEAD, emit_columns, emit_rows, looked_up

CHUNK_BYTES = 16  # bytes of codes at a time: 32 weights of one group


def _weights(builder: ir.IRBuilder, codes: Value, scale: Value) -> Value:
    """codes: address of 16 bytes, the low nibble of each first; scale: address of the group's bf16 scale.

    One instruction rounds the 16 values of a group to nearest even.
    """
    bits = builder.shl(
        builder.zext(builder.load(builder.inttoptr(scale, I16.as_pointer()), align=2), I32), I32(16)
    )
    factor = everywhere(builder, builder.bitcast(bits, ir.FloatType()), FLOATS)
    exact = builder.fmul(ir.Constant(FLOATS, [float(code - 8) for code in range(16)]), factor)
    return looked_up(builder, codes, narrowed(builder, exact))


@instruction
def _int4_rows(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    return emit_rows(_weights)


@instruction
def _int4_columns(context, codes, code_stride, scales, scale_stride, out):  # pragma: no cover - compiled
    return emit_columns(_weights)


@serial
def pack_int4_rows(codes, scales, group_bytes, first, panel):
    """panel[k, j] = (W[first + j, 2k], W[first + j, 2k + 1]) for k < B.

    codes uint8 [N, B], scales uint16 [N, G], panel uint32 [>= B, COLUMNS].
    """
    for begin in range(0, codes.shape[1], CHUNK_BYTES):
        for j in range(0, COLUMNS, 16):
            here = codes.ctypes.data + (first + j) * codes.strides[0] + begin
            scale = scales.ctypes.data + (first + j) * scales.strides[0] + begin // group_bytes * 2
            if begin % LINE == 0:
                # prefetch the next panel's: no hardware prefetcher foresees rows so far apart
                for i in range(16):
                    prefetch(here + (COLUMNS + i) * codes.strides[0])
                    prefetch(scale + (COLUMNS + i) * scales.strides[0])
            _int4_rows(
                here,
                codes.strides[0],
                scale,
                scales.strides[0],
                panel.ctypes.data + 4 * (begin * COLUMNS + j),
            )


@serial
def pack_int4_columns(codes, scales, group_bytes, first, panel):
    """panel[k, j] = (W[2k, first + j], W[2k + 1, first + j]) for k < N / 2.

    Shapes as in `pack_int4_rows`, panel [>= N / 2, COLUMNS].
    """
    for k in range(codes.shape[0] // 2):
        for begin in range(first // 2, (first + COLUMNS) // 2, CHUNK_BYTES):
            here = codes.ctypes.data + 2 * k * codes.strides[0] + begin
            scale = scales.ctypes.data + 2 * k * scales.strides[0] + begin // group_bytes * 2
            if begin % LINE == first // 2 % LINE:
                for i in range(2):
                    prefetch(here + (AHEAD + i) * codes.strides[0])
                    prefetch(scale + (AHEAD + i) * scales.strides[0])
            _int4_columns(
                here,
                codes.strides[0],
                scale,
                scales.strides[0],
                panel.ctypes.data + 4 * (k * COLUMNS + 2 * begin - first),
            )
