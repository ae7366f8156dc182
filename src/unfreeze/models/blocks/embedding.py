"""Token embeddings. T tokens, D model width, V vocabulary."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.models.blocks.norm import RMSNorm


class EmbeddingAdapter(Protocol):
    """Changes the rows that were looked up."""

    def embed(self, tokens_T: Tensor, x_TD: Tensor) -> Tensor: ...


class Embedding(nn.Module):
    """Table lookup: tokens [T] -> [T, D]. No padding row: packed batches have no padding.

    dtype: of the output. held: the dtype of a frozen table if it is narrower; rows are widened after the
    lookup.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        held: torch.dtype | None = None,
    ):
        super().__init__()
        self.widened = None if held in (None, dtype) else dtype
        empty = torch.empty(vocab_size, hidden_size, dtype=held or dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=held in (None, dtype))
        self.adapter: EmbeddingAdapter | None = None

    def forward(self, tokens_T: Tensor) -> Tensor:
        rows_TD = F.embedding(tokens_T, self.weight)
        rows_TD = rows_TD if self.widened is None else rows_TD.to(self.widened)
        return rows_TD if self.adapter is None else self.adapter.embed(tokens_T, rows_TD)


class ScaledEmbedding(Embedding):
    """scale · row: Granite's embedding_multiplier, Gemma's sqrt(D)."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        scale: float,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        held: torch.dtype | None = None,
    ):
        super().__init__(vocab_size, hidden_size, dtype=dtype, device=device, held=held)
        self.scale = scale

    def forward(self, tokens_T: Tensor) -> Tensor:
        return super().forward(tokens_T) * self.scale


class NormedEmbedding(Embedding):
    """norm(row) (nanochat, whose norm has no weight)."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        norm: RMSNorm,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        held: torch.dtype | None = None,
    ):
        super().__init__(vocab_size, hidden_size, dtype=dtype, device=device, held=held)
        self.norm = norm

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.norm(super().forward(tokens_T))
