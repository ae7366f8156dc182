"""Matrices that are quantized, by layer: their places, the files that hold them meanwhile, their tallies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from torch import Tensor

from unfreeze.checkpoint.faults import Faults
from unfreeze.checkpoint.manifest import TensorInfo, read_header
from unfreeze.checkpoint.nested import in_model
from unfreeze.compress.deltas import MatrixPlace
from unfreeze.compress.work import MergeWork
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import Decoder
from unfreeze.quant.codec import Codec, Part
from unfreeze.quant.spelling import canonical

HEAD, COLUMNS, ROWS = "lm_head", "columns", "rows"
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

    @property
    def scales(self) -> dict[str, Part]:
        """Tensors of its scales there: COLUMNS of its input channels, ROWS of its outputs."""
        rows, columns = self.shape
        return {f"{self.name}.{COLUMNS}": ("F32", (columns,)), f"{self.name}.{ROWS}": ("F32", (rows,))}


@dataclass(frozen=True)
class LayerFile:
    """The corrected matrices of one layer, in one file. index: of the head the number of layers.

    scaled: the file has the scales of every matrix too.
    """

    index: int
    matrices: list[Matrix]
    scaled: bool = False

    @property
    def name(self) -> str:
        return f"layer-{self.index:05d}.safetensors"

    @property
    def parts(self) -> Mapping[str, Part]:
        parts = {name: part for matrix in self.matrices for name, part in matrix.parts.items()}
        if self.scaled:
            parts |= {name: part for matrix in self.matrices for name, part in matrix.scales.items()}
        return parts


@dataclass
class Tally:
    """Matrices of one group in a layer, by how they were rounded.

    corrected  by GPTQ, or with AWQ alone by scales
    better     to the nearest, which had the smaller error on the calibration rows
    few        to the nearest: too few tokens for its input columns
    other      to the nearest: an input that is not seen, a format whose codes need the whole matrix, or with
               AWQ alone nothing in front that takes the scales
    error      Σ of the corrected ones' errors on the calibration rows; nearest: had they been rounded
    scaled     with AWQ: matrices that have scales, of all
    """

    corrected: int = 0
    better: int = 0
    few: int = 0
    other: int = 0
    error: float = 0.0
    nearest: float = 0.0
    scaled: int = 0

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


def place_of(model: Decoder, matrix: Matrix) -> Tensor:
    """The matrix's weight in a model, a view [out, in]."""
    place, owner = matrix.place, model.get_submodule(matrix.place.site)
    if isinstance(owner, Linear):
        return owner.weight
    assert isinstance(owner, Experts)
    stack = owner.gate_up_proj if place.projection == owner.first else owner.down_proj
    whole = stack.weight[place.expert]
    return whole if place.half is None else owner.activation.split(whole, 0)[place.half]


def parts_in(path: Path) -> dict[str, dict[str, TensorInfo]]:
    """Name of a matrix -> suffix -> its tensor in a layer's file."""
    faults = Faults(path.parent)
    stored: dict[str, dict[str, TensorInfo]] = {}
    for info in read_header(path, faults):
        name, _, suffix = info.name.rpartition(".")
        stored.setdefault(name, {})[suffix] = info
    faults.raise_if_any(next=f"remove {path.parent}, and give the same command again")
    return stored
