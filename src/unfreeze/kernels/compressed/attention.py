"""Attention of a token to the last W tokens and to the entries of its document's windows before it.

Window w of m tokens is complete at token t if w < (t + 1) // m (t counted from the document's start); t sees
the entries of complete windows, or the K of them that an indexer scores highest. All heads share one key per
token and per entry, which is the value too. A sink is a score of each head without a value.

    c = scale · q kᵀ,   P = exp(c - lse),   lse = log(Σ_keys exp(c) + exp(sink_h)),   o = P k
    dP = do kᵀ,   dc = scale · P · (dP - Σ do·o),   dk = dcᵀ q + Pᵀ do,   dsink = -Σ exp(sink - lse) · Σ do·o

One block of queries at a time, as in attention/by_blocks.py: the scores of all pairs are never held, and
backward computes a block's again. In float32; float64 stays float64.
Source: DeepSeek-V4's report, 2.3; transformers 5.23, models/deepseek_v4.

T tokens, E entries, H heads, d width of a key; n queries and N keys of a block, h heads at once; K entries of
a query, -1 in the place of those it lacks. S rows of a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.attention.by_blocks import QUERIES, SCORE_BYTES
from unfreeze.kernels.compressed.entries import Entries
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.sparse_attention import Index, index_scores


class _Sees(NamedTuple):
    scale: float
    window: int
    entries: Entries


def attend(
    q_THd: Tensor,
    k_Td: Tensor,
    e_Ed: Tensor,
    sinks_H: Tensor,
    entries: Entries,
    scale: float,
    window: int,
    chosen_TK: Tensor | None = None,
    reuse: Reuse | None = None,
) -> Tensor:
    """o [T, H, d] in q's dtype. chosen_TK: from `select`; None: every query sees all complete windows.

    window: tokens that a query sees, itself included. `reuse`: of a layer that is recomputed.
    """
    return _Attend.apply(q_THd, k_Td, e_Ed, sinks_H, chosen_TK, _Sees(scale, window, entries), reuse)


@torch.no_grad()
def select(index: Index, entries: Entries, keys: int) -> Tensor:
    """The places among its document's entries that each token sees, int32 [T, K]; -1 where it has fewer.

    index: queries and weights of every token, one key [E, i] per entry. Rows of documents of at most
    K = `keys` entries are zeros, and nobody reads them.
    """
    tokens, heads = index.q_TJi.shape[:2]
    chosen_TK = torch.zeros((tokens, keys), dtype=torch.int32, device=index.k_Ti.device)
    for rows, theirs in entries.documents:
        length, count = rows.stop - rows.start, theirs.stop - theirs.start
        each = max(1, min(QUERIES, SCORE_BYTES // (4 * heads * max(1, count))))
        for begin in range(0, length if count > keys else 0, each):
            block = slice(rows.start + begin, min(rows.start + begin + each, rows.stop))
            I_nE = index_scores(index.q_TJi[block], index.w_TJ[block], index.k_Ti[theirs], index.scale)
            complete_n1 = _complete(begin, block.stop - rows.start, entries.rate, I_nE.device)
            I_nE.masked_fill_(torch.arange(count, device=I_nE.device) >= complete_n1, -torch.inf)
            best_nK = I_nE.topk(keys, dim=-1, sorted=False).indices
            chosen_TK[block] = best_nK.masked_fill(best_nK >= complete_n1, -1).to(torch.int32)
    return chosen_TK


def attend_one(q_SHd: Tensor, k_SNd: Tensor, seen_SN: Tensor, sinks_H: Tensor, scale: float) -> Tensor:
    """One query per row: o [S, H, d]. seen_SN: bool, the keys (tokens and entries) that it sees."""
    wide = torch.promote_types(q_SHd.dtype, torch.float32)
    keys_SNd = k_SNd.to(wide)
    c_SHN = (q_SHd.to(wide) @ keys_SNd.mT) * scale
    c_SHN.masked_fill_(~seen_SN[:, None], -torch.inf)
    sinks_SH1 = sinks_H.to(wide)[:, None].expand(len(q_SHd), -1, 1)
    share_SHN = torch.cat((c_SHN, sinks_SH1), dim=-1).softmax(-1)[..., :-1]
    return (share_SHN @ keys_SNd).to(q_SHd.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_Td: Tensor,
        e_Ed: Tensor,
        sinks_H: Tensor,
        chosen_TK: Tensor | None,
        sees: _Sees,
        reuse: Reuse | None,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            return _forward(q_THd, k_Td, e_Ed, sinks_H, chosen_TK, sees)

        o, lse = compute() if reuse is None else reuse(compute)
        ctx.save_for_backward(q_THd, k_Td, e_Ed, sinks_H, chosen_TK, o, lse)
        ctx.sees = sees
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_Td, e_Ed, sinks_H, chosen_TK, o, lse = ctx.saved_tensors
        dparts = _backward(grad, q_THd, k_Td, e_Ed, sinks_H, chosen_TK, o, lse, ctx.sees)
        return (*dparts, None, None, None)


def _forward(
    q_THd: Tensor, k_Td: Tensor, e_Ed: Tensor, sinks_H: Tensor, chosen_TK: Tensor | None, sees: _Sees
) -> tuple[Tensor, Tensor]:
    """o [T, H, d] and the log-sum-exp of each query's scores, [T, H]."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    o, lse = torch.empty_like(q_THd), q_THd.new_empty(q_THd.shape[:2], dtype=wide)
    for block in _blocks(sees, chosen_TK, q_THd.device):
        keys_Nd = torch.cat((k_Td[block.tokens], e_Ed[block.entries])).to(wide)
        for heads in _heads(q_THd.shape[1], *block.hidden_nN.shape):
            c_nhN = (q_THd[block.queries, heads].to(wide) @ keys_Nd.mT).mul_(sees.scale)
            c_nhN.masked_fill_(block.hidden_nN[:, None], -torch.inf)
            total_nh = torch.logaddexp(c_nhN.logsumexp(-1), sinks_H[heads].to(wide))
            o[block.queries, heads] = (c_nhN.sub_(total_nh[..., None]).exp_() @ keys_Nd).to(o.dtype)
            lse[block.queries, heads] = total_nh
    return o, lse


def _backward(
    grad: Tensor,
    q_THd: Tensor,
    k_Td: Tensor,
    e_Ed: Tensor,
    sinks_H: Tensor,
    chosen_TK: Tensor | None,
    o: Tensor,
    lse: Tensor,
    sees: _Sees,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, e and the sinks; those of shared keys are summed in float32 or wider."""
    wide, dq = lse.dtype, torch.empty_like(q_THd)
    dk, de, dsinks = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_Td, e_Ed, sinks_H))
    for block in _blocks(sees, chosen_TK, q_THd.device):
        keys_Nd = torch.cat((k_Td[block.tokens], e_Ed[block.entries])).to(wide)
        dkeys_Nd = torch.zeros_like(keys_Nd)
        for heads in _heads(q_THd.shape[1], *block.hidden_nN.shape):
            q, do, o_ = (x[block.queries, heads].to(wide) for x in (q_THd, grad, o))
            total_nh = lse[block.queries, heads]
            delta_nh = (do * o_).sum(-1)
            dsinks[heads] -= ((sinks_H[heads].to(wide) - total_nh).exp() * delta_nh).sum(0)

            P_nhN = (q @ keys_Nd.mT).mul_(sees.scale).masked_fill_(block.hidden_nN[:, None], -torch.inf)
            P_nhN.sub_(total_nh[..., None]).exp_()
            dc_nhN = (do @ keys_Nd.mT).sub_(delta_nh[..., None]).mul_(P_nhN).mul_(sees.scale)
            dq[block.queries, heads] = (dc_nhN @ keys_Nd).to(dq.dtype)
            dkeys_Nd += dc_nhN.flatten(0, 1).mT @ q.flatten(0, 1)
            dkeys_Nd += P_nhN.flatten(0, 1).mT @ do.flatten(0, 1)
        dk[block.tokens] += dkeys_Nd[: block.num_tokens]
        de[block.entries] += dkeys_Nd[block.num_tokens :]
    return dq, dk.to(k_Td.dtype), de.to(e_Ed.dtype), dsinks.to(sinks_H.dtype)


class _Block(NamedTuple):
    """Queries, the tokens and entries that any of them sees, and bool [n, N] of what a query does not see."""

    queries: slice
    tokens: slice
    entries: slice
    hidden_nN: Tensor

    @property
    def num_tokens(self) -> int:
        return self.tokens.stop - self.tokens.start


def _blocks(sees: _Sees, chosen_TK: Tensor | None, device: torch.device) -> Iterator[_Block]:
    rate, window = sees.entries.rate, sees.window
    for rows, theirs in sees.entries.documents:
        length, count = rows.stop - rows.start, theirs.stop - theirs.start
        for begin in range(0, length, QUERIES):
            end = min(begin + QUERIES, length)
            first, complete = max(0, begin - window + 1), end // rate
            query_n1 = torch.arange(begin, end, device=device)[:, None]
            token_N = torch.arange(first, end, device=device)
            hidden_nN = (token_N > query_n1) | (token_N <= query_n1 - window)
            queries = slice(rows.start + begin, rows.start + end)
            if chosen_TK is None or count <= chosen_TK.shape[1]:
                entry_E = torch.arange(complete, device=device)
                unseen_nE = entry_E >= _complete(begin, end, rate, device)
            else:  # a column more takes the places that a query lacks
                unseen_nE = torch.ones((end - begin, count + 1), dtype=torch.bool, device=device)
                chosen_nK = chosen_TK[queries].long()
                unseen_nE.scatter_(1, chosen_nK.where(chosen_nK >= 0, count), False)
                unseen_nE = unseen_nE[:, :complete]
            yield _Block(
                queries,
                slice(rows.start + first, rows.start + end),
                slice(theirs.start, theirs.start + complete),
                torch.cat((hidden_nN, unseen_nE), dim=1),
            )


def _complete(begin: int, end: int, rate: int, device: torch.device) -> Tensor:
    """int64 [n, 1]: the number of windows complete at each of the tokens begin:end of a document."""
    return ((torch.arange(begin, end, device=device) + 1) // rate)[:, None]


def _heads(heads: int, queries: int, keys: int) -> Iterator[slice]:
    """Heads whose scores for a block fit in SCORE_BYTES; at least one."""
    each = max(1, min(heads, SCORE_BYTES // (4 * queries * keys)))
    return (slice(first, min(first + each, heads)) for first in range(0, heads, each))
