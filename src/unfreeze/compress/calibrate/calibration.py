"""Calibration of a checkpoint: rows go through it layer by layer, and each layer's matrices are corrected.

A layer gets the rows as the layers before it, already rounded, hand them on. Its inputs are collected with
its own weights as they are in the base; of an expert's down_proj, with gate and up already rounded. Then its
matrices are corrected (gptq.py) and written to FOLDER/layer-….safetensors, and the rows go through the
rounded layer.

A rerun keeps the finished layers. The rows' hidden states are not kept: they are computed again from the
finished layers' weights, one forward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.shard import Shard
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress import shards
from unfreeze.compress.calibrate import awq, matrices
from unfreeze.compress.calibrate.folds import Kind
from unfreeze.compress.calibrate.gptq import DAMPING
from unfreeze.compress.calibrate.layers import Layers, hidden_states
from unfreeze.compress.calibrate.matrices import (
    COLUMNS,
    HEAD,
    ROWS,
    LayerFile,
    Matrix,
    Tally,
    matrices_of,
    parts_in,
    place_of,
)
from unfreeze.compress.calibrate.walk import Method, Walk, carried
from unfreeze.compress.quantize.formats import Round
from unfreeze.compress.quantize.fused import OneNumber
from unfreeze.compress.quantize.write import ABSENT
from unfreeze.compress.work import MergeWork
from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.decoder import Decoder
from unfreeze.models.groups import group_of
from unfreeze.quant.codec import Codec

RECORD = "calibration.json"


def check_rows(
    chosen: Sequence[Matrix], model: Decoder, batches: Sequence[Batch], method: Method = "gptq"
) -> None:
    """Raise DataError if the rows are too few for every matrix: nothing would be corrected."""
    tokens, least = sum(batch.num_tokens for batch in batches), dict[int, Matrix]()
    enough = matrices.enough if method == "gptq" else awq.enough
    for matrix in chosen:
        owner, needed = model.get_submodule(matrix.place.site), enough(matrix.shape[1])
        if isinstance(owner, Experts):  # if all experts were chosen equally often
            needed = ceil(needed * owner.num_experts / model.shape.experts_per_token)
        least.setdefault(needed, matrix)
    needed = min(least, default=0)
    if tokens < needed:
        raise DataError(
            f"{tokens:,} calibration tokens; {least[needed].name} needs {needed:,}, others as many or more",
            next="give more rows with --calibrate, or leave it out to round to the nearest",
        )


@dataclass
class Calibration:
    """The corrected matrices of a checkpoint, in `folder`. inputs: what it is made of, for the record.

    It is the scales of a plan, too (quantize/formats.py, Scales).
    """

    work: MergeWork
    batches: Sequence[Batch]
    folder: Path
    inputs: dict[str, Any]
    method: Method = "gptq"
    record: shards.Record = field(init=False)
    matrices: list[Matrix] = field(init=False)
    files: list[LayerFile] = field(init=False)
    _nearest: Round = field(init=False)
    _stored: dict[str, dict[str, TensorInfo]] = field(init=False, default_factory=dict)
    _changes: dict[str, tuple[Kind, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raise DataError for too few rows, ConfigError for a folder with another calibration."""
        self._nearest = OneNumber(self.work).round
        self.matrices = list(matrices_of(self.work))
        check_rows(self.matrices, self.work.model, self.batches, self.method)
        by_layer: dict[int, list[Matrix]] = {}
        for matrix in self.matrices:
            index = Layers.layer_of(matrix.place.site)
            if matrix.place.site == HEAD:
                index = len(self.work.model.layers)  # behind the last layer
            if index is not None:
                by_layer.setdefault(index, []).append(matrix)
        scaled = self.method != "gptq"
        self.files = [LayerFile(index, by_layer[index], scaled) for index in sorted(by_layer)]
        inputs = {**self.inputs, "rows": digest_of(self.batches)}
        inputs |= {"damping": DAMPING, "fewest": matrices.FEWEST} if self.method != "awq" else {}
        inputs |= {"grid": awq.GRID, "fewest of awq": awq.FEWEST} if scaled else {}
        record = shards.Record(inputs, file=RECORD, noun="calibration", absent=ABSENT)
        self.record = shards.begun(record, self.folder)

    def run(self, progress: shards.Progress | None = None) -> None:
        """Correct the layers that are missing. Raises DoesNotFit if the disk is too small, before any."""
        walk: Walk | None = None
        files = self.files

        def write(file: LayerFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
            nonlocal walk
            walk = walk or Walk(
                Layers(self.work.manifest),
                self.batches,
                files,
                self.folder,
                self.method,
                self._nearest,
                self._disk,
                self.record.shards.__getitem__,
            )
            return walk.corrected(file, shard, advance)

        def finish() -> None:
            self.record.finished = True
            self.record.write(self.folder)

        shards.write_files(self.folder, files, self.record, write, finish, progress)
        for file in files:
            self._stored |= parts_in(self.folder / file.name)
            for parameter, change in self.record.shards[file.name].get("others", {}).items():
                info = self._disk(parameter)
                assert info is not None
                self._changes[info.name] = change

    def round(self, weight: Tensor, codec: Codec, name: str) -> dict[str, Tensor]:
        """The corrected parts of a matrix (quantize/formats.py, Round); the nearest of one without any."""
        stored = self._layers_files.get(name)
        if stored is None:
            return self._nearest(weight, codec, name)
        return {name: stored_tensor(info) for name, info in stored.items() if name not in (COLUMNS, ROWS)}

    def unscaled(self, weight: Tensor, name: str) -> Tensor:
        """A rounded matrix, in the place of the base's: without its scales."""
        stored = self._layers_files.get(name, {})
        if COLUMNS not in stored:
            return weight
        return weight / stored_tensor(stored[COLUMNS]) * stored_tensor(stored[ROWS])[:, None]

    def change(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """The change of a tensor on disk that is not quantized; None if it stays as it is."""
        files = self._layers_files
        if name not in self._changes:
            return None
        kind, matrix = self._changes[name]
        return lambda tensor: carried(tensor, kind, stored_tensor(files[matrix][COLUMNS]))

    @property
    def _layers_files(self) -> dict[str, dict[str, TensorInfo]]:
        """Matrix -> its parts in the layers' files, which are computed first if need be."""
        if not self._stored:
            self.run()
        return self._stored

    def _disk(self, parameter: str) -> TensorInfo | None:
        """The tensor on disk that holds a parameter of the model and nothing else, None if there is none."""
        disk = self.work.manifest.by_model_name()
        shape = self.work.model.get_parameter(parameter).shape
        source = tensor_sources(parameter, shape, self.work.rules, disk)[0]
        info = disk.get(source.name)
        if info is None or source.index or source.transposed or info.shape != tuple(shape):
            return None
        return info

    @property
    def tallies(self) -> dict[str, Tally]:
        """Group -> its matrices."""
        groups: dict[str, Tally] = {}
        for entry in self.record.shards.values():
            for group, more in entry["tallies"].items():
                groups.setdefault(group, Tally()).add(more)
        return groups

    @property
    def left(self) -> dict[str, int]:
        """Leaf of a name -> matrices that nothing in front takes the scales of."""
        leaves: dict[str, int] = {}
        for entry in self.record.shards.values():
            for leaf, count in entry.get("left", {}).items():
                leaves[leaf] = leaves.get(leaf, 0) + count
        return leaves

    @property
    def changed_groups(self) -> dict[str, int]:
        """Group -> its tensors that are not quantized, and carry scales."""
        groups: dict[str, int] = {}
        for entry in self.record.shards.values():
            for parameter in entry.get("others", {}):
                groups[group_of(parameter)] = groups.get(group_of(parameter), 0) + 1
        return groups


@torch.no_grad()
def rounded_states(
    manifest: Manifest, chosen: Sequence[Matrix], batches: Sequence[Batch], nearest: Round
) -> Rounded:
    """The states that the head would read if `nearest` rounded every matrix; no file is written."""
    layers, by_layer = Layers(manifest), dict[int | None, list[Matrix]]()
    for matrix in chosen:
        by_layer.setdefault(Layers.layer_of(matrix.place.site), []).append(matrix)

    def change(index: int | None) -> None:
        for matrix in by_layer.get(index, ()):
            weight = place_of(layers.model, matrix)
            parts = nearest(weight.float().contiguous(), matrix.codec, matrix.name)
            weight.copy_(matrix.codec.dequantize(parts))

    change(None)
    return Rounded(hidden_states(layers, batches, lambda _, index: change(index)), layers.model)


class Rounded(NamedTuple):
    """Hidden states after the final norm, [T, D] for each batch, and the model whose head reads them."""

    states: list[Tensor]
    model: Decoder


def digest_of(batches: Sequence[Batch]) -> str:
    """BLAKE2b of all tokens and documents."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for tensor in (batch.tokens_T, batch.starts_S):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
