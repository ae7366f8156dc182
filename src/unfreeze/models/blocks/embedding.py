"""Token embeddings. T tokens, D model width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.models.blocks.norm import RMSNorm


class Embedding(nn.Module):
    """Rows of a table: tokens [T] -> [T, D]. No padding row: packed batches have no padding."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype, device=device))

    def forward(self, tokens_T: Tensor) -> Tensor:
        return F.embedding(tokens_T, self.weight)


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
    ):
        super().__init__(vocab_size, hidden_size, dtype=dtype, device=device)
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
    ):
        super().__init__(vocab_size, hidden_size, dtype=dtype, device=device)
        self.norm = norm

    def forward(self, tokens_T: Tensor) -> Tensor:
        return self.norm(super().forward(tokens_T))
