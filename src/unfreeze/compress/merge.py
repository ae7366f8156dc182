"""merge: a base checkpoint and an adapter become one checkpoint, shard by shard.

OUT/merge.json records the progress (shards.py). Memory is one matrix with its copies, for shards of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.save import MAX_SHARD_BYTES, write_file
from unfreeze.checkpoint.shard import Shard
from unfreeze.compress import shards
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.released import RECORD, config_of, copy_beside
from unfreeze.compress.rounding import Rounded, Row, Scales, write_weight
from unfreeze.compress.shards import Progress, files_fingerprint
from unfreeze.compress.work import MergeWork, Weight
from unfreeze.config.adapter import CONFIG, weight_files
from unfreeze.core.errors import ConfigError
from unfreeze.quant.codec import Part, parts_nbytes
from unfreeze.quant.kept import can_keep


@dataclass(frozen=True)
class OutFile:
    """One file to write: its tensors, and the base's weights that they come from."""

    name: str
    parts: dict[str, Part]
    weights: list[Weight]


@dataclass
class Record(shards.Record):
    """merge.json: the inputs, the finished shards, and the rounding of their matrices."""

    file: str = RECORD
    noun: str = "merge"

    @property
    def rows(self) -> list[Row]:
        """The rounding of every adapted matrix, the worst first: the largest error relative to ΔW."""
        rows = [_row(entry) for shard in self.shards.values() for entry in shard["rounding"]]
        return sorted(rows, key=lambda row: -row.ways[row.written].error)


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

    def write(file: OutFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        rows: list[Row] = []
        for weight in file.weights:
            rows += write_weight(work, weight, deltas, shard, file.parts, scales)
            advance(parts_nbytes(part for name, part in weight.outputs.items() if name in file.parts))
        return {"rounding": [_entry(row) for row in rows]}

    def finish() -> None:
        record.more["carried"] = copy_beside(work, out)
        write_file(out / "config.json", config_of(work))
        shards.write_index(out, files)
        record.finished = True
        record.write(out)

    shards.write_files(out, files, record, write, finish, progress)
    return record


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
        if scales != "refit" and weight.in_place and not can_keep(codec):
            raise ConfigError(
                f"scales = {scales} is not built for {codec.name}, in which {weight.name} is",
                next="--scales refit",
            )


def merge_begun(out: Path, inputs: dict[str, Any]) -> Record:
    """The progress of a merge of these inputs in `out`; see shards.begun."""
    record = shards.begun(Record(inputs), out)
    try:
        _ = record.rows
    except (KeyError, TypeError, AttributeError):
        raise shards.damaged(record, out) from None
    return record


def inputs_of(manifest: Manifest, adapter: Path, to: str, scales: str) -> dict[str, Any]:
    """The inputs of a merge as recorded in merge.json: equal for equal files, at any path."""
    packed = manifest.on_load
    return {
        **({} if packed is None else {"quantize": " ".join((packed.format, *packed.modules))}),
        "base": files_fingerprint(manifest.path / "config.json", *manifest.files),
        "adapter": files_fingerprint(adapter / CONFIG, *weight_files(adapter)),
        "to": to,
        "scales": scales,
    }


def _entry(row: Row) -> dict[str, Any]:
    ways = {way: asdict(rounded) for way, rounded in row.ways.items()}
    return {
        **{name: getattr(row, name) for name in ("module", "group", "weight", "delta", "written")},
        "ways": ways,
        **({"numbers": row.numbers} if row.numbers else {}),
    }


def _row(entry: Mapping[str, Any]) -> Row:
    return Row(**{**entry, "ways": {way: Rounded(**fields) for way, fields in entry["ways"].items()}})
