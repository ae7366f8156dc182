"""The indexers of a model (blocks/sparse.py), which are frozen unless `train_indexers` is called."""

from __future__ import annotations

from unfreeze.core.errors import ConfigError
from unfreeze.models.blocks.sparse import Indexer, SparseMLA
from unfreeze.models.decoder import Decoder


def sparse_layers(model: Decoder) -> dict[int, SparseMLA]:
    """Layer index -> its sparse attention, for the layers that have one."""
    children = ((index, part) for index, layer in enumerate(model.layers) for part in layer.children())
    return {index: part for index, part in children if isinstance(part, SparseMLA)}


def indexers(model: Decoder) -> dict[int, Indexer]:
    """Layer index -> its indexer. Layers that use an earlier layer's choice have none."""
    sparse = sparse_layers(model)
    return {index: part.indexer for index, part in sparse.items() if part.indexer is not None}


def trained_indexers(model: Decoder) -> list[int]:
    """Layers whose indexer has a weight or an adapter that trains."""
    return [
        layer
        for layer, indexer in indexers(model).items()
        if any(parameter.requires_grad for parameter in indexer.parameters())
    ]


def train_indexers(model: Decoder) -> None:
    """Let the indexers' weights train. Raises ConfigError for a model without one."""
    own = indexers(model)
    if not own:
        raise ConfigError(
            f"training.indexer is trained, but a {model.shape.family} model has no indexer that can train",
            next="remove training.indexer",
        )
    for indexer in own.values():
        indexer.requires_grad_(True)
