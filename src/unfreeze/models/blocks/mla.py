"""Multi-head latent attention (MLA; DeepSeek-V2/V3, Kimi-K2).

Keys and values are expanded from one small latent per token, and only the latent is cached.

T tokens, S sequences (one new token each), N cached positions, D model width, H heads, R adapter rank. c
latent width (kv_lora_rank). A head has widths n (part without position), r (rotary part) and v (value);
d = n + r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.mixture import Latent, cache_latent, latent_query, latent_value
from unfreeze.kernels.decode_step.program import Heads, Row
from unfreeze.kernels.packed_attention import bucket, in_one_call
from unfreeze.kernels.rotary import Pairing, rotary
from unfreeze.models.blocks.attention import attention_bytes
from unfreeze.models.blocks.bytes import AttentionShape, Block, Bytes
from unfreeze.models.blocks.linear import Linear, WholeAdapter, WithMatrix
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import PAIRINGS, CannotRecord, Recording

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q, k, v, scale) -> o, over the documents or cached rows of a pass."""


class MLA(Block):
    """Multi-head latent attention: keys and values come from one low-rank latent.

      q = [q_nope | rotate(q_rope)]
      k = [kv_b(latent).nope | rotate(k_rope)], k_rope shared by all heads
      v = kv_b(latent).value, where latent = norm(kv_a(x)[:c]) and k_rope = kv_a(x)[c:].

    The query goes through its own low-rank pair (q_a, q_b), or through q_proj if the checkpoint has no
    q_lora_rank. `pairs`: the elements that rotate together, adjacent ones in the releases. `scale` includes
    YaRN's temperature. `temperature`: name of a table (Shape.ropes) that scales the queries by position.

    Source: arXiv:2405.04434, 2.1.
    """

    def __init__(
        self,
        layer: int,
        *,
        num_heads: int,
        nope: int,
        rope: int,
        value: int,
        scale: float,
        kv_a_proj_with_mqa: Linear,
        kv_a_layernorm: RMSNorm,
        kv_b_proj: Linear,
        o_proj: Linear,
        q_proj: Linear | None = None,
        q_a_proj: Linear | None = None,
        q_a_layernorm: RMSNorm | None = None,
        q_b_proj: Linear | None = None,
        pairs: Pairing = "adjacent",
        temperature: str | None = None,
    ):
        super().__init__()
        self.pairs: Pairing = pairs
        self.temperature = temperature
        self.layer, self.num_heads, self.scale = layer, num_heads, scale
        self.nope, self.rope, self.value = nope, rope, value
        self.q_proj, self.q_a_proj = q_proj, q_a_proj
        self.q_a_layernorm, self.q_b_proj = q_a_layernorm, q_b_proj
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = kv_a_proj_with_mqa, kv_a_layernorm
        self.kv_b_proj, self.o_proj = kv_b_proj, o_proj

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q_THd = self.query(self.low_rank(x_TD, run), run)
        (latent,) = run.remember(self.layer, self.latent(x_TD, run))
        return self.attended(q_THd, latent, run, run.attend)

    def low_rank(self, x_TD: Tensor, run: Pass) -> Tensor:
        """The input of the query's last projection: norm(q_a(x)), or x itself."""
        if self.q_proj is not None:
            return x_TD
        assert self.q_a_proj is not None and self.q_a_layernorm is not None
        return self.q_a_layernorm(self.q_a_proj(x_TD, run.reuse_linear))

    def query(self, low_rank_TQ: Tensor, run: Pass) -> Tensor:
        """-> [T, H, d]; only the last r elements of a head rotate."""
        last = self.q_proj if self.q_proj is not None else self.q_b_proj
        assert last is not None
        q_THd = last(low_rank_TQ, run.reuse_linear).unflatten(-1, (self.num_heads, -1))
        q_THd = self.rotate(q_THd, run)
        if self.temperature is not None:
            factor_T1, _ = run.tables(self.temperature)
            q_THd = q_THd * factor_T1[:, None].to(q_THd.dtype)
        return q_THd

    def latent(self, x_TD: Tensor, run: Pass) -> Tensor:
        """The latent and one rotary key shared by all heads, [T, c + r]: they are cached."""
        latent_Tc, k_rope_Tr = self.kv_a_proj_with_mqa(x_TD, run.reuse_linear).split(
            (self.kv_b_proj.in_features, self.rope), dim=-1
        )
        k_rope_Tr = self.rotate(k_rope_Tr[:, None], run)[:, 0]
        return torch.cat((self.kv_a_layernorm(latent_Tc), k_rope_Tr), dim=-1)

    def attended(self, q_THd: Tensor, latent: Tensor, run: Pass, attend: Attend) -> Tensor:
        """o_proj(attention) -> [T, D]. attend: of queries, keys and values at a scale, as run.attend."""
        form = self.expanded if run.latent == "expanded" else self.absorbed
        return self.o_proj(form(q_THd, latent, run, attend).flatten(1), run.reuse_linear)

    def rotate(self, x_THd: Tensor, run: Pass) -> Tensor:
        """x with its last r elements rotated."""
        return rotary(x_THd, *run.tables(), self.pairs)

    def expanded(self, q_THd: Tensor, latent_TC: Tensor, run: Pass, attend: Attend) -> Tensor:
        """Expand keys and values of every token from its latent, C = [c | r], once. -> [T, H, v]."""
        latent_Tc, k_rope_Tr = latent_TC.split((self.kv_b_proj.in_features, self.rope), dim=-1)
        k_nope, v = (
            self.kv_b_proj(latent_Tc, run.reuse_linear)
            .unflatten(-1, (self.num_heads, -1))
            .split((self.nope, self.value), dim=-1)
        )
        run.unrotated(q_THd, k_nope, self.nope)
        k = torch.cat((k_nope, k_rope_Tr[:, None].expand(-1, self.num_heads, -1)), dim=-1)
        return attend(q_THd, k, v, self.scale)

    def absorbed(self, q_SHd: Tensor, latent_SNC: Tensor, run: Pass, attend: Attend) -> Tensor:
        """Attention of one query per sequence, in the space of the latents. -> [S, H, v].

            q · (W_k latent) = (W_kᵀ q) · latent,      Σ p (W_v latent) = W_v Σ p latent

        kv_b_proj is applied to one token per sequence instead of the whole cache. All heads share the same N
        keys, C wide. The latents serve as values too; the last r columns of the result belong to the rotary
        keys and are dropped. An adapter is a second product, B (A latent), never merged. Source:
        arXiv:2405.04434, 2.1.2.
        """
        q_nope_SHn, q_rope_SHr = q_SHd.split((self.nope, self.rope), dim=-1)
        # On a CPU a bf16 product of one row converts the weight anyway. In float32 it takes 36 instead of
        # 79 us for [16, 64, 128], and the query is rounded once.
        dtype = torch.float32 if q_nope_SHn.device.type == "cpu" else q_nope_SHn.dtype
        q_HSn = q_nope_SHn.transpose(0, 1).to(dtype)
        products = [
            (out_HOq.to(dtype), None if in_qc is None else in_qc.to(dtype), rows)
            for out_HOq, in_qc, rows in [(*pair, None) for pair in self._kv_b()] + self._kv_b_each(len(q_SHd))
        ]

        # W_kᵀ q, then attention over the latents
        q_HSc = _total(
            (_right(torch.bmm(_of(q_HSn, rows), out_HOq[:, : self.nope]), in_qc), rows)
            for out_HOq, in_qc, rows in products
        )
        q_SHC = torch.cat((q_HSc.transpose(0, 1).to(q_rope_SHr.dtype), q_rope_SHr), dim=-1)
        kv_SN1C = latent_SNC[:, :, None]
        o_HSc = (
            attend(q_SHC, kv_SN1C, kv_SN1C, self.scale)[..., : self.kv_b_proj.in_features]
            .transpose(0, 1)
            .to(dtype)
        )

        # W_v Σ p latent
        o_HSv = _total(
            (
                torch.bmm(
                    _right(_of(o_HSc, rows), None if in_qc is None else in_qc.t()), out_HOq[:, self.nope :].mT
                ),
                rows,
            )
            for out_HOq, in_qc, rows in products
        )
        return o_HSv.transpose(0, 1).to(q_nope_SHn.dtype)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · attention(x), in the absorbed form."""
        if self.kv_b_proj.bias is not None or isinstance(self.kv_b_proj.adapter, WholeAdapter):
            raise CannotRecord("kv_b_proj")
        program, tables = to.program, to.tables("")
        assert tables is not None
        sizes = Latent(self.num_heads, self.nope, self.rope, self.value, self.kv_b_proj.in_features)
        store, *_ = to.stores(self.layer)
        pairing = PAIRINGS[self.pairs]
        latent = self.kv_a_proj_with_mqa.record(to, x)
        q = self._record_query(to, x)
        norm = self.kv_a_layernorm
        cache_latent(program, latent, norm.gain(), norm.eps, sizes, tables, pairing, store)
        q = program.rotate(q, self.num_heads, tables, pairing, factor=to.factor(self.temperature))

        # W_kᵀ q, attention over the latents, W_v
        matrix = self.kv_b_proj.weight if self.kv_b_proj.codec is None else self.kv_b_proj.packed
        adapter = None if self.kv_b_proj.adapter is None else self.kv_b_proj.adapter.factors()
        if (each := self.kv_b_proj.each) is not None:
            adapter = each.recorded()
        q = latent_query(program, q, sizes, matrix, adapter)
        # all heads share the keys; blocks of four are jobs of their own
        blocks = self.num_heads // 4 if self.num_heads % 4 == 0 else 1
        o = program.attend(
            q,
            store,
            store,
            self.scale,
            Heads(self.num_heads, blocks, sizes.latent + sizes.rope, sizes.latent),
        )
        o = latent_value(program, o, sizes, matrix, adapter)
        return self.o_proj.record(to, o, add=add, factor=factor)

    def _record_query(self, to: Recording, x: Row) -> Row:
        if self.q_proj is not None:
            return self.q_proj.record(to, x)
        assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
        return self.q_b_proj.record(to, self.q_a_layernorm.record(to, self.q_a_proj.record(to, x)))

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: attention's (`attention_bytes`; its values are a view of kv_b_proj's output), the inputs of
        kv_b_proj and of the norms, and q_a_layernorm's output.

        Recomputation keeps attention's output and the linear layers' outputs.
        """
        H, size, width = self.num_heads, dtype.itemsize, self.nope + self.rope
        low_rank = 0 if self.q_a_proj is None else self.q_a_proj.out_features
        latent = self.kv_a_proj_with_mqa.out_features
        products = low_rank + H * width + latent + self.kv_b_proj.out_features + self.o_proj.out_features
        before = Bytes(held=(2 * low_rank + 2 * latent + H * self.nope) * size, linear=products * size)
        name = bucket(width, self.value, window=False, softcap=False, sinks=False)
        shape = AttentionShape(H, H, width, self.value, one_call=in_one_call(device, dtype, name))
        return before + attention_bytes(shape, dtype, device)

    def cached(self) -> int:
        """Numbers that a position has in the cache: the latent and its rotary key."""
        return self.kv_a_proj_with_mqa.out_features

    def _kv_b(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return kv_b_proj as a sum of products out [H, n+v, q] · in [q, c] (None: the identity).

        The terms are its weight, and its adapter's scale · B and A.
        """
        if isinstance(adapter := self.kv_b_proj.adapter, WithMatrix):
            return [(self._by_head(adapter.matrix(self.kv_b_proj)), None)]
        products: list[tuple[Tensor, Tensor | None]] = [(self._by_head(self.kv_b_proj.matrix()), None)]
        if adapter is not None:
            A_Rc, B_OR, scale = adapter.factors()
            products.append((self._by_head(B_OR * scale), A_Rc))
        return products

    def _kv_b_each(self, count: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Return the terms of several adapters, each with the rows, of `count`, that have it; None: all."""
        if (each := self.kv_b_proj.each) is None:
            return []
        groups = each.groups(count, self.kv_a_layernorm.weight.device)
        return [(self._by_head(B_OR * scale), A_Rc, rows) for A_Rc, B_OR, scale, rows in groups]

    def _by_head(self, out_Oq: Tensor) -> Tensor:
        return out_Oq.unflatten(0, (self.num_heads, -1))


class UnrotatedMLA(MLA):
    """MLA whose r further elements of a key do not rotate: all heads share them (Kimi Linear)."""

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """A step of generation calls forward: the program has no operation for unrotated keys."""
        raise CannotRecord("MLA without rotation")

    def rotate(self, x_THd: Tensor, run: Pass) -> Tensor:
        return x_THd


def _right(x_HSq: Tensor, in_qc: Tensor | None) -> Tensor:
    return x_HSq if in_qc is None else x_HSq @ in_qc


def _of(x_HSq: Tensor, rows: Tensor | None) -> Tensor:
    return x_HSq if rows is None else x_HSq[:, rows]


def _total(terms: Iterable[tuple[Tensor, Tensor | None]]) -> Tensor:
    """The sum of all terms; one of some rows is added to these."""
    (total, _), *more = terms
    for term, rows in more:
        total = total + term if rows is None else total.index_add(1, rows, term)
    return total
