"""An adapter of experts that are split over processes, on disk: one shard per process, and an index.

    adapter_model-00001-of-00002.safetensors   the first process's experts, and all other adapters
    adapter_model-00002-of-00002.safetensors   the second process's experts
    adapter_model.safetensors.index.json       {"metadata": {"total_size"}, "experts": [8, 8], "weight_map"}

Each has the fused pairs of peft's layout (layouts.py) under the same names, for its own experts: A (E_i r,
in) and B (out, r E_i). weight_map names the file of a tensor or, if it is in parts, their files in the order
of the experts. Our readers join the parts (files.py); peft reads no shards, and `unfreeze export` writes one
file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from unfreeze.adapters.attach import sites
from unfreeze.adapters.files import read_tensors
from unfreeze.adapters.layouts import Entry, Tensors, entries_of
from unfreeze.adapters.names import prefix_in
from unfreeze.adapters.verify import Verified, verify_adapter
from unfreeze.checkpoint.save import write_file, write_safetensors
from unfreeze.config.adapter import CONFIG, INDEX, PREFIX, SHARD, WEIGHTS
from unfreeze.models.blocks.linear import Linear


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` of `count`, counted from 0."""
    return f"adapter_model-{index + 1:05d}-of-{count:05d}.safetensors"


def save_shard(model: nn.Module, directory: Path, index: int, count: int, prefix: str = "") -> Verified:
    """Write this process's shard, read it again and compare it with the model's own experts.

    prefix: the one before the names of the checkpoint's text model (Manifest.prefix). Raises AdapterError if
    it differs from the model.
    """
    entries, config = entries_of(model)
    path = directory / shard_name(index, count)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = Tensors(_own(entries, index), prefix_in(model, prefix))
    write_safetensors(path, tensors, {"format": "pt", "layout": "peft", "shard": f"{index + 1} of {count}"})
    elsewhere = {site.name for site in sites(model) if index and isinstance(site.owner, Linear)}
    written = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(path).items()}
    return verify_adapter(model, directory, elsewhere, (config, written))


def save_index(
    model: nn.Module, directory: Path, experts: list[int], base_name: str | None = None, prefix: str = ""
) -> None:
    """Write the index and adapter_config.json, which make the shards an adapter. Removes an earlier one.

    experts: of each shard, in order.
    """
    entries, config = entries_of(model, base_name=base_name)
    files = [shard_name(index, len(experts)) for index in range(len(experts))]
    if not _own(entries, 1):  # no expert has an adapter: the first shard holds all
        files, experts = files[:1], [sum(experts)]
    where: dict[str, Any] = dict.fromkeys(Tensors(entries, prefix_in(model, prefix)), files[0])
    where |= dict.fromkeys(Tensors(_own(entries, 1), prefix_in(model, prefix)), files)
    total = sum((directory / file).stat().st_size for file in files)
    index = {"metadata": {"total_size": total}, "experts": experts, "weight_map": where}
    write_file(directory / INDEX, json.dumps(index, indent=2) + "\n")
    write_file(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    (directory / WEIGHTS).unlink(missing_ok=True)
    remove_shards(directory, but=files)


def remove_shards(directory: Path, but: list[str] | None = None) -> None:
    """Remove shards of an earlier adapter in this folder; without `but` also the index."""
    for file in directory.iterdir() if directory.is_dir() else ():
        if SHARD.fullmatch(file.name) and file.name not in (but or ()):
            file.unlink()
    if but is None:
        (directory / INDEX).unlink(missing_ok=True)


def _own(entries: list[Entry], index: int) -> list[Entry]:
    """The entries of shard `index`: the pairs of stacked experts; for the first also all others."""
    return [entry for entry in entries if index == 0 or entry.A.dim() == 3]
