"""A new model from [shape] and a tokenizer: a manifest without tensors, whose config.json nobody wrote yet.

The run writes config.json beside the trained weights, in <out>/model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.config.pretrain import Config
from unfreeze.config.shape import parsed
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import CheckpointError

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest


def new_model(config: Config, folder: str) -> Manifest:
    """Return the manifest of the new model. folder: the tokenizer's; weights in it are not looked at.

    Raises ConfigError for a shape that cannot be, CheckpointError for a folder without a tokenizer.
    """
    from unfreeze.checkpoint import Manifest
    from unfreeze.data import load_tokenizer
    from unfreeze.models.from_shape import config_of

    path = TINY_K2 if folder == TINY_K2.name else Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"tokenizer = {folder!r} is not a folder",
            next="give the folder that holds tokenizer.json, or tiny-k2; unfreeze tokenizer train makes one",
        )
    tokenizer = load_tokenizer(path)
    sizes = config.shape.model_dump(exclude={"family", "config", "parts"})
    fields = config_of(
        config.shape.family,
        sizes,
        parsed(config.shape.config),
        vocabulary=tokenizer.named_size,
        positions=config.data.sequence_length,
        bos=tokenizer.bos_id,
        eos=tokenizer.eos_id,
        parts=config.shape.assembly,
    )
    return Manifest(path=path, config=fields, tensors={}, prefix="", files=())
