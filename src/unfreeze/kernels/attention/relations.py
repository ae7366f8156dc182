"""Distance of two models' self-relations: KL between rows of softmax(A Aᵀ / √c), inside documents.

Causal, one block of rows at a time, as in by_blocks.py: no [L, L] matrix of a long document is held. The
gradient is computed in the same pass, from the scores at hand.

    z_ts = a_t · a_s / √c,  s <= t of one document;  p = softmax(z) of the trained model, q of the other
    loss_t = KL(q_t ‖ p_t),  dz = p - q,  da_t += Σ_s dz_ts a_s / √c,  da_s += Σ_t dz_ts a_t / √c

T tokens, A relation heads, c width of one, S documents of L tokens of a bucket.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.attention.by_blocks import QUERIES, SCORE_BYTES
from unfreeze.kernels.attention.layout import DocumentLayout


def relation_divergence(
    own_T: Tensor, their_T: Tensor, weights_T: Tensor, layout: DocumentLayout, heads: int
) -> Tensor:
    """Σ_t w_t · (1/A) Σ_a KL(q_ta ‖ p_ta), float32 scalar (float64 inputs stay float64).

    own_T, their_T  [T, …]: all elements of a token are split into A = `heads` pieces; the widths of the two
                    models, and so c, may differ

    The gradient reaches own_T only.
    """
    exact = torch.promote_types(own_T.dtype, torch.float32)
    return _Relations.apply(own_T, their_T.detach(), weights_T.to(exact), layout, heads)


def block_bytes(heads: int, tokens: int, longest: int) -> int:
    """Bytes of a tensor of scores, for as many documents as fit in SCORE_BYTES. Three are alive."""
    one = _block(heads, longest)
    return min(max(SCORE_BYTES, one), one * -(-tokens // longest))


def _block(heads: int, length: int) -> int:
    """Bytes of a block of rows of one document."""
    return 4 * heads * min(QUERIES, length) * length


class _Relations(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_T: Tensor, their_T: Tensor, weights_T: Tensor, layout: DocumentLayout, heads: int
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        total = weights_T.new_zeros(())
        own_N, their_N = (_slots(x, layout) for x in (own_T, their_T))
        weights_N = weights_T  # 0 for padding
        if layout.slot_T is not None:
            weights_N = weights_T.new_zeros(layout.num_slots).index_copy_(0, layout.slot_T, weights_T)
        d_N = torch.empty_like(own_N) if wanted else None
        begin = 0
        for bucket in layout.buckets:
            at_once = max(1, SCORE_BYTES // _block(heads, bucket.length))
            for first in range(0, bucket.num_documents, at_once):
                count = min(at_once, bucket.num_documents - first)
                rows = slice(begin + first * bucket.length, begin + (first + count) * bucket.length)
                own, their = (_by_head(x[rows], count, heads, weights_T.dtype) for x in (own_N, their_N))
                kl, d_SALc = _documents(own, their, weights_N[rows].unflatten(0, (count, -1)), wanted)
                total += kl
                if d_N is not None and d_SALc is not None:
                    d_N[rows] = d_SALc.transpose(1, 2).flatten(2).flatten(0, 1).to(d_N.dtype)
                del own, their, d_SALc
            begin += bucket.num_slots
        if d_N is not None:
            d_T = d_N if layout.slot_T is None else d_N.index_select(0, layout.slot_T)
            ctx.save_for_backward(d_T.view(own_T.shape))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        (d_T,) = ctx.saved_tensors
        return d_T * grad.to(d_T.dtype), None, None, None, None


def _documents(
    own_SALc: Tensor, their_SALc: Tensor, weights_SL: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """(the weighted sum of these documents, its gradient by own)."""
    heads, length = own_SALc.shape[1:3]
    total, d_SALc = weights_SL.new_zeros(()), torch.zeros_like(own_SALc) if wanted else None
    for begin in range(0, length, QUERIES):
        end = min(begin + QUERIES, length)
        kl, dz = _rows(own_SALc, their_SALc, weights_SL[:, None, begin:end] / heads, begin, end)
        total += kl
        if d_SALc is not None:
            d_SALc[:, :, begin:end] += dz @ own_SALc[:, :, :end]
            d_SALc[:, :, :end] += dz.mT @ own_SALc[:, :, begin:end]
        del dz  # free it before the next block allocates its own
    return total, d_SALc


def _rows(
    own_SALc: Tensor, their_SALc: Tensor, weights_S1n: Tensor, begin: int, end: int
) -> tuple[Tensor, Tensor]:
    """For the rows begin:end: (the weighted sum, its gradient by a_t · a_s)."""
    hidden = torch.ones(end - begin, end, dtype=torch.bool, device=own_SALc.device).triu_(begin + 1)
    log_p, log_q = (_log_softmax(x, begin, end, hidden) for x in (own_SALc, their_SALc))
    # a masked pair has log 0 on both sides: its share is 0
    q = log_q.exp()
    apart_SAn = log_q.sub_(log_p).masked_fill_(hidden, 0.0).mul_(q).sum(-1)
    dz = log_p.exp_().sub_(q).mul_(weights_S1n[..., None]).mul_(own_SALc.shape[-1] ** -0.5)
    return (apart_SAn * weights_S1n).sum(), dz


def _log_softmax(x_SALc: Tensor, begin: int, end: int, hidden: Tensor) -> Tensor:
    """log softmax of the rows begin:end over the tokens up to each, [S, A, n, end]."""
    scale = 1 / math.sqrt(x_SALc.shape[-1])
    scores = (x_SALc[:, :, begin:end] @ x_SALc[:, :, :end].mT).mul_(scale)
    return scores.masked_fill_(hidden, -torch.inf).log_softmax(-1)


def _slots(x_T: Tensor, layout: DocumentLayout) -> Tensor:
    """[T, …] -> [N, C], the documents of a bucket in a rectangle."""
    x_TC = x_T.flatten(1)
    return x_TC if layout.source_N is None else x_TC.index_select(0, layout.source_N)


def _by_head(x_NC: Tensor, documents: int, heads: int, dtype: torch.dtype) -> Tensor:
    """[S · L, C] -> [S, A, L, c]."""
    return x_NC.to(dtype).view(documents, -1, heads, x_NC.shape[1] // heads).transpose(1, 2).contiguous()
