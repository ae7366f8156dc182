"""merge: a base checkpoint and an adapter become one checkpoint, shard by shard.

OUT/merge.json records the progress after every shard, with the shard's size and SHA-256, so a merge that was
stopped resumes there. config.json and the index come last: before them no program takes the folder for a
model. Memory is one matrix with its copies, for shards of any size.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unfreeze.checkpoint.manifest import INDEX, Manifest
from unfreeze.checkpoint.save import MAX_SHARD_BYTES, write_file
from unfreeze.checkpoint.shard import Shard, file_bytes, sha256_of
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.released import RECORD, config_of, copy_beside
from unfreeze.compress.rounding import Rounded, Row, Scales, write_weight
from unfreeze.compress.work import MergeWork, Weight
from unfreeze.config.adapter import CONFIG, weight_files
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.units import format_bytes
from unfreeze.quant.codec import Part, as_table, parts_nbytes
from unfreeze.quant.kept import can_keep
from unfreeze.untrusted.json_object import read_object

VERSION = 1  # of merge.json
SAMPLE = 2**16  # bytes read at three places of a file for its fingerprint

Progress = Callable[[int, int], None]
"""(bytes done, total bytes)"""


@dataclass(frozen=True)
class OutFile:
    """One file to write: its tensors, and the base's weights that they come from."""

    name: str
    parts: dict[str, Part]
    weights: list[Weight]


@dataclass
class Record:
    """merge.json: the inputs, the finished shards, and the rounding of their matrices."""

    inputs: dict[str, Any]
    shards: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    finished: bool = False
    more: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def rows(self) -> list[Row]:
        """The rounding of every adapted matrix, the worst first: the largest error relative to ΔW."""
        rows = [_row(entry) for shard in self.shards.values() for entry in shard["rounding"]]
        return sorted(rows, key=lambda row: -row.ways[row.written].error)

    def write(self, out: Path) -> None:
        whole = {"version": VERSION, "finished": self.finished, "inputs": self.inputs, **self.more}
        whole["shards"] = self.shards
        write_file(out / RECORD, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def merge(
    work: MergeWork,
    deltas: Deltas,
    out: Path,
    inputs: dict[str, Any],
    scales: Scales,
    progress: Progress | None,
) -> Record:
    """Write the merged checkpoint into `out`, or the files that are still missing there.

    inputs: the sources (`inputs_of`); a folder that was started with others is refused. Raises ConfigError
    for a format that cannot be written and for another folder's content, DoesNotFit if the disk is too small:
    both before anything is written.
    """
    check_formats(work, scales)
    files = out_files(work)
    record = merge_begun(out, inputs)
    done = {file.name for file in files if _is_whole(out, file.name, record)}
    left = [file for file in files if file.name not in done]
    check_disk(out, left, len(files))
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        for stale in out.glob(".*.unfinished-*"):
            stale.unlink()
        record.shards = {name: entry for name, entry in record.shards.items() if name in done}
        record.write(out)
        total = sum(file_bytes(file.parts) for file in files)
        written = total - sum(file_bytes(file.parts) for file in left)
        for file in left:
            rows: list[Row] = []
            with Shard(out / file.name, file.parts) as shard:
                for weight in file.weights:
                    rows += write_weight(work, weight, deltas, shard, file.parts, scales)
                    written += parts_nbytes(
                        part for name, part in weight.outputs.items() if name in file.parts
                    )
                    if progress is not None:
                        progress(min(written, total), total)
                size, digest = shard.close()
            record.shards[file.name] = {
                "bytes": size,
                "sha256": digest,
                "rounding": [_entry(row) for row in rows],
            }
            record.write(out)
        _finish(work, out, files, record)
    return record


def _finish(work: MergeWork, out: Path, files: list[OutFile], record: Record) -> None:
    """Write the files beside the weights, config.json, then the index."""
    record.more["carried"] = copy_beside(work, out)
    write_file(out / "config.json", config_of(work))
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.parts}
        total = sum(parts_nbytes(file.parts.values()) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(out / INDEX, json.dumps(index, indent=2) + "\n")
    record.finished = True
    record.write(out)


def out_files(work: MergeWork, limit: int = MAX_SHARD_BYTES) -> list[OutFile]:
    """The files to write. `same`: the base's own, with the same tensors; else new ones of at most `limit`.

    A weight that takes more has its own file.
    """
    if work.to == "same":
        files: dict[str, OutFile] = {path.name: OutFile(path.name, {}, []) for path in work.manifest.files}
        for weight in work.weights:
            for info in weight.parts.values():
                file = files[info.file.name]
                file.parts[info.name] = weight.outputs[info.name]
                if not file.weights or file.weights[-1] is not weight:
                    file.weights.append(weight)
        return list(files.values())
    groups: list[OutFile] = []
    held = 0
    for weight in work.weights:
        size = parts_nbytes(weight.outputs.values())
        if not groups or held + size > limit:
            groups.append(OutFile("", {}, []))
            held = 0
        held += size
        groups[-1].parts.update(weight.outputs)
        groups[-1].weights.append(weight)
    if len(groups) == 1:
        return [OutFile("model.safetensors", groups[0].parts, groups[0].weights)]
    return [
        OutFile(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group.parts, group.weights)
        for number, group in enumerate(groups, 1)
    ]


def check_formats(work: MergeWork, scales: Scales) -> None:
    """Raise ConfigError if a format can only be read, or if its scales cannot be kept."""
    import torch

    for codec, weight in work.codecs.items():
        rows, columns = work.shape(weight)
        try:
            codec.quantize(torch.ones(min(rows, 128), columns))
        except ConfigError as error:
            raise ConfigError(
                f"{weight.name} is in {codec.name}: {error.message}", next="--to bf16, or --to int4"
            ) from None
        if scales == "keep" and weight.in_place and not can_keep(codec):
            raise ConfigError(
                f"scales = keep is not built for {codec.name}, in which {weight.name} is",
                next="--scales refit",
            )


def check_disk(out: Path, left: list[OutFile], files: int) -> None:
    """Raise DoesNotFit if the remaining files take more than the free disk space."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free, needed = shutil.disk_usage(existing).free, sum(file_bytes(file.parts) for file in left)
    if needed > free:
        there = f" of {files}, {files - len(left)} are there" if len(left) < files else ""
        raise DoesNotFit(
            f"disk: {len(left)} files{there} take {format_bytes(needed)}; {format_bytes(free)} free for"
            f" {out}",
            next="free space, or give --out on another disk",
        )


def merge_begun(out: Path, inputs: dict[str, Any]) -> Record:
    """The progress of a merge of these inputs in `out`; empty if the folder is new or empty.

    Raises ConfigError for a folder with anything else in it.
    """
    if out.is_file():
        raise ConfigError(f"out = {str(out)!r} is a file, not a folder", next="give another folder")
    if not (out / RECORD).is_file():
        mine = [path for path in out.iterdir() if ".unfinished-" not in path.name] if out.is_dir() else []
        if mine:
            raise ConfigError(f"{out} holds {mine[0].name}, not a merge", next="give an empty or new folder")
        return Record(inputs)
    stored = read_object(out / RECORD, ConfigError)
    damaged = ConfigError(f"{out / RECORD} is damaged", next="give another folder, or empty this one")
    before, shards = as_table(stored.get("inputs")) or {}, stored.get("shards")
    if not isinstance(shards, dict) or not all(as_table(entry) for entry in shards.values()):
        raise damaged
    other = [name for name in inputs if before.get(name) != inputs[name]]
    if other or stored.get("version") != VERSION:
        files = [f"of another {name}" for name in other if name in ("base", "adapter")]
        flags = [f"with --{name} {before.get(name)}" for name in other if name in ("to", "scales")]
        what = " and ".join(files + flags) or "by another version of this program"
        raise ConfigError(
            f"{out} holds a merge {what}", next="give another folder, or the same command as then"
        )
    more = {
        name: value
        for name, value in stored.items()
        if name not in ("version", "finished", "inputs", "shards")
    }
    record = Record(inputs, dict(shards), bool(stored.get("finished")), more)
    try:
        _ = record.rows
    except (KeyError, TypeError, AttributeError):
        raise damaged from None
    return record


def inputs_of(manifest: Manifest, adapter: Path, to: str, scales: str) -> dict[str, Any]:
    """The inputs of a merge as recorded in merge.json: equal for equal files, at any path."""
    return {
        "base": files_fingerprint(manifest.path / "config.json", *manifest.files),
        "adapter": files_fingerprint(adapter / CONFIG, *weight_files(adapter)),
        "to": to,
        "scales": scales,
    }


def files_fingerprint(*files: Path) -> str:
    """SHA-256 over the files' names and sizes and 64 KiB at the start, middle and end of each.

    A base of 594 GB is not read twice; the start of a safetensors file has the place of every tensor.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - SAMPLE)):
                file.seek(at)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _is_whole(out: Path, name: str, record: Record) -> bool:
    """True if a file exists as the record has it."""
    entry, path = record.shards.get(name), out / name
    if entry is None or not path.is_file() or path.stat().st_size != entry.get("bytes"):
        return False
    return sha256_of(path) == entry.get("sha256")


@contextmanager
def _alone(out: Path) -> Generator[None]:
    """Hold a lock, so that no other process merges into the folder meanwhile."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"another process is merging into {out}", next="wait for it, or give another --out"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def _entry(row: Row) -> dict[str, Any]:
    ways = {way: asdict(rounded) for way, rounded in row.ways.items()}
    return {
        **{name: getattr(row, name) for name in ("module", "group", "weight", "delta", "written")},
        "ways": ways,
    }


def _row(entry: Mapping[str, Any]) -> Row:
    return Row(**{**entry, "ways": {way: Rounded(**fields) for way, fields in entry["ways"].items()}})
