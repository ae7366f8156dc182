"""The files of an adapter, adapter_config.json and its tensors in one file or in shards, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unfreeze.checkpoint.folder import conversion
from unfreeze.checkpoint.manifest import inside
from unfreeze.config.adapter import (
    AGAIN,
    CONFIG,
    INDEX,
    PREFIX,
    WEIGHTS,
    check_config,
    check_places,
    shard_files,
)
from unfreeze.core.errors import AdapterError
from unfreeze.untrusted.json_object import read_object


def read_files(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(adapter_config.json, tensors by name without PEFT's prefix) of a folder.

    Raises AdapterError for a missing file or a wrong type.
    """
    in_shards = not (directory / WEIGHTS).is_file() and (directory / INDEX).is_file()
    for name in (CONFIG, INDEX if in_shards else WEIGHTS):
        if not (directory / name).is_file():
            _refuse_pickle(directory, name)
            next_command = "give the folder that holds adapter_config.json and adapter_model.safetensors"
            raise AdapterError(f"{directory} has no {name}", next=next_command)
    config = read_object(inside(directory / CONFIG), AdapterError)
    tensors = read_shards(directory) if in_shards else read_tensors(directory / WEIGHTS)
    check_config(config, directory / CONFIG)
    check_places(tensors, directory / WEIGHTS)
    faults = [
        f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()
    ]
    faults += [
        f"{name} holds NaN or infinity"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not _finite(tensor)
    ]
    if faults:
        raise AdapterError(
            f"{directory / WEIGHTS}: {len(faults)} of {len(tensors)} tensors are not finite floats; first:"
            f" {faults[0]}",
            next=AGAIN,
        )
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises AdapterError if it is damaged."""
    try:
        return load_file(inside(path))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        # ValueError, RuntimeError: sizes that torch cannot count
        raise AdapterError(
            f"{path.parent}: damaged file: {error}", next="get the adapter again from its publisher"
        ) from error


def read_shards(directory: Path) -> dict[str, Tensor]:
    """The tensors of an adapter in shards (shards.py), with those of experts joined.

    Raises AdapterError if the shards do not match the index or each other.
    """
    files = shard_files(directory)
    index = read_object(inside(directory / INDEX), AdapterError)
    weight_map, counts = index["weight_map"], index.get("experts")
    whole = isinstance(counts, list) and all(type(n) is int and n > 0 for n in cast(list[Any], counts))
    if not whole or len(cast(list[Any], counts)) != len(files):
        raise AdapterError(
            f"{directory / INDEX}: experts is {counts!r:.80}; it must be {len(files)} whole numbers, those of"
            " each shard",
            next=AGAIN,
        )
    shards = {file: read_tensors(directory / file) for file in files}
    tensors: dict[str, Tensor] = {}
    for name, places in cast(dict[str, Any], weight_map).items():
        parts = [shards[file].pop(name, None) for file in (places if isinstance(places, list) else [places])]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts):
            raise AdapterError(
                f"{directory}: {name:.200} is not in the shard that the index names", next=AGAIN
            )
        try:
            tensors[name] = (
                together(name, present, cast(list[int], counts)) if len(present) > 1 else present[0]
            )
        except (RuntimeError, ValueError) as error:
            raise AdapterError(
                f"{directory}: the parts of {name:.200} do not fit each other: {error}", next=AGAIN
            ) from error
    if extra := [name for shard in shards.values() for name in shard]:
        raise AdapterError(f"{directory}: {extra[0]:.200} is in a shard and not in the index", next=AGAIN)
    return tensors


def together(name: str, parts: list[Tensor], counts: list[int]) -> Tensor:
    """Join the parts of a fused pair, counts[i] experts each. The expert is slowest in A, fastest in B."""
    if len(parts) != len(counts):
        raise ValueError(f"{len(parts)} parts in {len(counts)} shards")
    if ".lora_A." in name:
        return torch.cat(parts)
    cut = [part.reshape(part.shape[0], -1, own) for part, own in zip(parts, counts, strict=True)]
    return torch.cat(cut, dim=2).flatten(1)


def _refuse_pickle(directory: Path, name: str) -> None:
    """Refuse an adapter saved as adapter_model.bin, with the command that converts it."""
    pickle = directory / "adapter_model.bin"
    if name == WEIGHTS and pickle.is_file():
        raise AdapterError(
            f"{directory} has no {name}, only {pickle.name}, a pickle: unpickling can run any code, so it is"
            " not read",
            next=conversion(directory, pickle.name, WEIGHTS),
        )


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.float().isfinite().all())
