"""Write a model in memory as a checkpoint, with what its files have beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.adapters.whole import wholes
from unfreeze.checkpoint.beside import files_beside
from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.nested import name_on_disk
from unfreeze.checkpoint.save import save_checkpoint
from unfreeze.checkpoint.tensors import TORCH_DTYPE, stored_tensor
from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.models.decoder import Decoder
from unfreeze.models.publish import declared_dtype
from unfreeze.quant.spelling import on_disk


def save_model(decoder: Decoder, manifest: Manifest | None, folder: Path) -> Path:
    """Write `decoder`, whose files are `manifest`'s, into a new folder. -> the folder.

    Raises CheckpointError for a model without files, with adapters, or spread over processes, and for a
    folder that is not empty.
    """
    if manifest is None:
        raise CheckpointError(
            "this model was not loaded from files, so there is no config.json to write",
            next="load it with unfreeze.load, or use checkpoint.save_checkpoint",
        )
    names = [name for name, _ in decoder.named_parameters()]
    if any(".adapter." in name for name in names) or wholes(decoder):
        raise CheckpointError(
            "the model has adapters, which are no part of a checkpoint",
            next="adapters.save_adapter writes them; unfreeze merge RUN adds them to the weights",
        )
    if decoder.sharded or decoder.exchanges:
        raise CheckpointError("the model is spread over processes", next="save it from one process")
    save_checkpoint(folder, manifest.config, _tensors(decoder, manifest), extra=files_beside(manifest.path))
    return folder


def _tensors(decoder: Decoder, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on disk, tensor): those in memory, then the files' own for all others."""
    disk, rules, tied = manifest.by_model_name(), models.rules(decoder.shape), models.tied(decoder.shape)
    packed = {
        f"{path}.{name}"
        for path, module in decoder.named_modules()
        if isinstance(module, PackedHolder) and module.codec is not None
        for name, _ in module.named_buffers(recurse=False)
    }
    written = set(tied)
    for param, tensor in decoder.state_dict().items():
        if param in packed or param in tied:
            continue
        sources = tensor_sources(param, tensor.shape, rules, disk)
        stored = {TORCH_DTYPE[disk[source.name].dtype] for source in sources if source.name in disk}
        dtype = _exact(tensor, stored.pop() if len(stored) == 1 else declared_dtype(manifest.config))
        for source in sources:
            written.add(source.name)
            part = tensor[source.index] if source.index else tensor
            info = disk.get(source.name)
            name = info.name if info is not None else name_on_disk(manifest.prefix, on_disk(source.name))
            yield name, (part.mT if source.transposed else part).to(dtype)
    for name, info in disk.items():
        if name not in written:
            yield info.name, stored_tensor(info)


def _exact(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """`dtype` if it holds the tensor's values exactly, else the tensor's own."""
    return dtype if torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) else tensor.dtype
