"""Decoded weights beside LoRA's factors in an adapter's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unfreeze.adapters.embeddings import (
    TABLE,
    EmbeddingLowRank,
    decoded_embeddings,
    split_embeddings,
    without_base,
)
from unfreeze.adapters.tokens import decoded_rows, split_rows
from unfreeze.adapters.whole import decoded_whole, split_off
from unfreeze.models import Decoder


@dataclass
class Beside:
    """Weights of an adapter that are not LoRA on linear layers and experts.

    whole       weights of modules that trained fully, by module and name
    rows        (ids, rows [n, D]) of tokens that trained alone, by module
    embeddings  the adapter of the embeddings, if there is one
    """

    whole: dict[str, dict[str, Tensor]]
    rows: dict[str, tuple[list[int], Tensor]]
    embeddings: EmbeddingLowRank | None

    @property
    def modules(self) -> list[str]:
        """Names of the modules that have some."""
        return [*self.whole, *self.rows, *([] if self.embeddings is None else [TABLE])]


def split_beside(
    model: Decoder, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Beside]:
    """(LoRA's tensors as in the file, the others decoded). Raises AdapterError for what does not fit."""
    others, of_tokens = split_rows(tensors)
    others, of_embeddings = split_embeddings(without_base(model, others))
    factors, whole = split_off(config, others)
    return factors, Beside(
        decoded_whole(model, config, whole),
        decoded_rows(model, config, of_tokens),
        decoded_embeddings(model, config, of_embeddings),
    )
