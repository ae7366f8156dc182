"""AdamW's two moments: in float32, or in 8 bits with a scale per block of 256.

8 bytes per parameter, or 2.03.

Block-wise quantization after Dettmers et al. 2022, arXiv:2110.02861. Each moment has a map of its own:
    exp_avg     int8   c: m = sign(c) (c/127)² a, a the largest |m| of the block. Steps shrink with m, so
                small entries of a block keep moving
    exp_avg_sq  uint8  c: v = b 2^((c-255) 24/254), b the largest v of the block, 0 for 0. Each step is 6.8 %
                of v, down to 6e-8 of the largest:
                          a linear code would send small v to 0, and m / (sqrt(v) + eps) to infinity
Rounding is stochastic (unbiased for m, and for log v): rounded to nearest, v · 0.999 would never change. The
random numbers come from (step, name), so a resumed run draws the same ones.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from unfreeze.core.rows import Rows
from unfreeze.kernels.adamw import Rule, Update, adamw

Moments = Literal["float32", "int8"]
BLOCK = 256
# Parameters whose moments exist in float32 at once: on a CPU 2 MiB stay in cache; on a GPU a piece is some 40
# launches, so it is 64 M of them (512 MiB).
PIECE = {"cpu": 1 << 18, "cuda": 1 << 26}
OCTAVES = 24


@dataclass(frozen=True)
class Uncut:
    """Numbers that belong to these rows of a parameter and cannot be divided among its rows.

    Where a row is no whole number of blocks, the scales are of use to a process that holds exactly these
    rows, and to no other.
    """

    rows: Rows


Part = Rows | Uncut
"""Which part of a tensor a process holds."""


class Float32:
    """device: where they are made; None: beside the master.

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
        """What of each tensor is here, where these rows of the parameter are. `step` is whole everywhere."""
        return {"exp_avg": rows, "exp_avg_sq": rows}


class Int8:
    """Codes in the shape of the parameter, and a scale per block of its numbers end to end."""

    def __init__(self, name: str, master: Tensor, device: torch.device | None = None):
        self.step, self._name = torch.zeros((), dtype=torch.float32), name
        blocks, device = -(-master.numel() // BLOCK), device or master.device
        self.exp_avg = torch.zeros(master.shape, dtype=torch.int8, device=device)
        self.exp_avg_sq = torch.zeros(master.shape, dtype=torch.uint8, device=device)
        self.exp_avg_scale, self.exp_avg_sq_scale = (
            torch.zeros(blocks, dtype=torch.float32, device=device) for _ in range(2)
        )

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in vars(self).items() if not name.startswith("_")}

    def parts(self, rows: Rows) -> dict[str, Part]:
        """As Float32's; of the scales rows too, where a row of the parameter is a whole number of blocks."""
        in_row = self.exp_avg.shape[1:].numel()
        each, left = divmod(in_row, BLOCK)
        scales = Uncut(rows) if left else Rows(rows.first * each, rows.last * each, rows.of * each)
        return {"exp_avg": rows, "exp_avg_sq": rows, "exp_avg_scale": scales, "exp_avg_sq_scale": scales}

    def update(self, update: Update, rule: Rule, impl: str) -> None:
        """Piece by piece: moments to float32, the step, back to codes."""
        flat = replace(update, master=update.master.view(-1), gradient=update.gradient.reshape(-1))
        weight, codes = (
            None if update.weight is None else update.weight.view(-1),
            (self.exp_avg.view(-1), self.exp_avg_sq.view(-1)),
        )
        generator = torch.Generator(update.master.device).manual_seed(
            zlib.crc32(f"{update.step} {self._name}".encode())
        )
        size = PIECE.get(update.master.device.type, PIECE["cuda"])
        for start in range(0, flat.master.numel(), size):
            piece, blocks = slice(start, start + size), slice(start // BLOCK, (start + size) // BLOCK)
            m, v = (
                decode_m(codes[0][piece], self.exp_avg_scale[blocks]),
                decode_v(codes[1][piece], self.exp_avg_sq_scale[blocks]),
            )
            part = replace(
                flat,
                master=flat.master[piece],
                gradient=flat.gradient[piece],
                weight=None if weight is None else weight[piece],
            )
            adamw([replace(part, exp_avg=m, exp_avg_sq=v)], rule, impl)
            for codes_n, scale_b, (code_n, largest_b) in (
                (codes[0], self.exp_avg_scale, encode_m(m, generator)),
                (codes[1], self.exp_avg_sq_scale, encode_v(v, generator)),
            ):
                codes_n[piece], scale_b[blocks] = code_n, largest_b


def blocks_of(x_n: Tensor) -> Tensor:
    """[n] -> [blocks, BLOCK], the last one filled up with zeros."""
    return torch.nn.functional.pad(x_n, (0, -len(x_n) % BLOCK)).view(-1, BLOCK)


def encode_m(m_n: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(codes int8 [n], largest |m| of each block)."""
    m_bB = blocks_of(m_n)
    largest_b = m_bB.abs().amax(1)
    share_bB = m_bB.abs() / largest_b.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    low_bB = (share_bB.sqrt() * 127).floor().clamp_max(126)
    below_bB, above_bB = (low_bB / 127).square(), ((low_bB + 1) / 127).square()
    up_bB = torch.rand(m_bB.shape, generator=generator, device=m_n.device) < (share_bB - below_bB) / (
        above_bB - below_bB
    )
    return ((low_bB + up_bB) * m_bB.sign()).to(torch.int8).view(-1)[: len(m_n)], largest_b


def decode_m(codes_n: Tensor, largest_b: Tensor) -> Tensor:
    """float32 [n]."""
    c_bB = blocks_of(codes_n).float() / 127
    return (c_bB * c_bB.abs() * largest_b.unsqueeze(1)).view(-1)[: len(codes_n)]


def encode_v(v_n: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(codes uint8 [n], largest v of each block)."""
    v_bB = blocks_of(v_n)
    largest_b = v_bB.amax(1)
    octaves_bB = torch.log2(v_bB / largest_b.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1))
    code_bB = (
        255 + octaves_bB * (254 / OCTAVES) + torch.rand(v_bB.shape, generator=generator, device=v_n.device)
    )
    return code_bB.floor().clamp(1, 255).mul_(v_bB > 0).to(torch.uint8).view(-1)[: len(v_n)], largest_b


def decode_v(codes_n: Tensor, largest_b: Tensor) -> Tensor:
    """float32 [n]."""
    c_bB = blocks_of(codes_n)
    return (torch.exp2((c_bB.float() - 255) * (OCTAVES / 254)) * (c_bB > 0) * largest_b.unsqueeze(1)).view(
        -1
    )[: len(codes_n)]


KINDS: dict[Moments, type[Float32] | type[Int8]] = {"float32": Float32, "int8": Int8}
