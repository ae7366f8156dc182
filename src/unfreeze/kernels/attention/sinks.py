"""Sinks of attention on top of a flash kernel that knows none.

A sink is a learned score of each head that takes its share of the softmax and adds nothing to the output. It
adds exp(sink) to the sum of the softmax:

    lse' = log(exp(lse) + exp(sink)),   o' = o · exp(lse - lse')

The same kernel's backward is right given o' and lse': it uses them only as P = exp(scores - lse') and
Σ do·o'.

    dsink = -Σ exp(sink - lse') · Σ do·o'

Source: gpt-oss, arXiv:2508.10925, 2.2. H heads, L queries, v width of values; "..." any other dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def take_share_(o_HLv: Tensor, lse_HL: Tensor, sinks_H: Tensor) -> Tensor:
    """Turn o [..., H, L, v] into o', in place. -> lse' [..., H, L], float32 or wider.

    In place, because a float32 product of all heads would take twice o's own memory.
    """
    with_sink_HL = torch.logaddexp(lse_HL, sinks_H.to(lse_HL.dtype)[:, None])
    o_HLv.mul_((lse_HL - with_sink_HL).exp_()[..., None])
    return with_sink_HL


def sinks_gradient(grad_HLv: Tensor, o_HLv: Tensor, lse_HL: Tensor, sinks_H: Tensor) -> Tensor:
    """dsink [H] in the sinks' dtype, from the gradient of o', o' and lse'."""
    delta_HL = (grad_HLv.to(lse_HL.dtype) * o_HLv).sum(-1)
    share_HL = (sinks_H.to(lse_HL.dtype)[:, None] - lse_HL).exp_()
    return -share_HL.mul_(delta_HL).movedim(-2, 0).flatten(1).sum(1).to(sinks_H.dtype)
