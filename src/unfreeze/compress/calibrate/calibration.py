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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfreeze.checkpoint.faults import Faults
from unfreeze.checkpoint.manifest import Manifest, TensorInfo, read_header
from unfreeze.checkpoint.nested import in_model
from unfreeze.checkpoint.shard import Shard
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress import shards
from unfreeze.compress.calibrate.gptq import DAMPING, Hessian, correct, inverse_factor
from unfreeze.compress.calibrate.inputs import Inputs, inner
from unfreeze.compress.calibrate.layers import Layers, State, hidden_states, through
from unfreeze.compress.deltas import MatrixPlace
from unfreeze.compress.quantize.formats import Round
from unfreeze.compress.quantize.fused import OneNumber
from unfreeze.compress.work import MergeWork
from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import Decoder
from unfreeze.models.groups import group_of
from unfreeze.models.layer import Layer
from unfreeze.quant.codec import Codec, Part, parts_nbytes
from unfreeze.quant.spelling import canonical

RECORD, HEAD = "calibration.json", "lm_head"
FEWEST = 4
"""Tokens that a matrix needs for each of its input columns; with fewer it is rounded to the nearest.

On tiny-k2 (NVFP4, held-out rows) the error of dense layers was above that of rounding to the nearest in 20 of
32 matrices with 1/4 token per column, in 3 with 1, in 2 with 2 and in none with 4; of experts in 8, 6, 4 and
1 of 20, up to 22 times with 1 and 1.04 times with 4.
"""


@dataclass(frozen=True)
class Matrix:
    """One matrix that is quantized: its name (quantize/formats.py), its place in the model, its format."""

    name: str
    place: MatrixPlace
    codec: Codec
    shape: tuple[int, int]

    @property
    def parts(self) -> dict[str, Part]:
        """Tensors in the layer's file."""
        return {f"{self.name}.{suffix}": part for suffix, part in self.codec.parts(*self.shape).items()}


@dataclass(frozen=True)
class LayerFile:
    """The corrected matrices of one layer, in one file. index: of the head the number of layers."""

    index: int
    matrices: list[Matrix]

    @property
    def name(self) -> str:
        return f"layer-{self.index:05d}.safetensors"

    @property
    def parts(self) -> Mapping[str, Part]:
        return {name: part for matrix in self.matrices for name, part in matrix.parts.items()}


@dataclass
class Tally:
    """Matrices of one group in a layer, by how they were rounded.

    corrected  by GPTQ
    better     to the nearest, which had the smaller error on the calibration rows
    few        to the nearest: fewer tokens than FEWEST per input column
    other      to the nearest: an input that is not seen, or a format whose codes need the whole matrix
    error      Σ of the corrected ones' errors on the calibration rows; nearest: had they been rounded
    """

    corrected: int = 0
    better: int = 0
    few: int = 0
    other: int = 0
    error: float = 0.0
    nearest: float = 0.0

    def add(self, more: Mapping[str, Any]) -> None:
        """Add another layer's."""
        for name, value in more.items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def matrices(self) -> int:
        """Their number."""
        return self.corrected + self.better + self.few + self.other


def matrices_of(work: MergeWork) -> Iterator[Matrix]:
    """Every matrix of a dense base that the plan quantizes."""
    for weight in work.weights:
        home, codec = weight.home, weight.to
        if home is None or codec is None or isinstance(codec, str) or weight.codec is not None:
            continue
        for expert in weight.experts():
            for out in work.outs(weight, expert):
                name = canonical(in_model(work.manifest.prefix, out.name))
                place = home.place
                number = place.expert if home.experts is None else expert
                half = place.half if out.half is None else out.half
                rows, columns = work.shape(weight)
                yield Matrix(
                    name + (f"[{expert}]" if out.whole else ""),
                    MatrixPlace(place.site, place.projection, number, half),
                    codec,
                    (rows if out.half is None else rows // 2, columns),
                )


def enough(width: int) -> int:
    """Tokens that a matrix with `width` input columns needs."""
    return ceil(FEWEST * width)


def check_rows(matrices: Sequence[Matrix], model: Decoder, batches: Sequence[Batch]) -> None:
    """Raise DataError if the rows are too few for every matrix: nothing would be corrected."""
    tokens, least = sum(batch.num_tokens for batch in batches), dict[int, Matrix]()
    for matrix in matrices:
        owner, needed = model.get_submodule(matrix.place.site), enough(matrix.shape[1])
        if isinstance(owner, Experts):  # if all experts were chosen equally often
            needed = ceil(needed * owner.num_experts / model.shape.experts_per_token)
        least.setdefault(needed, matrix)
    needed = min(least, default=0)
    if tokens < needed:
        raise DataError(
            f"{tokens:,} calibration tokens; {least[needed].name} needs {needed:,}, and no matrix fewer",
            next="give more rows with --calibrate, or leave it out to round to the nearest",
        )


@dataclass
class Calibration:
    """The corrected matrices of a checkpoint, in `folder`. inputs: what it is made of, for the record."""

    work: MergeWork
    batches: Sequence[Batch]
    folder: Path
    inputs: dict[str, Any]
    record: shards.Record = field(init=False)
    matrices: list[Matrix] = field(init=False)
    files: list[LayerFile] = field(init=False)
    _nearest: Round = field(init=False)
    _stored: dict[str, dict[str, TensorInfo]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raise DataError for too few rows, ConfigError for a folder with another calibration."""
        self._nearest = OneNumber(self.work).round
        self.matrices = list(matrices_of(self.work))
        check_rows(self.matrices, self.work.model, self.batches)
        by_layer: dict[int, list[Matrix]] = {}
        for matrix in self.matrices:
            index = Layers.layer_of(matrix.place.site)
            if matrix.place.site == HEAD:
                index = len(self.work.model.layers)  # behind the last layer
            if index is not None:
                by_layer.setdefault(index, []).append(matrix)
        self.files = [LayerFile(index, by_layer[index]) for index in sorted(by_layer)]
        inputs = {**self.inputs, "rows": digest_of(self.batches), "damping": DAMPING, "fewest": FEWEST}
        self.record = shards.begun(shards.Record(inputs, file=RECORD, noun="calibration"), self.folder)

    def run(self, progress: shards.Progress | None = None) -> None:
        """Correct the layers that are missing. Raises DoesNotFit if the disk is too small, before any."""
        walk: _Walk | None = None
        files = self.files

        def write(file: LayerFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
            nonlocal walk
            walk = walk or _Walk(Layers(self.work.manifest), self.batches, files, self.folder, self._nearest)
            return {"tallies": walk.corrected(file, shard, advance)}

        def finish() -> None:
            self.record.finished = True
            self.record.write(self.folder)

        shards.write_files(self.folder, files, self.record, write, finish, progress)
        for file in files:
            self._stored |= parts_in(self.folder / file.name)

    def round(self, weight: Tensor, codec: Codec, name: str) -> dict[str, Tensor]:
        """The corrected parts of a matrix (quantize/formats.py, Round); the nearest of one without any."""
        if not self._stored:
            self.run()
        stored = self._stored.get(name)
        if stored is None:
            return self._nearest(weight, codec, name)
        return {suffix: stored_tensor(info) for suffix, info in stored.items()}

    @property
    def tallies(self) -> dict[str, Tally]:
        """Group -> its matrices."""
        groups: dict[str, Tally] = {}
        for entry in self.record.shards.values():
            for group, more in entry["tallies"].items():
                groups.setdefault(group, Tally()).add(more)
        return groups


class _Walk:
    """The rows at one layer, and the way to the next."""

    def __init__(
        self,
        layers: Layers,
        batches: Sequence[Batch],
        files: Sequence[LayerFile],
        folder: Path,
        nearest: Round,
    ):
        self.layers, self.folder, self.nearest = layers, folder, nearest
        self.files = {file.index: file for file in files}
        self.last = max(self.files)
        self.at = 0
        self.states: list[State] = layers.begin(batches)

    @torch.no_grad()
    def corrected(
        self, file: LayerFile, shard: Shard, advance: Callable[[int], None]
    ) -> dict[str, dict[str, Any]]:
        """Write a layer's matrices, and move the rows behind it. -> group -> its tally."""
        while self.at < file.index:
            self._pass()
        tallies: dict[str, Tally] = {}

        def write(inputs: Inputs) -> None:
            for matrix, hessian, U_II in self._matrices(file, inputs):
                tally = tallies.setdefault(group_of(matrix.place.site), Tally())
                self._matrix(matrix, hessian, U_II, shard, tally)
                advance(parts_nbytes(matrix.parts.values()))

        if file.index == len(self.layers):
            inputs = Inputs({})
            for x_TD in self.layers.last(self.states):
                inputs.add(HEAD, x_TD)
            write(inputs)
        else:
            with self.layers.loaded(file.index) as layer:
                write(self._collected(file, layer))
                if file.index < self.last:
                    through(layer, self.states)
            self.at += 1
        return {group: vars(tally) for group, tally in tallies.items()}

    def _pass(self) -> None:
        """Move the rows through the next layer, with its finished weights if it has some."""
        file = self.files.get(self.at)
        with self.layers.loaded(self.at) as layer:
            if file is not None:
                stored = parts_in(self.folder / file.name)
                for matrix in file.matrices:
                    parts = {suffix: stored_tensor(info) for suffix, info in stored[matrix.name].items()}
                    place_of(self.layers.model, matrix).copy_(matrix.codec.dequantize(parts))
            through(layer, self.states)
        self.at += 1

    def _collected(self, file: LayerFile, layer: Layer) -> Inputs:
        """The inputs of the layer's modules, with its weights as they are."""
        sites = dict.fromkeys(matrix.place.site for matrix in file.matrices)
        with Inputs({site: self.layers.model.get_submodule(site) for site in sites}) as inputs:
            for state in self.states:
                layer(state.x_TD, state.run)
                inputs.next_batch()
        return inputs

    def _matrices(
        self, file: LayerFile, inputs: Inputs
    ) -> Iterator[tuple[Matrix, Hessian | None, Tensor | None]]:
        """Each matrix with H and U of its inputs; U is None for too few. Gate and up come before down."""
        factor: tuple[Hessian | None, Tensor | None] = None, None
        for matrix, hessian in self._with_inputs(file, inputs):
            if hessian is None:
                yield matrix, None, None
                continue
            if hessian is not factor[0]:
                known = hessian.rows >= enough(matrix.shape[1])
                factor = hessian, inverse_factor(hessian.matrix) if known else None
            yield matrix, hessian, factor[1]

    def _with_inputs(self, file: LayerFile, inputs: Inputs) -> Iterator[tuple[Matrix, Hessian | None]]:
        by_owner: dict[tuple[str, int], list[Matrix]] = {}
        for matrix in file.matrices:
            by_owner.setdefault((matrix.place.site, matrix.place.expert), []).append(matrix)
        for (site, expert), own in by_owner.items():
            owner = self.layers.model.get_submodule(site)
            if not isinstance(owner, Experts):
                for matrix in own:
                    yield matrix, inputs.linear(site)
                continue
            if not inputs.called(site):
                yield from ((matrix, None) for matrix in own)
                continue
            x_nD = inputs.expert(site, expert)
            for projection in (owner.first, "down_proj"):
                theirs = [matrix for matrix in own if matrix.place.projection == projection]
                if theirs:
                    read = x_nD if projection == owner.first else inner(owner, expert, x_nD)
                    hessian = Hessian(read.shape[1])
                    hessian.add(read)
                    yield from ((matrix, hessian) for matrix in theirs)

    def _matrix(
        self, matrix: Matrix, hessian: Hessian | None, U_II: Tensor | None, shard: Shard, tally: Tally
    ) -> None:
        """Round one matrix, write its parts, and put the rounded weight into the layer."""
        weight = place_of(self.layers.model, matrix)
        W_OI = weight.float().contiguous()
        parts = self.nearest(W_OI, matrix.codec, matrix.name)
        if hessian is not None and U_II is not None:
            result = correct(W_OI, hessian.matrix, U_II, matrix.codec, parts)
            if result is None:
                tally.other += 1
            else:
                parts = result.parts
                tally.corrected += result.kept
                tally.better += not result.kept
                tally.error += result.error
                tally.nearest += result.nearest
        elif hessian is None:
            tally.other += 1
        else:
            tally.few += 1
        for suffix, part in parts.items():
            shard.put(f"{matrix.name}.{suffix}", part)
        weight.copy_(matrix.codec.dequantize(parts))


def place_of(model: Decoder, matrix: Matrix) -> Tensor:
    """The matrix's weight in a model, a view [out, in]."""
    place, owner = matrix.place, model.get_submodule(matrix.place.site)
    if isinstance(owner, Linear):
        return owner.weight
    assert isinstance(owner, Experts)
    stack = owner.gate_up_proj if place.projection == owner.first else owner.down_proj
    whole = stack.weight[place.expert]
    return whole if place.half is None else owner.activation.split(whole, 0)[place.half]


@torch.no_grad()
def rounded_states(
    manifest: Manifest, matrices: Sequence[Matrix], batches: Sequence[Batch], nearest: Round
) -> Rounded:
    """The states that the head would read if `nearest` rounded every matrix; no file is written."""
    layers, by_layer = Layers(manifest), dict[int | None, list[Matrix]]()
    for matrix in matrices:
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


def parts_in(path: Path) -> dict[str, dict[str, TensorInfo]]:
    """Name of a matrix -> suffix -> its tensor in a layer's file."""
    faults = Faults(path.parent)
    stored: dict[str, dict[str, TensorInfo]] = {}
    for info in read_header(path, faults):
        name, _, suffix = info.name.rpartition(".")
        stored.setdefault(name, {})[suffix] = info
    faults.raise_if_any(next=f"remove {path.parent}, and give the same command again")
    return stored


def digest_of(batches: Sequence[Batch]) -> str:
    """BLAKE2b of all tokens and documents."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for tensor in (batch.tokens_T, batch.starts_S):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
