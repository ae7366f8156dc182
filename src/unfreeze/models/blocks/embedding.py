"""Token embeddings. T tokens, D model width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.models.blocks.norm import RMSNorm


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

    def forward(self, tokens_T: Tensor) -> Tensor:
        rows_TD = F.embedding(tokens_T, self.weight)
        return rows_TD if self.widened is None else rows_TD.to(self.widened)


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
