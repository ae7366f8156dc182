"""quantize: the files of a quantized checkpoint, one after the other, and how far its weights moved.

OUT/quantize.json records the progress (compress/shards.py). Memory is one matrix with its copies, for shards
of any size.

    moved(group) = √(Σ ‖Q(W) − W‖² / Σ ‖W‖²)            Frobenius norms, summed in float64
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unfreeze.checkpoint.manifest import QUANTIZE, Manifest, TensorInfo
from unfreeze.checkpoint.save import write_file
from unfreeze.checkpoint.shard import Shard
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress import shards
from unfreeze.compress.merge import OutFile, out_files
from unfreeze.compress.quantize.work import check_loads, planned
from unfreeze.compress.released import config_of, copy_beside
from unfreeze.compress.rounding import packed
from unfreeze.compress.shards import Progress, files_fingerprint
from unfreeze.compress.work import MergeWork
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import parts_nbytes

ABSENT = {"method": "gptq"}  # in records of the time when --calibrate had one method


@dataclass(frozen=True)
class Moved:
    """The change of a group's weights: matrices, weights, and √(Σ‖Q(W) − W‖² / Σ‖W‖²)."""

    matrices: int
    weights: int
    error: float


@dataclass
class Record(shards.Record):
    """quantize.json: the inputs, the finished files, and how far their weights moved."""

    file: str = QUANTIZE
    noun: str = "quantization"
    absent: Mapping[str, Any] = field(default_factory=lambda: ABSENT)

    @property
    def moved(self) -> dict[str, Moved]:
        """Group -> how far its weights moved."""
        sums: dict[str, list[float]] = {}
        for entry in self.shards.values():
            for group, terms in entry["moved"].items():
                sums[group] = [old + new for old, new in zip(sums.get(group, [0] * 4), terms, strict=True)]
        return {
            group: Moved(int(matrices), int(weights), math.sqrt(off / size) if size else 0.0)
            for group, (matrices, weights, off, size) in sums.items()
        }


def write(work: MergeWork, out: Path, inputs: dict[str, Any], progress: Progress | None) -> Record:
    """Write the checkpoint into `out`, or the files that are still missing there.

    Each matrix is rounded by `work.packing.round`. inputs: the sources (`inputs_of`); a folder that was
    started with others is refused. Raises ConfigError for another folder's content, CheckpointError for a
    checkpoint that could not be loaded, DoesNotFit if the disk is too small: all before anything is written.
    CheckpointError for a weight with NaN names it; the files before it stay.
    """
    files = out_files(work)
    record = begun(out, inputs)
    check_loads(planned(work, out, files))

    def write_one(file: OutFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        moved: dict[str, list[float]] = {}
        for weight in file.weights:
            if weight.to is None:
                for info in weight.parts.values():
                    _copy(work, info, shard)
            else:
                sums = moved.setdefault(weight.group, [0, 0, 0.0, 0.0])
                try:
                    for value, W in packed(work, weight, shard):
                        terms = (1, W.numel(), _square(value - W), _square(W))
                        sums[:] = [old + new for old, new in zip(sums, terms, strict=True)]
                except CheckpointError as error:
                    raise CheckpointError(
                        f"{weight.name}: {error.message}", next=error.next or "get the checkpoint again"
                    ) from None
            advance(parts_nbytes(weight.outputs.values()))
        return {"moved": moved}

    def finish() -> None:
        record.more["carried"] = copy_beside(work, out)
        write_file(out / "config.json", config_of(work))
        shards.write_index(out, files)
        record.finished = True
        record.write(out)

    shards.write_files(out, files, record, write_one, finish, progress)
    return record


def _copy(work: MergeWork, info: TensorInfo, shard: Shard) -> None:
    """Write a tensor that is not quantized, with the scales that it takes if there are some."""
    assert work.packing is not None
    change = work.packing.scales.change(info.name) if work.packing.scales is not None else None
    if change is None:
        shard.copy(info.name, info)
    else:
        shard.put(info.name, change(stored_tensor(info)))


def begun(out: Path, inputs: dict[str, Any]) -> Record:
    """The progress in `out`; see shards.begun."""
    record = shards.begun(Record(inputs), out)
    try:
        _ = record.moved
    except (KeyError, TypeError, ValueError, AttributeError):
        raise shards.damaged(record, out) from None
    return record


def refuse_other_weights(work: MergeWork, out: Path, next: str) -> None:
    """Raise ConfigError for weights in `out` that are not of this quantization: a model would have both."""
    own = {file.name for file in out_files(work)}
    others = sorted(path.name for path in out.glob("*.safetensors") if path.name not in own)
    if others:
        raise ConfigError(f"{out} holds {others[0]}, which this quantization does not write", next=next)


def inputs_of(manifest: Manifest, to: str, modules: tuple[str, ...], **more: object) -> dict[str, Any]:
    """The inputs as quantize.json has them: equal for equal files, at any path. more: flags by name."""
    base = files_fingerprint(manifest.path / "config.json", *manifest.files)
    return {"base": base, "to": to, "modules": " ".join(modules), **more}


def _square(matrix: Tensor) -> float:
    return float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
