"""Checkpoints: manifest without reading tensors, strict name resolution, streaming into place, atomic saving.

Names that need torch are imported on first use (PEP 562): a manifest is read, and refused, without it.
"""

from typing import TYPE_CHECKING

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.checkpoint.manifest import Manifest, TensorInfo, open_checkpoint
from unfreeze.core.lazy import on_first_use

if TYPE_CHECKING:
    from unfreeze.checkpoint.resolve import Placement
    from unfreeze.checkpoint.save import disk_tensors, save_checkpoint, unstack, write_safetensors
    from unfreeze.checkpoint.stream import LoadStats

__all__ = [
    "LoadStats",
    "Manifest",
    "Placement",
    "StackRule",
    "TensorInfo",
    "disk_tensors",
    "open_checkpoint",
    "save_checkpoint",
    "unstack",
    "write_safetensors",
]

__getattr__ = on_first_use(
    __name__,
    {
        "LoadStats": "unfreeze.checkpoint.stream",
        "Placement": "unfreeze.checkpoint.resolve",
        **dict.fromkeys(
            ("disk_tensors", "save_checkpoint", "unstack", "write_safetensors"), "unfreeze.checkpoint.save"
        ),
    },
)
