"""The rows at one layer, and the way to the next.

A layer's inputs are collected, its scales are searched (awq.py), its matrices rounded, and then the rows go
through it as it will be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unfreeze.checkpoint.manifest import TensorInfo
from unfreeze.checkpoint.shard import Shard
from unfreeze.checkpoint.tensors import TORCH_DTYPE, stored_tensor
from unfreeze.compress.calibrate.awq import Scaling, Search
from unfreeze.compress.calibrate.folds import Kind, changed, padded
from unfreeze.compress.calibrate.gptq import Hessian, correct, inverse_factor
from unfreeze.compress.calibrate.inputs import Inputs, inner
from unfreeze.compress.calibrate.layers import Layers, State, through
from unfreeze.compress.calibrate.matrices import (
    COLUMNS,
    HEAD,
    ROWS,
    LayerFile,
    Matrix,
    Tally,
    enough,
    parts_in,
    place_of,
)
from unfreeze.compress.quantize.formats import Round
from unfreeze.core.batch import Batch
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.groups import group_of
from unfreeze.models.layer import Layer
from unfreeze.quant.codec import parts_nbytes

Method = Literal["gptq", "awq", "awq-gptq"]
"""gptq: what rounding loses is corrected; awq: scales before rounding to the nearest; awq-gptq: both."""


class Walk:
    """The rows of a calibration on their way through a checkpoint.

    stored: the tensor on disk that holds a parameter, and nothing else; None if none does.
    entries: what the record has of each finished layer.
    """

    def __init__(
        self,
        layers: Layers,
        batches: Sequence[Batch],
        files: Sequence[LayerFile],
        folder: Path,
        method: Method,
        nearest: Round,
        stored: Callable[[str], TensorInfo | None],
        entries: Callable[[str], Mapping[str, Any]],
    ):
        self.layers, self.folder, self.method, self.nearest = layers, folder, method, nearest
        self.stored, self.entries = stored, entries
        self.files = {file.index: file for file in files}
        self.last = max(self.files)
        self.at = 0
        self.states: list[State] = layers.begin(batches)

    @torch.no_grad()
    def corrected(self, file: LayerFile, shard: Shard, advance: Callable[[int], None]) -> dict[str, Any]:
        """Write a layer's matrices, and move the rows behind it. -> what the record has of it.

        tallies: group -> its tally. left: leaf -> matrices that nothing in front takes the scales of.
        others: as in Scaling.
        """
        while self.at < file.index:
            self._pass()
        if file.index == len(self.layers):
            inputs = Inputs({})
            for x_TD in self.layers.last(self.states):
                inputs.add(HEAD, x_TD)
            return self._written(file, inputs, Scaling(), shard, advance)
        with self.layers.loaded(file.index) as layer:
            inputs, scaling = self._collected(file, layer), Scaling()
            if self.method != "gptq":
                search = Search(self.layers.model, file, inputs, self.stored)
                scaling = search.run(layer, f"model.layers.{file.index}", self.states[0])
                self._divide(file, inputs, scaling)
                for name, (kind, matrix) in scaling.others.items():
                    self._change(name, kind, scaling.columns[matrix])
            entry = self._written(file, inputs, scaling, shard, advance)
            if file.index < self.last:
                through(layer, self.states)
        self.at += 1
        return entry

    def _written(
        self, file: LayerFile, inputs: Inputs, scaling: Scaling, shard: Shard, advance: Callable[[int], None]
    ) -> dict[str, Any]:
        """Round and write the matrices of a layer."""
        tallies: dict[str, Tally] = {}
        left: dict[str, int] = {}
        for matrix, hessian, U_II in self._matrices(file, inputs, scaling):
            tally = tallies.setdefault(group_of(matrix.place.site), Tally())
            self._matrix(matrix, hessian, U_II, scaling, shard, tally)
            advance(parts_nbytes(matrix.parts.values()))
            if self.method != "gptq" and matrix.name not in scaling.errors.keys() | scaling.few:
                leaf = leaf_of(matrix)
                left[leaf] = left.get(leaf, 0) + 1
        entry: dict[str, Any] = {"tallies": {group: vars(tally) for group, tally in tallies.items()}}
        return entry if self.method == "gptq" else entry | {"left": left, "others": scaling.others}

    def _pass(self) -> None:
        """Move the rows through the next layer, with its finished weights if it has some."""
        file = self.files.get(self.at)
        with self.layers.loaded(self.at) as layer:
            if file is not None:
                stored = parts_in(self.folder / file.name)
                for matrix in file.matrices:
                    parts = {
                        suffix: stored_tensor(stored[matrix.name][suffix]) for suffix in suffixes(matrix)
                    }
                    place_of(self.layers.model, matrix).copy_(matrix.codec.dequantize(parts))
                for name, (kind, matrix) in self.entries(file.name).get("others", {}).items():
                    self._change(name, kind, stored_tensor(stored[matrix][COLUMNS]))
            through(layer, self.states)
        self.at += 1

    def _change(self, name: str, kind: Kind, s_I: Tensor) -> None:
        """Put a parameter that is not quantized into the layer as it will be written."""
        parameter, info = self.layers.model.get_parameter(name), self.stored(name)
        assert info is not None
        parameter.copy_(carried(parameter.detach().to(TORCH_DTYPE[info.dtype]), kind, s_I))

    def _collected(self, file: LayerFile, layer: Layer) -> Inputs:
        """The inputs of the layer's modules, with its weights as they are."""
        sites = dict.fromkeys(matrix.place.site for matrix in file.matrices)
        with Inputs({site: self.layers.model.get_submodule(site) for site in sites}) as inputs:
            for state in self.states:
                layer(state.x_TD, state.run)
                inputs.next_batch()
        return inputs

    def _divide(self, file: LayerFile, inputs: Inputs, scaling: Scaling) -> None:
        """Divide the inputs of linear layers by their scales."""
        for matrix in file.matrices:
            if matrix.name in scaling.columns:
                inputs.divide(matrix.place.site, scaling.columns[matrix.name])

    def _matrices(
        self, file: LayerFile, inputs: Inputs, scaling: Scaling
    ) -> Iterator[tuple[Matrix, Hessian | None, Tensor | None]]:
        """Each matrix with H and U of its inputs; U is None for too few. Gate and up come before down."""
        if self.method == "awq":
            yield from ((matrix, None, None) for matrix in file.matrices)
            return
        factor: tuple[Hessian | None, Tensor | None] = None, None
        for matrix, hessian in self._with_inputs(file, inputs, scaling):
            if hessian is None:
                yield matrix, None, None
                continue
            if hessian is not factor[0]:
                known = hessian.rows >= enough(matrix.shape[1])
                factor = hessian, inverse_factor(hessian.matrix) if known else None
            yield matrix, hessian, factor[1]

    def _with_inputs(
        self, file: LayerFile, inputs: Inputs, scaling: Scaling
    ) -> Iterator[tuple[Matrix, Hessian | None]]:
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
                if not theirs:
                    continue
                if projection == owner.first and theirs[0].name in scaling.columns:
                    x_nD = x_nD / scaling.columns[theirs[0].name]
                read = x_nD if projection == owner.first else inner(owner, expert, x_nD)
                hessian = Hessian(read.shape[1])
                hessian.add(read)
                yield from ((matrix, hessian) for matrix in theirs)

    def _matrix(
        self,
        matrix: Matrix,
        hessian: Hessian | None,
        U_II: Tensor | None,
        scaling: Scaling,
        shard: Shard,
        tally: Tally,
    ) -> None:
        """Round one matrix, write its parts, and put the rounded weight into the layer."""
        weight, name = place_of(self.layers.model, matrix), matrix.name
        W_OI = scaling.scaled(weight.float(), name).contiguous()
        parts = self.nearest(W_OI, matrix.codec, name)
        scaled = not scaling.is_one(name)
        tally.scaled += scaled
        if self.method == "awq":
            if errors := scaling.errors.get(name):
                tally.corrected += scaled
                tally.better += not scaled
                tally.error += errors[0]
                tally.nearest += errors[1]
            else:
                tally.few += name in scaling.few
                tally.other += name not in scaling.few
        elif hessian is not None and U_II is not None:
            result = correct(W_OI, hessian.matrix, U_II, matrix.codec, parts)
            if result is None:
                tally.other += 1
            else:
                parts = result.parts
                tally.corrected += result.kept
                tally.better += not result.kept
                tally.error += result.error
                tally.nearest += scaling.errors.get(name, (0.0, result.nearest))[1]
        elif hessian is None:
            tally.other += 1
        else:
            tally.few += 1
        for suffix, part in parts.items():
            shard.put(f"{name}.{suffix}", part)
        if self.method != "gptq":
            rows, columns = W_OI.shape
            shard.put(f"{name}.{COLUMNS}", scaling.columns.get(name, torch.ones(columns)))
            shard.put(f"{name}.{ROWS}", scaling.rows.get(name, torch.ones(rows)))
        weight.copy_(matrix.codec.dequantize(parts))


def carried(tensor: Tensor, kind: Kind, s_I: Tensor) -> Tensor:
    """A parameter that is not quantized, in its dtype on disk, with the scales of what reads it."""
    s = padded(s_I, len(tensor)) if kind in ("rows", "bias") else s_I
    return changed(tensor, kind, s)


def suffixes(matrix: Matrix) -> list[str]:
    """Names of a matrix's parts in the layer's file, without its scales."""
    return list(matrix.codec.parts(*matrix.shape))


def leaf_of(matrix: Matrix) -> str:
    """The name of a matrix without its block: "o_proj", "experts.down_proj"."""
    leaf = matrix.place.site.rpartition(".")[2]
    return ".".join(filter(None, (leaf, matrix.place.projection)))
