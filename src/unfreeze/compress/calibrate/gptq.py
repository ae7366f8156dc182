"""GPTQ: what a rounded column loses is made up by the columns that are not rounded yet.

The layer's error on its calibration inputs X [n, in] is the sum over rows w of W of

    e(w) = ‖X (w − q)‖² / n · 2 = (w − q) H (w − q)ᵀ,      H = 2/n Σ x xᵀ

Columns are rounded from left to right. After column j the best change of the later ones is

    w[k] −= (w[j] − q[j]) / U[j, j] · U[j, k],  k > j,      H⁻¹ = Uᵀ U, U upper triangular

H is damped: λ = `damping` times the mean of its diagonal is added to it. A column whose input was always zero
then neither gives nor takes. Later blocks of columns get a block's changes in one product.

Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1. Scales come from the corrected weights, at the
first column of each run (quant/columns.py).

Shapes: W [O, I] = [out, in], H and U [I, I], X [n, I].
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from unfreeze.core.errors import CheckpointError
from unfreeze.quant.codec import Codec
from unfreeze.quant.columns import Columns, Run, columns_of

DAMPING = 0.01
"""Share of the mean of H's diagonal, as in the paper's code."""
BLOCK = 128  # columns whose changes reach later blocks in one product


class Hessian:
    """H = 2/n Σ x xᵀ and the mean of |x| of one input, summed in float32 batch by batch."""

    def __init__(self, width: int):
        self.sum_II, self.sizes_I = torch.zeros(width, width), torch.zeros(width)
        self.rows = 0

    def add(self, x_nI: Tensor) -> None:
        """Add n inputs."""
        x_nI = x_nI.detach().reshape(-1, x_nI.shape[-1]).float()
        self.sum_II.addmm_(x_nI.t(), x_nI)
        self.sizes_I += x_nI.abs().sum(0)
        self.rows += len(x_nI)

    def divide(self, s_I: Tensor) -> None:
        """Become that of the inputs x / s."""
        self.sum_II.div_(s_I).div_(s_I[:, None])
        self.sizes_I.div_(s_I)

    @property
    def mean(self) -> Tensor:
        """Mean of |x|, [I]."""
        return self.sizes_I / max(1, self.rows)

    @property
    def matrix(self) -> Tensor:
        """H [I, I]; zeros without an input."""
        return self.sum_II * (2 / max(1, self.rows))


@dataclass(frozen=True)
class Corrected:
    """A matrix in its format.

    parts  suffix -> part, as codec.quantize returns them
    error  Σ e(w) on the calibration inputs; nearest: that of rounding each weight to the nearest
    kept   True if the correction was written, False if rounding to the nearest had the smaller error
    """

    parts: dict[str, Tensor]
    error: float
    nearest: float
    kept: bool = True


def inverse_factor(hessian_II: Tensor, damping: float = DAMPING) -> Tensor:
    """U float64 with (H + λ I)⁻¹ = Uᵀ U.

    The Cholesky factor of H from its last column, H + λ I = R Rᵀ with R upper triangular, has U = R⁻¹: H⁻¹ is
    never computed. Raises CheckpointError for a Hessian that is not finite.
    """
    H_II = hessian_II.double()
    if not bool(H_II.isfinite().all()):
        raise CheckpointError(
            "calibration inputs of a layer are NaN or infinite",
            next="leave --calibrate out, or check the rows",
        )
    mean = float(H_II.diagonal().mean())
    identity = torch.eye(len(H_II), dtype=torch.float64, device=H_II.device)
    if mean == 0:
        return identity
    # rounding of the sums may leave a small negative eigenvalue: then the damping grows
    for more in (1, 10, 100, 1000):
        damped = H_II + damping * more * mean * identity
        factor, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not int(failed):
            return torch.linalg.solve_triangular(factor.flip(0, 1), identity, upper=True)
    raise CheckpointError(
        "a layer's calibration inputs have no inverse", next="give more rows with --calibrate"
    )


def rounded_in_order(weight_OI: Tensor, U_II: Tensor, columns: Columns) -> tuple[Tensor, list[Run]]:
    """(Q [O, I], the scales of its runs), in the dtype of W."""
    # columns are rows in memory: a column is read in one piece
    W, U = weight_OI.t().contiguous(), U_II.to(weight_OI.dtype)
    values, runs = torch.empty_like(W), list[Run]()
    width, count = columns.width, len(W)
    # a run begins where all earlier columns have reached it: at the start of a block, or inside one
    block = width * max(1, BLOCK // width) if width <= BLOCK else gcd(width, BLOCK)
    block = BLOCK if width >= count else block
    for begin in range(0, count, block):
        end = min(begin + block, count)
        lost = torch.empty_like(W[begin:end])
        for j in range(begin, end):
            if j % width == 0:
                runs.append(columns.fit(W[j : j + width].t().contiguous(), j))
            values[j] = columns.nearest(W[j], runs[-1])
            torch.div(W[j] - values[j], U[j, j], out=lost[j - begin])
            W[j + 1 : end].addr_(U[j, j + 1 : end], lost[j - begin], alpha=-1)
        W[end:].addmm_(U[begin:end, end:].t(), lost, alpha=-1)
    return values.t().contiguous(), runs


def correct(
    weight_OI: Tensor, hessian_II: Tensor, U_II: Tensor, codec: Codec, nearest: dict[str, Tensor]
) -> Corrected | None:
    """W float32 in the format of `codec`, corrected on the inputs of H; U: inverse_factor(H).

    nearest: its parts rounded to the nearest, which are the result if their error on these inputs is smaller.
    None if the format's codes cannot be chosen column by column.
    """
    columns = columns_of(codec, weight_OI, nearest)
    if columns is None:
        return None
    parts = columns.parts(*rounded_in_order(weight_OI, U_II, columns))
    errors = [output_error(weight_OI - codec.dequantize(one).float(), hessian_II) for one in (parts, nearest)]
    kept = errors[0] <= errors[1]
    return Corrected(parts if kept else nearest, min(errors), errors[1], kept)


def output_error(change_OI: Tensor, hessian_II: Tensor) -> float:
    """Σ over rows of d H dᵀ."""
    return float(((change_OI @ hessian_II.to(change_OI.dtype)) * change_OI).sum(dtype=torch.float64))
