"""AdamW's two moments, stored in float32, or in 8 bits with a scale per block of 256.

8 bytes per parameter, or 2.03.

Block-wise quantization after Dettmers et al. 2022, arXiv:2110.02861. Each moment has its own code:
exp_avg     int8   c: m = sign(c) (c/127)² a, a the largest |m| of the block. Steps shrink with m, so
                   small entries of a block keep changing
exp_avg_sq  uint8  c: v = b 2^((c-255) 24/254), b the largest v of the block, 0 for 0. Each step is 6.8 %
                   of v, down to 6e-8 of the largest:
                   a linear code would map small v to 0, and m / (sqrt(v) + eps) to infinity
Rounding is stochastic (unbiased for m, and for log v): rounded to nearest, v · 0.999 would never change.

A parameter is [U, N]: U rows of its dimension 0 (for stacked experts: matrices) with N numbers each. Blocks
end with their row, and the random number of each entry is a hash of (step, name, row, index in it). So it
depends neither on how many processes hold the rows nor on when the run was resumed. There are two exceptions:
norms, biases   (one dimension) have float32 moments: they are few
narrow rows     of less than 64 numbers share blocks, end to end. A process that holds some of the rows then
                has its own blocks; only adapters' B is so narrow, and it is never sharded
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from unfreeze.core.rows import Rows
from unfreeze.kernels.adamw import AdamWRule, AdamWUpdate, adamw

Moments = Literal["float32", "int8"]
BLOCK = 256
NARROW = 64  # numbers of a row: a shorter one would have 8 bytes of scales per row
# Number of parameters whose moments exist in float32 at once. On a CPU 2 MiB stay in cache; on a GPU a piece
# is about 40 launches, so it is 64 M parameters (512 MiB).
PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
OCTAVES = 24
GOLDEN = 0x9E3779B1 - 2**32  # 2^32 / golden ratio, odd: spreads neighbours far apart


@dataclass(frozen=True)
class Uncut:
    """Numbers that belong to these rows of a parameter and cannot be divided among its rows.

    If a row is no whole number of blocks, the scales are only useful to a process with exactly these rows.
    """

    rows: Rows


Part = Rows | Uncut
"""The part of a tensor that a process holds."""


class Float32:
    """Moments in float32. device: where they are created; None: beside the master.

    step: a tensor of one number on the host: every save reads it, and that must not wait for a GPU.
    """

    def __init__(self, name: str, master: Tensor, device: torch.device | None = None):
        self.step = torch.zeros((), dtype=torch.float32)
        self.exp_avg, self.exp_avg_sq = (
            torch.zeros_like(master, device=device, requires_grad=False) for _ in range(2)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"step": self.step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def parts(self, rows: Rows) -> dict[str, Part]:
        """Return the part of each tensor held here, for these rows of the parameter. `step` is whole."""
        return {"exp_avg": rows, "exp_avg_sq": rows}


class Momentum:
    """Muon's one moment, in float32: 4 bytes per parameter. It is of whole rows, as Float32's."""

    def __init__(self, master: Tensor):
        self.step = torch.zeros((), dtype=torch.float32)
        self.momentum = torch.zeros_like(master, requires_grad=False)

    def tensors(self) -> dict[str, Tensor]:
        return {"step": self.step, "momentum": self.momentum}

    def parts(self, rows: Rows) -> dict[str, Part]:
        """Return the part of each tensor held here, for these rows of the parameter."""
        return {"momentum": rows}


class Int8:
    """Moments as codes in the shape of the parameter, and a scale per block of each row.

    first: index of the master's first row in the whole parameter.
    """

    def __init__(self, name: str, master: Tensor, device: torch.device | None = None, first: int = 0):
        self.step, self._name, self._first = torch.zeros((), dtype=torch.float32), name, first
        device = device or master.device
        in_row = master.shape[1:].numel()
        self._by_rows = master.dim() > 1 and in_row >= NARROW
        self._rows, self._numbers = (len(master), in_row) if self._by_rows else (1, master.numel())
        self._blocks = -(-self._numbers // BLOCK)
        self.exp_avg = torch.zeros(master.shape, dtype=torch.int8, device=device)
        self.exp_avg_sq = torch.zeros(master.shape, dtype=torch.uint8, device=device)
        self.exp_avg_scale, self.exp_avg_sq_scale = (
            torch.zeros(self._rows * self._blocks, dtype=torch.float32, device=device) for _ in range(2)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if not name.startswith("_")}

    def parts(self, rows: Rows) -> dict[str, Part]:
        """Like Float32's; scales also have rows if blocks end with their row."""
        each = self._blocks
        scales = Rows(rows.first * each, rows.last * each, rows.of * each) if self._by_rows else Uncut(rows)
        return {"exp_avg": rows, "exp_avg_sq": rows, "exp_avg_scale": scales, "exp_avg_sq_scale": scales}

    def update(self, update: AdamWUpdate, rule: AdamWRule, impl: str) -> None:
        """Update piece by piece: decode moments to float32, update, encode again."""
        flat = replace(update, master=update.master.view(-1), gradient=update.gradient.reshape(-1))
        weight = None if update.weight is None else update.weight.view(-1)
        codes = self.exp_avg.view(-1), self.exp_avg_sq.view(-1)
        device = update.master.device
        seeds = [zlib.crc32(f"{update.step} {self._name}{of}".encode()) for of in (" m", " v")]
        for rows, numbers in self._pieces(PIECE.get(device.type, PIECE["cuda"])):
            start = rows.start * self._numbers + numbers.start
            shape = len(rows), len(numbers)
            piece = slice(start, start + len(rows) * len(numbers))
            begin = rows.start * self._blocks + numbers.start // BLOCK
            blocks = slice(begin, begin + len(rows) * -(-len(numbers) // BLOCK))
            m = decode_m(codes[0][piece].view(shape), self.exp_avg_scale[blocks])
            v = decode_v(codes[1][piece].view(shape), self.exp_avg_sq_scale[blocks])
            part = replace(
                flat,
                master=flat.master[piece],
                gradient=flat.gradient[piece],
                weight=None if weight is None else weight[piece],
                exp_avg=m.view(-1),
                exp_avg_sq=v.view(-1),
            )
            adamw([part], rule, impl)
            drawn = [uniform(seed, self._first + rows.start, numbers.start, shape, device) for seed in seeds]
            for codes_n, scale_b, (code_UN, largest_b) in (
                (codes[0], self.exp_avg_scale, encode_m(m, drawn[0])),
                (codes[1], self.exp_avg_sq_scale, encode_v(v, drawn[1])),
            ):
                codes_n[piece], scale_b[blocks] = code_UN.view(-1), largest_b

    def _pieces(self, size: int) -> Iterator[tuple[range, range]]:
        """Yield (rows, numbers of each) of at most `size` numbers: whole rows, or whole blocks of one row."""
        if self._numbers > size:
            for row in range(self._rows):
                for start in range(0, self._numbers, size):
                    yield range(row, row + 1), range(start, min(start + size, self._numbers))
            return
        each = size // max(1, self._numbers)
        for row in range(0, self._rows, each):
            yield range(row, min(row + each, self._rows)), range(self._numbers)


def uniform(
    seed: int, row: int, number: int, shape: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """Return float32 [U, N] in [0, 1): a hash of the seed, the rows from `row`, the numbers from `number`.

    The hash is `lowbias32` (Wellons 2018, hash-prospector): each input bit flips half of the output bits.
    """
    rows_U = _hash(torch.arange(row, row + shape[0], device=device).to(torch.int32))
    rows_U = _hash((rows_U.long() + seed).to(torch.int32))
    x_N = torch.arange(number, number + shape[1], device=device).to(torch.int32) * GOLDEN
    x_UN = _hash(rows_U.unsqueeze(1) + x_N)
    return x_UN.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def _hash(x: Tensor) -> Tensor:
    """Apply lowbias32 to int32 numbers, in place; a mask makes shifts logical."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def blocks_of(x_UN: Tensor) -> Tensor:
    """[U, N] -> [U, blocks, B]; each row's last block is padded with zeros. B: BLOCK, or N for short rows."""
    rows, numbers = x_UN.shape
    width = max(1, min(BLOCK, numbers))
    return torch.nn.functional.pad(x_UN, (0, -numbers % width)).view(rows, -1, width)


def _numbers(x_UbB: Tensor, numbers: int) -> Tensor:
    """Undo blocks_of: return [U, N]."""
    return x_UbB.flatten(1)[:, :numbers].contiguous()


def encode_m(m_UN: Tensor, drawn_UN: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes int8 [U, N], largest |m| of each block [U · blocks]). drawn: uniform in [0, 1)."""
    m_UbB = blocks_of(m_UN)
    largest_Ub = m_UbB.abs().amax(2)
    share_UbB = m_UbB.abs() / largest_Ub.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2)
    low_UbB = (share_UbB.sqrt() * 127).floor().clamp_max(126)
    below_UbB, above_UbB = (low_UbB / 127).square(), ((low_UbB + 1) / 127).square()
    up_UbB = blocks_of(drawn_UN) < (share_UbB - below_UbB) / (above_UbB - below_UbB)
    codes_UbB = ((low_UbB + up_UbB) * m_UbB.sign()).to(torch.int8)
    return _numbers(codes_UbB, m_UN.shape[1]), largest_Ub.view(-1)


def decode_m(codes_UN: Tensor, largest_b: Tensor) -> Tensor:
    """Return m, float32 [U, N]."""
    c_UbB = blocks_of(codes_UN).float() / 127
    return _numbers(c_UbB * c_UbB.abs() * largest_b.view(*c_UbB.shape[:2], 1), codes_UN.shape[1])


def encode_v(v_UN: Tensor, drawn_UN: Tensor) -> tuple[Tensor, Tensor]:
    """Return (codes uint8 [U, N], largest v of each block [U · blocks]). drawn: uniform in [0, 1)."""
    v_UbB = blocks_of(v_UN)
    largest_Ub = v_UbB.amax(2)
    octaves_UbB = torch.log2(v_UbB / largest_Ub.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(2))
    code_UbB = 255 + octaves_UbB * (254 / OCTAVES) + blocks_of(drawn_UN)
    codes_UbB = code_UbB.floor().clamp(1, 255).mul_(v_UbB > 0).to(torch.uint8)
    return _numbers(codes_UbB, v_UN.shape[1]), largest_Ub.view(-1)


def decode_v(codes_UN: Tensor, largest_b: Tensor) -> Tensor:
    """Return v, float32 [U, N]."""
    c_UbB = blocks_of(codes_UN)
    octaves_UbB = torch.exp2((c_UbB.float() - 255) * (OCTAVES / 254))
    return _numbers(octaves_UbB * (c_UbB > 0) * largest_b.view(*c_UbB.shape[:2], 1), codes_UN.shape[1])


def state_of(
    moments: Moments, name: str, master: Tensor, device: torch.device | None, first: int = 0
) -> Float32 | Int8:
    """Create the moments of a parameter; `master` holds its rows from `first` on."""
    if moments == "float32" or master.dim() < 2:
        return Float32(name, master, device)
    return Int8(name, master, device, first)
