"""The softmax of one block of logits and its gradient on CUDA, in the memory of the logits.

A program per row, two passes over its words. Source of the one-pass maximum and sum: Milakov & Gimelshein
2018, arXiv:1805.02867.
"""

# A launch takes numbers for constexpr parameters, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.loops.triton_options import power_of_two


@triton.jit
def _softmax_gradient(
    z, target, weight, log_p, wins, stride, vocab, WANTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = z + row * stride
    aim = tl.load(target + row)
    at = tl.load(start + aim).to(tl.float32)
    largest = at
    total = tl.zeros((), tl.float32)
    for begin in range(0, vocab, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        above = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - above) + tl.sum(tl.exp(x - above), axis=0)
        largest = above
    tl.store(log_p + row, at - largest - tl.log(total))
    tl.store(wins + row, (at >= largest).to(tl.int8))
    if WANTED:
        w = tl.load(weight + row).to(tl.float32)
        for begin in range(0, vocab, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            x = tl.load(start + column, mask=column < vocab, other=0.0).to(tl.float32)
            p = tl.exp(x - largest) / total
            g = w * tl.where(column == aim, p - 1.0, p)
            tl.store(start + column, g.to(z.dtype.element_ty), mask=column < vocab)


def softmax_gradient(
    logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.softmax_gradient, for float32, bf16 and fp16."""
    rows, vocab = logits_NV.shape
    log_p_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    wins_N = torch.empty(rows, dtype=torch.int8, device=logits_NV.device)
    if rows:
        logits_NV = logits_NV.contiguous()
        _softmax_gradient[(rows,)](
            logits_NV,
            targets_N.contiguous(),
            weights_N.float().contiguous(),
            log_p_N,
            wins_N,
            logits_NV.stride(0),
            vocab,
            WANTED=wanted,
            BLOCK=min(power_of_two(vocab), 4096),
        )
    return log_p_N, wins_N.bool(), logits_NV
