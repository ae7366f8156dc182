"""The indexers of a model, which are frozen unless `train_indexers` is called.

They choose the keys of sparse attention (blocks/sparse.py), or the blocks of a mixture of blocks whose gate
is learned (blocks/moba.py).
"""

from __future__ import annotations

from unfreeze.core.errors import ConfigError
from unfreeze.models.blocks.attention import Attending
from unfreeze.models.blocks.moba import LowRankGate, MixtureOfBlocks
from unfreeze.models.blocks.sparse import Indexer, SparseMLA
from unfreeze.models.decoder import Decoder


def sparse_layers(model: Decoder) -> dict[int, SparseMLA]:
    """Layer index -> its sparse attention, for the layers that have one."""
    children = ((index, part) for index, layer in enumerate(model.layers) for part in layer.children())
    return {index: part for index, part in children if isinstance(part, SparseMLA)}


def mixtures_of_blocks(model: Decoder) -> dict[int, MixtureOfBlocks]:
    """Layer index -> its choice of blocks, for the layers that have one."""
    children = ((index, part) for index, layer in enumerate(model.layers) for part in layer.children())
    return {
        index: part.blocks
        for index, part in children
        if isinstance(part, Attending) and part.blocks is not None
    }


def indexers(model: Decoder) -> dict[int, Indexer | LowRankGate]:
    """Layer index -> its indexer. Layers that use an earlier layer's choice have none."""
    sparse, mixtures = sparse_layers(model).items(), mixtures_of_blocks(model).items()
    own = {index: part.indexer for index, part in sparse if part.indexer is not None}
    gates = {index: part.indexer for index, part in mixtures if isinstance(part.indexer, LowRankGate)}
    return {**own, **gates}


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
