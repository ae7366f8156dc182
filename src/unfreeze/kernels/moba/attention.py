"""Attention of whole documents to chosen blocks: work and memory grow with C · L, not with L².

A pair is a query head of a token and one of its C blocks. The pairs of a block and a key head make one
product of its queries with its B keys; blocks with about as many queries are padded to one batched product.

    c = scale · q kᵀ,   lse_p = log Σ exp(c) of a pair,   o_p = softmax(c) v
    lse = log Σ_p exp(lse_p),   o = Σ_p exp(lse_p - lse) · o_p
    P = exp(c - lse),   dP = do vᵀ,   dc = scale · P · (dP - Σ do·o)
    dq = Σ_p dc k,   dk = dcᵀ q,   dv = Pᵀ do

Only q, k, v, o, lse and the choice are kept; backward computes c again. Sums over pairs run in a fixed
order, so equal inputs give equal bits. In float32; float64 stays float64.
Source: the sum over parts of a softmax is FlashAttention's, arXiv:2205.14135, 3.1; blocks by queries:
arXiv:2511.11571, 4.

T tokens, H query heads, G key heads, rep = H / G, d and v widths, B tokens of a block, C blocks of a query.
Of a unit, some documents and key heads: N tokens, W blocks of all its key heads, R = G N rep rows, a query
head of a token each, P = R C pairs. Of a product: Z blocks, n queries of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.attention.by_blocks import SCORE_BYTES
from unfreeze.kernels.attention.layout import DocumentLayout
from unfreeze.kernels.packed_attention import packed_attention
from unfreeze.kernels.recompute import Reuse

FILL = 0.75  # blocks share a product if they have at least this share of the queries of its largest


def attend(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    layout: DocumentLayout,
    scale: float,
    block: int,
    chosen_THC: Tensor,
    reuse: Reuse | None = None,
) -> Tensor:
    """o [T, H, v] in q's dtype. chosen_THC: [T, H, C - 1] from `select`.

    Documents of at most C · B tokens attend in full, as in packed_attention. `reuse`: of a layer that is
    recomputed.
    """
    each = chosen_THC.shape[-1] + 1
    apart = layout.beyond(block * each)
    outputs: list[Tensor] = []
    if apart.shorter is not None and apart.rows_N is not None:
        q, k, v = (x.index_select(0, apart.rows_N) for x in (q_THd, k_TGd, v_TGv))
        outputs.append(packed_attention(q, k, v, apart.shorter, scale, reuse=reuse))
    if apart.longer:
        heads, groups = q_THd.shape[1], k_TGd.shape[1]
        sizes = _Sizes(block, each, heads // groups, groups, max(q_THd.shape[-1], v_TGv.shape[-1]))
        units = layout.once(sizes, lambda: tuple(_units(apart.longer, sizes, q_THd.device)))
        outputs.append(_Attend.apply(q_THd, k_TGd, v_TGv, chosen_THC, _Of(scale, sizes, units), reuse))
    o_THv = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return o_THv if apart.order_T is None else o_THv.index_select(0, apart.order_T)


def scratch_bytes(
    sizes: tuple[int, int, int, int], *, block: int, chosen: int, tokens: int, length: int
) -> int:
    """Bytes that backward adds to what attention holds, for documents of `length` among `tokens`.

    sizes: H, G, d, v. Of the unit at work, in float32: q, o, do, dq of each pair and their sum twice; k and
    v, their gradients, and these by tokens; of a pair three int64. And what a product holds.
    """
    heads, groups, d, v = sizes
    of = _Sizes(block, chosen, heads // groups, groups, max(d, v))
    documents, some = of.at_once(length)
    documents = min(documents, max(1, tokens // length))
    rows = documents * some * length * of.rep
    of_rows = rows * (4 * (3 * d + 2 * v + chosen * d) + 24 * chosen)
    of_keys = 4 * documents * some * length * 3 * (d + v)
    return of_rows + of_keys + of.pairs_at_once(rows * chosen) * of.pair_bytes


class _Sizes(NamedTuple):
    """B, C, rep, G, and the greater of d and v."""

    block: int
    each: int
    rep: int
    groups: int
    width: int

    def at_once(self, length: int) -> tuple[int, int]:
        """Documents of `length` and key heads of a unit: o of its pairs fits in SCORE_BYTES, or it is one."""
        of_head = 4 * length * self.rep * self.each * self.width
        groups = max(1, min(self.groups, SCORE_BYTES // of_head))
        return max(1, SCORE_BYTES // (of_head * self.groups)), groups

    @property
    def pair_bytes(self) -> int:
        """Bytes of a pair in a backward product, float32: its scores three times, q, dq, do and one more."""
        return 4 * (3 * self.block + 4 * self.width)

    def pairs_at_once(self, pairs: int) -> int:
        """Pairs of a product: half of a unit's, if they fit in SCORE_BYTES."""
        return max(1, min(SCORE_BYTES // self.pair_bytes, pairs // 2))


class _Unit(NamedTuple):
    """Some longer documents and key heads. Blocks are numbered key head by key head, document by document.

    heads, groups  query and key heads
    rows_N, out    its tokens in the batch; their places among those of all longer documents
    place_N        of a token in its document
    first_GN1      the number of the first block of its document
    keys_WB        rows of a block's keys among [G N]; the end of a document's last block repeats its last key
    begin_W        place of a block's first key in its document
    """

    heads: slice
    groups: slice
    rows_N: Tensor
    out: slice
    place_N: Tensor
    first_GN1: Tensor
    keys_WB: Tensor
    begin_W: Tensor

    def rows(self, x: Tensor, heads: slice, wide: torch.dtype) -> Tensor:
        """[T, heads, w] of the batch -> [G N rep, w]: key head by key head, token by token."""
        return self.sorted(x[self.rows_N, heads].to(wide))

    def sorted(self, x_Nhw: Tensor) -> Tensor:
        """[N, G rep, w] -> [G N rep, w]."""
        return x_Nhw.unflatten(1, (len(self.first_GN1), -1)).transpose(0, 1).flatten(0, 2)

    def tokens(self, x_Rw: Tensor) -> Tensor:
        """[G N rep, w] -> [N, G rep, w]."""
        x_GNJw = x_Rw.view(len(self.first_GN1), len(self.rows_N), -1, x_Rw.shape[-1])
        return x_GNJw.transpose(0, 1).flatten(1, 2)

    def of_keys(self, x_WBw: Tensor) -> Tensor:
        """[W, B, w] of blocks -> [N, G, w] of tokens."""
        block = x_WBw.shape[1]
        rows_GN = (self.first_GN1[..., 0] + self.place_N // block) * block + self.place_N % block
        return x_WBw.flatten(0, 1)[rows_GN].transpose(0, 1)


class _Of(NamedTuple):
    scale: float
    sizes: _Sizes
    units: tuple[_Unit, ...]


def _units(documents: tuple[slice, ...], sizes: _Sizes, device: torch.device) -> Iterator[_Unit]:
    """The longer documents in groups of about one length, and their key heads."""
    begin = place = 0
    while begin < len(documents):
        lengths: list[int] = []
        for rows in documents[begin:]:
            longest = max([*lengths, rows.stop - rows.start])
            if lengths and len(lengths) >= sizes.at_once(longest)[0]:
                break
            lengths.append(rows.stop - rows.start)
        some = sizes.at_once(max(lengths))[1]
        mine = documents[begin : begin + len(lengths)]
        for group in range(0, sizes.groups, some):
            groups = slice(group, min(group + some, sizes.groups))
            yield _unit(mine, groups, slice(place, place + sum(lengths)), sizes, device)
        begin, place = begin + len(lengths), place + sum(lengths)


def _unit(
    documents: tuple[slice, ...], groups: slice, out: slice, sizes: _Sizes, device: torch.device
) -> _Unit:
    B, count, tokens = sizes.block, groups.stop - groups.start, out.stop - out.start
    place, first, keys, begins, blocks, before = [], [], [], [], 0, 0
    for rows in documents:
        length = rows.stop - rows.start
        own = -(-length // B)
        place.append(torch.arange(length))
        first.append(torch.full((length,), blocks))
        keys.append(before + torch.arange(own * B).clamp(max=length - 1).view(own, B))
        begins.append(torch.arange(own) * B)
        blocks, before = blocks + own, before + length
    heads_G = torch.arange(count)[:, None]
    return _Unit(
        slice(groups.start * sizes.rep, groups.stop * sizes.rep),
        groups,
        torch.cat([torch.arange(rows.start, rows.stop) for rows in documents]).to(device),
        out,
        torch.cat(place).to(device),
        (torch.cat(first) + heads_G * blocks)[..., None].to(device),
        (torch.cat(keys) + heads_G[..., None] * tokens).flatten(0, 1).to(device),
        torch.cat(begins).repeat(count).to(device),
    )


class _Product(NamedTuple):
    """Z blocks and their queries: the pairs [Z, n], their rows, and what is no query of theirs, [Z, n, B]."""

    blocks_Z: Tensor
    pairs_Zn: Tensor
    rows_Zn: Tensor
    hidden_ZnB: Tensor


def _products(unit: _Unit, chosen_THC: Tensor, sizes: _Sizes) -> Iterator[_Product]:
    """Every pair of the unit in one product. A product is filled up with the pair P and the row R."""
    B, each, rep = sizes.block, sizes.each, sizes.rep
    own_GN1 = unit.first_GN1 + unit.place_N[:, None] // B
    own_RC = own_GN1[..., None, :].expand(-1, -1, rep, 1).flatten(0, 2)
    of_RC = unit.sorted(chosen_THC[unit.rows_N, unit.heads])
    first_RC = unit.first_GN1[..., None, :].expand(-1, -1, rep, 1).flatten(0, 2)
    blocks, device = len(unit.begin_W), own_RC.device
    number_RC = torch.cat((torch.where(of_RC < 0, blocks, of_RC + first_RC), own_RC), dim=1)
    number_P = number_RC.flatten()
    order_P = number_P.argsort(stable=True)
    counts = number_P.bincount(minlength=blocks + 1)[:blocks].tolist()  # on the host: sizes of products
    place_R = unit.place_N[:, None].expand(len(unit.first_GN1), -1, rep).flatten()
    inside_B = torch.arange(B, device=device)
    for blocks_, begins, numbers in _together(counts, sizes.pairs_at_once(len(number_P))):
        longest = max(numbers)
        at_Zn = torch.tensor(begins, device=device)[:, None] + torch.arange(longest, device=device)
        filled_Zn = torch.arange(longest, device=device) >= torch.tensor(numbers, device=device)[:, None]
        pairs_Zn = order_P[at_Zn.clamp(max=len(order_P) - 1)].masked_fill_(filled_Zn, len(order_P))
        rows_Zn = pairs_Zn // each
        blocks_Z = torch.tensor(blocks_, device=device)
        key_Z1B = unit.begin_W[blocks_Z][:, None, None] + inside_B
        hidden_ZnB = key_Z1B > place_R[rows_Zn.clamp(max=len(place_R) - 1)][..., None]
        yield _Product(blocks_Z, pairs_Zn, rows_Zn, hidden_ZnB)


def _together(counts: list[int], most: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Blocks of about as many pairs, at most `most` in all: (blocks, first pair, pairs) of each product.

    A block with more pairs comes several times, but once in a product.
    """
    pieces, begin = [], 0
    for number, count in enumerate(counts):
        pieces += [(min(most, count - at), begin + at, number) for at in range(0, count, most)]
        begin += count
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    at = 0
    while at < len(pieces):
        longest, end = pieces[at][0], at + 1
        while end < len(pieces) and (end + 1 - at) * longest <= most and pieces[end][0] >= FILL * longest:
            end += 1
        numbers, begins, blocks = zip(*pieces[at:end], strict=True)
        yield list(blocks), list(begins), list(numbers)
        at = end


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        chosen_THC: Tensor,
        of: _Of,
        reuse: Reuse | None,
    ) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            return _forward(q_THd, k_TGd, v_TGv, chosen_THC, of)

        o, lse = compute() if reuse is None else reuse(compute)
        ctx.save_for_backward(q_THd, k_TGd, v_TGv, chosen_THC, o, lse)
        ctx.of = of
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_THd, k_TGd, v_TGv, chosen_THC, o, lse = ctx.saved_tensors
        return (*_backward(grad, q_THd, k_TGd, v_TGv, chosen_THC, o, lse, ctx.of), None, None, None)


def _forward(
    q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, chosen_THC: Tensor, of: _Of
) -> tuple[Tensor, Tensor]:
    """o [L, H, v] and the log-sum-exp of each query's scores [L, H]; L: the tokens of longer documents."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    tokens = of.units[-1].out.stop
    o = q_THd.new_empty((tokens, q_THd.shape[1], v_TGv.shape[-1]))
    lse = q_THd.new_empty((tokens, q_THd.shape[1]), dtype=wide)
    for unit in of.units:
        o_, lse_ = _of_unit(q_THd, k_TGd, v_TGv, chosen_THC, of, unit)
        o[unit.out, unit.heads], lse[unit.out, unit.heads] = o_.to(o.dtype), lse_
    return o, lse


def _of_unit(
    q_THd: Tensor, k_TGd: Tensor, v_TGv: Tensor, chosen_THC: Tensor, of: _Of, unit: _Unit
) -> tuple[Tensor, Tensor]:
    """o [N, H, v] and lse [N, H] of a unit's tokens and heads."""
    wide, each = torch.promote_types(q_THd.dtype, torch.float32), of.sizes.each
    q_Rd = _with_none(unit.rows(q_THd, unit.heads, wide))
    k_Kd, v_Kv = unit.rows(k_TGd, unit.groups, wide), unit.rows(v_TGv, unit.groups, wide)
    pairs = (len(q_Rd) - 1) * each
    o_Pv, lse_P = v_Kv.new_zeros((pairs + 1, v_Kv.shape[1])), v_Kv.new_full((pairs + 1,), -torch.inf)
    for product in _products(unit, chosen_THC, of.sizes):
        keys_ZB = unit.keys_WB[product.blocks_Z]
        c_ZnB = _scores(q_Rd[product.rows_Zn], k_Kd[keys_ZB], product, of.scale)
        lse_Zn = c_ZnB.logsumexp(-1)
        o_Pv[product.pairs_Zn] = c_ZnB.sub_(lse_Zn[..., None]).exp_() @ v_Kv[keys_ZB]
        lse_P[product.pairs_Zn] = lse_Zn
    lse_RC = lse_P[:pairs].view(-1, each)
    lse_R1 = lse_RC.logsumexp(-1, keepdim=True)
    share_R1C = (lse_RC - lse_R1).exp_()[:, None]
    o_Rv = (share_R1C @ o_Pv[:pairs].view(-1, each, o_Pv.shape[1]))[:, 0]
    return unit.tokens(o_Rv), unit.tokens(lse_R1)[..., 0]


def _backward(
    grad: Tensor,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGv: Tensor,
    chosen_THC: Tensor,
    o: Tensor,
    lse: Tensor,
    of: _Of,
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q_THd, k_TGd, v_TGv))
    saved = q_THd, k_TGd, v_TGv, chosen_THC, o, lse
    for unit in of.units:  # in a function: what one unit needs is gone before the next
        dq_, dk_, dv_ = _backward_of_unit(grad, saved, of, unit)
        dq[unit.rows_N, unit.heads] = dq_.to(dq.dtype)
        dk[unit.rows_N, unit.groups], dv[unit.rows_N, unit.groups] = dk_.to(dk.dtype), dv_.to(dv.dtype)
    return dq, dk, dv


def _backward_of_unit(
    grad: Tensor, saved: tuple[Tensor, ...], of: _Of, unit: _Unit
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of its queries [N, H, d], keys [N, G, d] and values [N, G, v]."""
    q_THd, k_TGd, v_TGv, chosen_THC, o, lse = saved
    wide, each, block = lse.dtype, of.sizes.each, of.sizes.block
    q_Rd = _with_none(unit.rows(q_THd, unit.heads, wide))
    k_Kd, v_Kv = unit.rows(k_TGd, unit.groups, wide), unit.rows(v_TGv, unit.groups, wide)
    do_Rv, o_Rv, lse_R1 = (
        _with_none(unit.sorted(x[unit.out, unit.heads].to(wide))) for x in (grad, o, lse[..., None])
    )
    delta_R1 = (do_Rv * o_Rv).sum(-1, keepdim=True)
    pairs, blocks = (len(q_Rd) - 1) * each, len(unit.begin_W)
    dq_Pd = q_Rd.new_zeros((pairs + 1, q_Rd.shape[1]))
    dk_WBd, dv_WBv = (x.new_zeros((blocks, block, x.shape[1])) for x in (k_Kd, v_Kv))
    for product in _products(unit, chosen_THC, of.sizes):
        keys_ZB, rows_Zn, blocks_Z = unit.keys_WB[product.blocks_Z], product.rows_Zn, product.blocks_Z
        q, do, k = q_Rd[rows_Zn], do_Rv[rows_Zn], k_Kd[keys_ZB]
        P_ZnB = _scores(q, k, product, of.scale).sub_(lse_R1[rows_Zn]).exp_()
        dc_ZnB = (do @ v_Kv[keys_ZB].mT).sub_(delta_R1[rows_Zn]).mul_(P_ZnB).mul_(of.scale)
        dq_Pd[product.pairs_Zn] = dc_ZnB @ k
        dk_WBd[blocks_Z] += dc_ZnB.mT @ q  # a block is in a product once
        dv_WBv[blocks_Z] += P_ZnB.mT @ do
    dq_Rd = dq_Pd[:pairs].view(-1, each, dq_Pd.shape[1]).sum(1)
    return unit.tokens(dq_Rd), unit.of_keys(dk_WBd), unit.of_keys(dv_WBv)


def _with_none(x_Rw: Tensor) -> Tensor:
    """A row of zeros behind: that of the queries that fill up a product. Its q, do and delta are 0."""
    return torch.cat((x_Rw, x_Rw.new_zeros((1, x_Rw.shape[1]))))


def _scores(q_Znd: Tensor, k_ZBd: Tensor, product: _Product, scale: float) -> Tensor:
    """c [Z, n, B]; -inf for keys behind a query."""
    return (q_Znd @ k_ZBd.mT).mul_(scale).masked_fill_(product.hidden_ZnB, -torch.inf)
