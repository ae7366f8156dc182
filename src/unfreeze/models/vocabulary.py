"""A larger vocabulary: rows added to the embeddings and the output head of a model in memory.

V vocabulary, D model width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from unfreeze.core.errors import ConfigError
from unfreeze.models.blocks.routers import HashRouter
from unfreeze.models.decoder import Decoder


def refuse_vocabulary(model: Decoder) -> None:
    """Raise ConfigError for a model whose vocabulary cannot grow: packed, or with tables by token."""
    if model.lm_head.codec is not None:
        raise ConfigError(
            "new tokens need rows of the output head, which is packed in this checkpoint",
            next="take a release whose embeddings and head are bf16",
        )
    if any(isinstance(module, HashRouter) for module in model.modules()):
        raise ConfigError(
            f"new tokens are not built for {model.shape.model_type}: its routers have a table of all tokens",
            next="leave out --new-tokens",
        )


@torch.no_grad()
def grow_vocabulary(model: Decoder, size: int) -> None:
    """Give embeddings and head `size` rows; new ones are zero, a tied head stays tied. Never fewer."""
    refuse_vocabulary(model)
    if size <= model.shape.vocab_size:
        return
    table, head = model.model.embed_tokens, model.lm_head
    tied = head.weight is table.weight
    table.weight = _longer(table.weight, size)
    head.weight = table.weight if tied else _longer(head.weight, size)
    if head.bias is not None:
        head.bias = _longer(head.bias, size)
    head.out_features = size
    model.shape = replace(model.shape, vocab_size=size)


def _longer(weight: nn.Parameter, size: int) -> nn.Parameter:
    grown = weight.new_zeros((size, *weight.shape[1:]))
    if not weight.is_meta:
        grown[: len(weight)] = weight
    return nn.Parameter(grown, requires_grad=weight.requires_grad)


def mean_rows(weight_VD: Tensor, parts: tuple[tuple[int, ...], ...]) -> Tensor:
    """[n, D] float32: for each new token the mean of the rows of the tokens that its text was before."""
    rows = [weight_VD[torch.tensor(own, device=weight_VD.device)].float().mean(0) for own in parts]
    return torch.stack(rows)
