"""Mixture of Block Attention (MoBA): a query sees its own block of tokens and the best earlier ones.

The arithmetic is kernels/moba, with the formula of the choice. A gate gives a vector of each query and one
of each block, and a block's score is their product. Rows and documents of at most chosen · block tokens
attend in full. The cache has one vector more per block, so a step of generation chooses as training does, and
reads the keys and values of the chosen blocks only.

T tokens, E complete blocks, B tokens of a block, H query heads, G key heads, d width of a head, r of the
gate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unfreeze.kernels.moba import Gated, block_divergence
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.passes import PackedPass, Pass


class MeanGate(nn.Module):
    """q · mean(k): the query itself and the mean of the block's keys, as in MoBA. No parameters."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def queries(self, q_THd: Tensor) -> Tensor:
        """[T, H, d]."""
        return q_THd

    def summary(self, k_EBGd: Tensor) -> Tensor:
        """[E, G, d], rounded to the keys' dtype."""
        wide = torch.promote_types(k_EBGd.dtype, torch.float32)
        return k_EBGd.mean(1, dtype=wide).to(k_EBGd.dtype)


class HeadMatrices(nn.Module):
    """A matrix of each head: weight [heads, r, w]."""

    def __init__(self, heads: int, rank: int, width: int, *, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, rank, width, dtype=dtype, device=device))

    def forward(self, x_Thw: Tensor) -> Tensor:
        """[T, heads, w] -> [T, heads, r]."""
        return (x_Thw.transpose(0, 1) @ self.weight.mT).transpose(0, 1)


class LowRankGate(nn.Module):
    """(A_h q) · (B_g [mean, max, min](k)): learned matrices of rank r < d, A per query head, B per key head.

    Mean, max and min are those of each channel of the block's keys. H r d + G r 3 d parameters. They are
    frozen; `train_indexers` (models/indexers.py) changes that. They follow the mass of full attention
    (kernels/moba/divergence.py), and no gradient goes through them into the rest of the model. At first
    A_h = B_g = (d / r)^¼ times r orthonormal rows, with zeros for max and min: q · mean(k) seen through a
    random projection. With r = d the choice is then that of MeanGate.
    Source: the pooled keys and the distillation are SeerAttention's, arXiv:2410.13276, 3.1 and 3.2.
    """

    def __init__(
        self,
        heads: int,
        key_heads: int,
        width: int,
        rank: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.width, self.head_dim = rank, width
        self.gate_q = HeadMatrices(heads, rank, width, dtype=dtype, device=device)
        self.gate_k = HeadMatrices(key_heads, rank, 3 * width, dtype=dtype, device=device)
        self.requires_grad_(False)

    def queries(self, q_THd: Tensor) -> Tensor:
        """[T, H, r]."""
        return self.gate_q(q_THd)

    def summary(self, k_EBGd: Tensor) -> Tensor:
        """[E, G, r]."""
        wide = torch.promote_types(k_EBGd.dtype, torch.float32)
        mean = k_EBGd.mean(1, dtype=wide).to(k_EBGd.dtype)
        return self.gate_k(torch.cat((mean, k_EBGd.amax(1), k_EBGd.amin(1)), dim=-1))

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """First values."""
        heads, rank, width = self.gate_q.weight.shape
        groups = self.gate_k.weight.shape[0]
        rows_Grd = torch.linalg.qr(torch.randn(groups, width, rank, generator=generator)).Q.mT
        rows_Grd = rows_Grd * (width / rank) ** 0.25
        zeros = torch.zeros(groups, rank, 2 * width)
        return {
            "gate_q.weight": rows_Grd.repeat_interleave(heads // groups, 0),
            "gate_k.weight": torch.cat((rows_Grd, zeros), dim=-1),
        }


class MixtureOfBlocks(Block):
    """The work of attention on its rotated queries, keys and values in place of softmax over all of them.

    block    tokens of a block, B
    chosen   blocks that a query sees, its own included
    indexer  the gate; under this name its parameters freeze, train and are saved as other indexers' do
    """

    def __init__(
        self, layer: int, heads: int, key_heads: int, block: int, chosen: int, gate: MeanGate | LowRankGate
    ):
        super().__init__()
        self.layer, self.heads, self.key_heads = layer, heads, key_heads
        self.block, self.chosen, self.indexer = block, chosen, gate

    @property
    def limit(self) -> int:
        """Tokens up to which nothing is chosen: all are seen."""
        return self.block * self.chosen

    @property
    def chosen_bytes(self) -> int:
        """Bytes of the choice of a token, int32 per query head and earlier block."""
        return 4 * self.heads * (self.chosen - 1)

    def forward(self, q_THd: Tensor, k: Tensor, v: Tensor, run: Pass, scale: float) -> Tensor:
        """o [T, H, v]. k and v: those of the pass, cached ones included."""
        gate, narrower = self.indexer, run.longest > self.limit
        follows = run.taps is not None and "divergence" in run.taps.names
        gated: Gated | None = None
        with torch.set_grad_enabled(follows and torch.is_grad_enabled()):
            if narrower or follows or run.caches:
                e = run.summarise(self.layer, self.block, k.detach(), gate.summary)
                gated = Gated(gate.queries(q_THd.detach()), e) if narrower or follows else None
        if follows and gated is not None:
            assert isinstance(run, PackedPass) and run.taps is not None
            entries = run.entries(self.block)
            run.taps.put("divergence", block_divergence(gated, q_THd, k, scale, entries, scale))
        if not narrower or gated is None:
            return run.attend(q_THd, k, v, scale)
        chosen = run.reuse(lambda: run.select_blocks(gated, self.block, self.chosen))
        return run.attend_blocks(q_THd, k, v, scale, self.block, chosen)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """None per token: the plan counts choice and workspace by the lengths of documents."""
        return Bytes()

    def cached(self) -> int:
        """Numbers per position: a vector of each key head per block."""
        return -(-self.key_heads * self.indexer.width // self.block)
