"""Checkpoints: manifest without reading tensors, strict name resolution, streaming into place, atomic saving."""

from unfreeze.checkpoint.keymap import StackRule, disk_tensors, unstack
from unfreeze.checkpoint.manifest import Manifest, TensorInfo, open_checkpoint
from unfreeze.checkpoint.resolve import Placement, resolve
from unfreeze.checkpoint.save import save_checkpoint, write_safetensors
from unfreeze.checkpoint.stream import LoadStats, stream

__all__ = [
    "LoadStats",
    "Manifest",
    "Placement",
    "StackRule",
    "TensorInfo",
    "disk_tensors",
    "open_checkpoint",
    "resolve",
    "save_checkpoint",
    "stream",
    "unstack",
    "write_safetensors",
]
