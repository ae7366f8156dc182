"""save: a checkpoint folder that other programs read (safetensors with index, per-expert names).

Whenever the process is killed, the folder is complete or absent (docs/why/trust.md R1). A file is written
under a temporary name, flushed to the disk and renamed. A folder is written under a temporary name beside its
final one, then renamed as a whole. No reader looks for the temporary names.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unfreeze.checkpoint.keymap import StackRule, tensor_sources
from unfreeze.checkpoint.manifest import INDEX
from unfreeze.checkpoint.tensors import NAME
from unfreeze.core.errors import FULL, CheckpointError
from unfreeze.core.files import begin, sync_folder, write_file
from unfreeze.core.units import format_bytes
from unfreeze.quant.codec import kept_suffixes, texted
from unfreeze.quant.scheme import CodecFor, nothing_packed
from unfreeze.quant.spelling import on_disk

# the usual size of published shards; a save needs at most this much memory beyond the model
MAX_SHARD_BYTES = 5 * 10**9


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file atomically.

    Tensors are written unchanged (any device, contiguous or not), one at a time. Each is accessed twice, so a
    mapping may compute it on access. Order and padding are the safetensors library's: wide dtypes first, then
    by name, header padded with spaces to 8 bytes.

    Raises CheckpointError for a dtype the format does not have, and OSError with the needed and free bytes if
    the disk is full. An existing file is replaced.
    """
    sizes: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        sizes[name] = torch.empty_like(tensor, device="meta")
        if tensor.dtype not in NAME:
            raise CheckpointError(
                f"{name} is {tensor.dtype}, which safetensors files here do not hold; known:"
                f" {', '.join(NAME.values())}"
            )
    order = sorted(sizes, key=lambda name: (-sizes[name].dtype.itemsize, name))
    temporary = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    free = shutil.disk_usage(path.parent).free
    try:
        with temporary.open("wb") as file:
            file.write(_header(sizes, order, metadata))
            for name in order:
                file.write(_raw(tensors[name]))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        needed = format_bytes(sum(tensor.nbytes for tensor in sizes.values()))
        words = f"{error.strerror}: {needed} needed, {format_bytes(free)} free"
        raise OSError(error.errno, words, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def save_checkpoint(
    folder: Path,
    config: Mapping[str, object],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    extra: Mapping[str, Path | bytes | str] | None = None,
) -> None:
    """Write config.json, the weights and `extra` files into a new folder, all or nothing.

    The weights are model.safetensors, or shards with an index.

    tensors  (name on disk, tensor); for a model: disk_tensors(model.state_dict().items(), rules, codec_for)
    extra    file name -> content, or a path to copy (tokenizer, chat template, generation_config.json)

    Raises CheckpointError if `folder` exists and is not empty.
    """
    temporary = begin(folder)
    try:
        name_parts(temporary, write_parts(temporary, tensors, max_shard_bytes=max_shard_bytes))
        finish_folder(temporary, folder, config, extra)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def unstack(param: str, tensor: Tensor, rules: Sequence[StackRule]) -> Iterator[tuple[str, Tensor]]:
    """The inverse of loading: (name on disk, view of `tensor`) for each tensor that `param` is stored as."""
    for source in tensor_sources(param, tensor.shape, rules):
        part = tensor[source.index] if source.index else tensor
        yield source.name, part.mT if source.transposed else part


def disk_tensors(
    params: Iterable[tuple[str, Tensor]], rules: Sequence[StackRule], codec_for: CodecFor = nothing_packed
) -> Iterator[tuple[str, Tensor]]:
    """All of a model's tensors as they are stored.

    Experts are unstacked, and each packed weight is followed by its codec's extras. codec_for: a module's
    name on disk -> its codec, whose parts are among `params`.
    """
    held: dict[str, dict[str, tuple[int, ...]]] = {}
    for param, tensor in params:
        for name, part in unstack(param, tensor, rules):
            yield on_disk(name), part
            base, _, suffix = name.rpartition(".")
            codec = codec_for(base)
            if codec is None or suffix not in codec.suffixes:
                continue
            if texted(codec):
                raise CheckpointError(
                    f"{base} is in {codec.name}, whose texts are not kept: only a merge writes it",
                    next="write bf16 or int4 instead, or merge an adapter with --to same",
                )
            shapes = held.setdefault(base, {})
            shapes[suffix] = tuple(part.shape)
            if len(shapes) == len(kept_suffixes(codec)):
                out_features, in_features = codec.shape(held.pop(base))[-2:]
                for extra, values in codec.disk_extras(out_features, in_features).items():
                    yield f"{base}.{extra}", torch.tensor(values, dtype=torch.int32)


@dataclass(frozen=True)
class ShardPart:
    """A file of weights under a temporary name, and its contents."""

    file: str
    names: list[str]
    nbytes: int


def write_parts(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    stem: str = "shard",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[ShardPart]:
    """Write files of at most max_shard_bytes, in the order of the tensors, for `name_parts`.

    Several processes write theirs into one folder, each with its own stem.
    """
    parts: list[ShardPart] = []
    held = 0
    shard: dict[str, Tensor] = {}
    seen: set[str] = set()

    def flush() -> None:
        part = ShardPart(f"{stem}-{len(parts)}", list(shard), held)
        write_safetensors(folder / part.file, shard, {"format": "pt"})
        parts.append(part)
        shard.clear()

    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"{name} is saved twice", next="report this: a key map is wrong")
        seen.add(name)
        if shard and held + tensor.nbytes > max_shard_bytes:
            flush()
            held = 0
        shard[name] = tensor
        held += tensor.nbytes
    if shard:
        flush()
    return parts


def name_parts(folder: Path, parts: Sequence[ShardPart]) -> None:
    """Give the files their final names with their number: model.safetensors, or shards with an index."""
    if len(parts) == 1:
        os.replace(folder / parts[0].file, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        os.replace(folder / part.file, folder / file)
        weight_map.update(dict.fromkeys(part.names, file))
    total = sum(part.nbytes for part in parts)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_file(folder / INDEX, json.dumps(index, indent=2) + "\n")


def finish_folder(
    temporary: Path,
    folder: Path,
    config: Mapping[str, object],
    extra: Mapping[str, Path | bytes | str] | None,
) -> None:
    """Write the files beside the weights; then rename the folder."""
    write_file(temporary / "config.json", json.dumps(dict(config), indent=2) + "\n")
    for name, content in (extra or {}).items():
        write_file(temporary / name, content.read_bytes() if isinstance(content, Path) else content)
    sync_folder(temporary)  # the shards have their final names now
    os.replace(temporary, folder)  # the target does not exist, or is empty
    sync_folder(folder.parent)


def _header(tensors: Mapping[str, Tensor], order: list[str], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        entries[name] = {
            "dtype": NAME[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview | bytes:
    """The tensor's bytes, without a copy if it is contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
