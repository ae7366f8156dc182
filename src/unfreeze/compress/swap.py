"""swap: a checkpoint with a part in place of another, file by file (swapped.py says what changes).

Every tensor that stays is copied with its bytes: packed weights, and tensors beside the language model, too.
A swap that changes nothing copies the files themselves.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.beside import files_beside
from unfreeze.checkpoint.keymap import TensorSource, tensor_sources
from unfreeze.checkpoint.manifest import INDEX, SWAP, Manifest
from unfreeze.checkpoint.nested import name_on_disk
from unfreeze.checkpoint.resolve import resolve
from unfreeze.checkpoint.save import sync_folder
from unfreeze.checkpoint.shard import CHUNK, Shard
from unfreeze.checkpoint.tensors import NAME, TORCH_DTYPE
from unfreeze.compress import upcycle
from unfreeze.compress.grow import by_layer
from unfreeze.compress.shards import Progress, Record
from unfreeze.compress.swapped import Difference, Wish, config_with, difference, shape_with, value_of
from unfreeze.compress.upcycle import Made, Work, copied
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.units import format_bytes, plural
from unfreeze.models.decoder import Decoder
from unfreeze.models.publish import KEPT_FP32, declared_dtype
from unfreeze.quant.spelling import on_disk

KIND = SWAP, "swap"


@dataclass(frozen=True)
class Swap:
    """A swap of a checkpoint's files, nothing written yet. before, after: the models without values."""

    manifest: Manifest
    wish: Wish
    before: Decoder
    after: Decoder
    difference: Difference

    @property
    def nothing(self) -> bool:
        """True if no parameter and no module changes."""
        return self.difference.same and not self.difference.drawn

    @property
    def config(self) -> dict[str, Any]:
        """config.json afterwards."""
        own = self.manifest.config
        return dict(own) if self.difference.same else config_with(own, self.wish)


def opened(manifest: Manifest, wish: Wish) -> Swap:
    """Compare a checkpoint with what it would become.

    Raises CheckpointError for a place, part or option that is unknown and for files that are not the model's,
    ConfigError for parameters that do not fit.
    """
    before = resolved(manifest)
    after = models.meta_model(shape_with(before, wish), manifest, torch.bfloat16)
    return Swap(manifest, wish, before, after, difference(before, after, wish))


def resolved(manifest: Manifest) -> Decoder:
    """The checkpoint's model without values. Raises CheckpointError if the files are not the model's."""
    shape = models.shape(manifest.config)
    model = models.meta_model(shape, manifest, torch.bfloat16)
    rules, tied = models.rules(shape), models.tied(shape)
    params = {
        name: (tensor.dtype, tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    resolve(manifest, rules, params, ignore=models.ignored(shape), tied=tied)
    return model


def left_on_disk(manifest: Manifest, before: Decoder, after: Decoder, change: Difference) -> set[str]:
    """Names (the model's spelling) of stored tensors that are not in the new model with their bytes."""
    disk, rules = manifest.by_model_name(), models.rules(before.shape)

    def stored(names: Iterable[str], model: Decoder) -> set[str]:
        tensors = model.state_dict()
        sources = (tensor_sources(name, tensors[name].shape, rules, disk) for name in names)
        return {source.name for of_one in sources for source in of_one} & disk.keys()

    dropped = stored(change.dropped, before)
    gone = dropped | stored(before.state_dict().keys() & set(change.drawn), before)
    held = {name.rpartition(".")[0] for name in stored(after.state_dict(), after)}
    # what else a file has beside a packed weight goes with its module
    modules = {name.rpartition(".")[0] for name in dropped} - held
    return gone | {name for name in disk if name.rpartition(".")[0] in modules}


def work_of(swap: Swap) -> Work:
    """The new checkpoint's tensors, in the order of the layers, and its config.json."""
    gone = left_on_disk(swap.manifest, swap.before, swap.after, swap.difference)
    disk = swap.manifest.by_model_name()

    @lru_cache(maxsize=1)  # a parameter's tensors are written one after the other
    def value(param: str) -> Tensor:
        return value_of(swap.after, param, swap.wish.seed)

    tensors = [copied(info.name, info) for name, info in disk.items() if name not in gone]
    tensors += [one for name in swap.difference.drawn for one in _drawn(swap, name, partial(value, name))]
    return Work(swap.manifest, sorted(tensors, key=lambda one: by_layer(one.name)), swap.config)


def _drawn(swap: Swap, param: str, value: Callable[[], Tensor]) -> Iterator[Made]:
    """The tensors that a drawn parameter is stored as."""
    disk, tensor = swap.manifest.by_model_name(), swap.after.state_dict()[param]
    for source in tensor_sources(param, tensor.shape, models.rules(swap.after.shape), disk):
        info = disk.get(source.name)
        name = info.name if info is not None else name_on_disk(swap.manifest.prefix, on_disk(source.name))
        dtype = TORCH_DTYPE[info.dtype] if info is not None else _dtype(source, tensor, swap.manifest)
        yield Made(name, (NAME[dtype], source.shape), _written(name, source, value, dtype))


def _dtype(source: TensorSource, tensor: Tensor, manifest: Manifest) -> torch.dtype:
    """The dtype of a new tensor: float32 where the model needs it, else the one that config.json names."""
    if tensor.dtype == torch.float32 or source.name.endswith(KEPT_FP32):
        return torch.float32
    return declared_dtype(manifest.config)


def _written(
    name: str, source: TensorSource, value: Callable[[], Tensor], dtype: torch.dtype
) -> Callable[[Shard], None]:
    def write(shard: Shard) -> None:
        part = value()[source.index] if source.index else value()
        shard.put(name, (part.mT if source.transposed else part).to(dtype))

    return write


def write(swap: Swap, out: Path, progress: Progress | None) -> Record | None:
    """Write the folder, or the files that are missing there. -> its record; None for a mere copy."""
    if swap.nothing:
        copy(swap.manifest, out, progress)
        return None
    wish = swap.wish
    inputs = upcycle.inputs_of(
        swap.manifest, at=wish.at, part=wish.part, set=wish.words, init=wish.init, seed=wish.seed
    )
    return upcycle.write(work_of(swap), out, inputs, progress, KIND)


def copy(manifest: Manifest, out: Path, progress: Progress | None) -> None:
    """Copy the checkpoint's files, each atomically and config.json last; those that are there stay.

    Raises ConfigError for a folder with other files, DoesNotFit if the disk is too small.
    """
    beside = files_beside(manifest.path)
    names = {path.name: path for path in beside.values()}
    files = {path.name: path for path in manifest.files} | names
    for last in (INDEX, "config.json"):
        if _has(manifest, last):
            files[last] = manifest.path / last
    _refuse_others(out, files)
    left = {name: path for name, path in files.items() if not _is_copy(path, out / name)}
    needed, total = (sum(path.stat().st_size for path in each.values()) for each in (left, files))
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    if needed > (free := shutil.disk_usage(existing).free):
        raise DoesNotFit(
            f"disk: {format_bytes(needed)} for {plural(len(left), 'file')}; {format_bytes(free)} free for"
            f" {out}",
            next="free space, or give --out on another disk",
        )
    out.mkdir(parents=True, exist_ok=True)
    done = total - needed
    for name, path in left.items():
        temporary = out / f".{name}.unfinished-{os.getpid()}"
        with path.open("rb") as source, temporary.open("wb") as target:
            while piece := source.read(CHUNK):
                target.write(piece)
                done += len(piece)
                if progress is not None:
                    progress(min(done, total), total)
            target.flush()
            os.fsync(target.fileno())
        os.replace(temporary, out / name)
    sync_folder(out)


def _has(manifest: Manifest, name: str) -> bool:
    return (manifest.path / name).is_file()


def _is_copy(path: Path, copy: Path) -> bool:
    return copy.is_file() and filecmp.cmp(path, copy, shallow=False)


def _refuse_others(out: Path, files: Mapping[str, Path]) -> None:
    """Raise ConfigError for a folder with files that the copy does not have."""
    if out.is_file():
        raise ConfigError(f"out = {str(out)!r} is a file, not a folder", next="give another folder")
    there = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    stopped = [name for name in there if ".unfinished-" in name]
    for name in there:
        if name not in stopped and (name not in files or not _is_copy(files[name], out / name)):
            raise ConfigError(f"{out} holds {name}, not this model", next="give an empty or new folder")
    for name in stopped:
        (out / name).unlink()
