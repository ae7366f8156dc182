"""AWQ: an input channel that is large is multiplied up before rounding, and divided down in front.

    s = m^α      or      s = m^α / v^(1 − α),        then s / √(max s · min s)

m [I] is the mean of |x| over the calibration inputs, v [I] the mean of |w| over the rows of all matrices that
read them. Of both forms α is searched on a grid, for the smallest error on these inputs, summed over the
matrices:

    e(s) = Σ over rows of d H dᵀ,     d = Q(W diag(s)) diag(s)⁻¹ − W,     H = 2/n Σ x xᵀ

s = 1, rounding to the nearest, is among the choices. The scales go into what is in front (folds.py), whose
function does not change. Its own dtype rounds it: s is then what the rounded weight gives. Where a weight
that is not quantized takes part, such as a router, s are powers of two, which change no digit of it.

Source: Lin et al. 2023, arXiv:2306.00978, equations 4 and 5; the second form is that of its published code.

Shapes: W [O, I] = [out, in], H [I, I], x [n, I].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil

import torch
from torch import Tensor

from unfreeze.checkpoint.manifest import TensorInfo
from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.compress.calibrate.folds import Fold, Kind, changed, folds_of, parameters_of, width_of
from unfreeze.compress.calibrate.gptq import Hessian, output_error
from unfreeze.compress.calibrate.inputs import Inputs, inner
from unfreeze.compress.calibrate.layers import State
from unfreeze.compress.calibrate.matrices import LayerFile, Matrix, place_of
from unfreeze.compress.quantize.formats import nearest
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.decoder import Decoder
from unfreeze.models.layer import Layer
from unfreeze.quant.codec import Codec

GRID = 20  # values of α of each form, as in the paper's code
SMALLEST = 1e-4  # of a channel's scale before they are normalised
FEWEST = 0.25
"""Tokens that a search needs for each input column; with fewer the scales stay 1."""


def scales(mean_I: Tensor, weight_I: Tensor, alpha: float, by_weight: bool) -> Tensor:
    """s float32 [I] of one α. mean_I: m; weight_I: v."""
    s = mean_I.double() ** alpha
    if by_weight:
        s = s / (weight_I.double() ** (1 - alpha)).clamp_min(SMALLEST)
    s = s.clamp_min(SMALLEST)
    return (s / (s.max() * s.min()).sqrt()).float()


def grid(mean_I: Tensor, weight_I: Tensor) -> Iterator[Tensor]:
    """The choices; the first is 1."""
    yield torch.ones(len(mean_I))
    for step in range(1, GRID + 1):
        yield scales(mean_I, weight_I, step / GRID, False)
    for step in range(GRID):
        yield scales(mean_I, weight_I, step / GRID, True)


def errors_of(
    weight_OI: Tensor, hessian_II: Tensor, codec: Codec, name: str, choices: Iterable[Tensor]
) -> list[float]:
    """e(s) of one matrix for each s."""
    return [
        output_error(
            weight_OI - codec.dequantize(nearest(weight_OI * s, codec, name)).float() / s, hessian_II
        )
        for s in choices
    ]


@dataclass
class Scaling:
    """The scales of a layer's matrices, by their names.

    columns  multiply a matrix's input channels; rows divide its outputs
    errors   (e(s), e(1)) of every matrix that was searched for
    few      matrices whose inputs were fewer than FEWEST
    others   parameter that is not quantized -> (the way it changes, the matrix whose columns are its scales)
    """

    columns: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    rows: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    errors: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    few: set[str] = field(default_factory=set[str])
    others: dict[str, tuple[Kind, str]] = field(default_factory=dict[str, tuple[Kind, str]])

    def scaled(self, weight_OI: Tensor, name: str) -> Tensor:
        """The matrix with its scales, float32."""
        if name in self.columns:
            weight_OI = changed(weight_OI, "columns", self.columns[name])
        return changed(weight_OI, "rows", self.rows[name]) if name in self.rows else weight_OI

    def is_one(self, name: str) -> bool:
        """True if a matrix's input channels stay as they are."""
        return name not in self.columns or bool((self.columns[name] == 1).all())


@dataclass
class Search:
    """The search in one loaded layer: its matrices, their inputs, and the base's tensors by parameter.

    stored: the tensor on disk that holds a parameter, and nothing else; None if none does.
    """

    model: Decoder
    file: LayerFile
    inputs: Inputs
    stored: Callable[[str], TensorInfo | None]
    result: Scaling = field(default_factory=Scaling)

    def __post_init__(self) -> None:
        self._of: dict[str, list[Matrix]] = {}
        for matrix in self.file.matrices:
            self._of.setdefault(parameter_of(matrix), []).append(matrix)

    def run(self, layer: Layer, name: str, state: State) -> Scaling:
        """Search the scales of every fold of the layer, which is called `name`."""
        for fold in folds_of(layer, name, state):
            self._inside(fold) if fold.inner else self._between(fold)
        return self.result

    def _between(self, fold: Fold) -> None:
        """The scales between a norm or a linear layer and what reads it."""
        width = width_of(self.model.get_submodule(fold.readers[0]))
        changes: list[tuple[str, Kind]] = [
            (name, kind) for name, kind, _ in parameters_of(self.model, fold, torch.ones(width))
        ]
        own = [matrix for name, kind in changes if kind == "columns" for matrix in self._of.get(name, ())]
        kept = [change for change in changes if change[0] not in self._of]
        if not own or not all(self._holds(name) for name, _ in kept):
            return
        own.sort(key=lambda matrix: matrix.place.expert)  # gate and up of an expert have one H
        gain = next((change for change in kept if change[1].startswith("gain")), None)
        exact = any(not kind.startswith("gain") for _, kind in kept)
        if exact and gain is not None and gain[1] == "gain + 1":  # its rounding would reach the others
            return
        mean_I, tokens = self._mean(own)
        if tokens < enough(width):
            self.result.few |= {matrix.name for matrix in own}
            return
        choices = [self._usable(s, gain, exact) for s in grid(mean_I, self._mean_weight(own))]
        by_matrix = {
            matrix.name: errors_of(W_OI, H_II, matrix.codec, matrix.name, choices)
            for matrix, W_OI, H_II in self._with_inputs(own)
        }
        sums = [sum(errors) for errors in zip(*by_matrix.values(), strict=True)]
        best = sums.index(min(sums))
        for name, errors in by_matrix.items():
            self.result.errors[name] = errors[best], errors[0]
        if best:
            self._take(fold, choices[best], own[0].name)

    def _inside(self, fold: Fold) -> None:
        """The scales between up and down of each expert."""
        owner = self.model.get_submodule(fold.producer)
        down = self._of.get(f"{fold.producer}.down_proj.weight", [])
        assert isinstance(owner, Experts)
        if not down or f"{fold.producer}.{owner.first}.weight" not in self._of:
            return
        if not self.inputs.called(fold.producer):
            return
        s_EI = torch.ones(owner.num_experts, owner.intermediate_size)
        for matrix in down:
            expert = matrix.place.expert
            x_nD = self.inputs.expert(fold.producer, expert)
            if len(x_nD) < enough(owner.intermediate_size):
                self.result.few.add(matrix.name)
                continue
            h_nI = inner(owner, expert, x_nD)
            hessian, W_OI = Hessian(h_nI.shape[1]), place_of(self.model, matrix).float()
            hessian.add(h_nI)
            choices = list(grid(hessian.mean, W_OI.abs().mean(0)))
            errors = errors_of(W_OI, hessian.matrix, matrix.codec, matrix.name, choices)
            best = errors.index(min(errors))
            s_EI[expert] = choices[best]
            self.result.errors[matrix.name] = errors[best], errors[0]
        self._take(fold, s_EI, down[0].name)

    def _holds(self, name: str) -> bool:
        """True if a parameter that is not quantized has a tensor of its own; no stack of experts."""
        return self.stored(name) is not None and self.model.get_parameter(name).dim() < 3

    def _usable(self, s: Tensor, gain: tuple[str, Kind] | None, exact: bool) -> Tensor:
        """s as the rounded weights in front give it: powers of two if `exact`."""
        if exact:
            s = s.log2().round().exp2()
        if gain is None:
            return s
        name, kind = gain
        info = self.stored(name)
        assert info is not None
        before = self.model.get_parameter(name).detach().to(TORCH_DTYPE[info.dtype])
        after = changed(before, kind, s).float() + (kind == "gain + 1")
        applied = (before.float() + (kind == "gain + 1")) / after
        whole = applied.isfinite() & (applied > 0)
        if exact:
            whole &= applied == s
        return torch.where(whole, applied, 1.0)

    def _mean(self, own: list[Matrix]) -> tuple[Tensor, int]:
        """(m, number of tokens) of the tensor that these matrices read."""
        for matrix in own:
            hessian = self.inputs.linear(matrix.place.site)
            if hessian is not None:
                return hessian.mean, hessian.rows
        site = own[0].place.site
        if not self.inputs.called(site):
            return torch.ones(own[0].shape[1]), 0
        return self.inputs.mean(site)

    def _mean_weight(self, own: list[Matrix]) -> Tensor:
        """v over the rows of all these matrices."""
        sums = [place_of(self.model, matrix).float().abs().sum(0) for matrix in own]
        return torch.stack(sums).sum(0) / sum(matrix.shape[0] for matrix in own)

    def _with_inputs(self, own: list[Matrix]) -> Iterator[tuple[Matrix, Tensor, Tensor]]:
        """(matrix, W float32, H) of each; an expert's H is in memory while its matrices come."""
        last: tuple[object, Tensor] = None, torch.empty(0)
        for matrix in own:
            site, expert = matrix.place.site, matrix.place.expert
            hessian = self.inputs.linear(site)
            key = (site, expert) if hessian is None else id(hessian)
            if key != last[0]:
                if hessian is None:
                    hessian = Hessian(matrix.shape[1])
                    hessian.add(self.inputs.expert(site, expert))
                last = key, hessian.matrix
            yield matrix, place_of(self.model, matrix).float(), last[1]

    def _take(self, fold: Fold, s: Tensor, reference: str) -> None:
        """Note the scales of every matrix of a fold, and the other parameters that change with it."""
        for name, kind, own in parameters_of(self.model, fold, s):
            for matrix in self._of.get(name, ()):
                place, owner = matrix.place, self.model.get_submodule(matrix.place.site)
                of_matrix = own[place.expert] if own.dim() == 2 else own
                if kind == "columns":
                    self.result.columns[matrix.name] = of_matrix
                    continue
                if place.half is not None:
                    assert isinstance(owner, Experts)
                    of_matrix = owner.activation.split(of_matrix)[place.half]
                self.result.rows[matrix.name] = of_matrix
            if name not in self._of:
                self.result.others[name] = kind, reference


def enough(width: int) -> int:
    """Tokens that a search over `width` channels needs."""
    return ceil(FEWEST * width)


def parameter_of(matrix: Matrix) -> str:
    """The parameter of the model that holds a matrix."""
    return ".".join(filter(None, (matrix.place.site, matrix.place.projection, "weight")))
