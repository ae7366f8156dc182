"""A matrix quantized column by column: the scales of a run of columns, and the nearest value at its scale.

    q[o] = level(w[o] / factor[o]) * factor[o]            one rounding, to the dtype that the file is read in

A run is the columns that share a scale in a row. Its scales are those that the format's own quantizer gives
to the run as it is when its first column is rounded, so the result is an ordinary file of the format. A
method that changes later columns after each rounded one works on this (compress/calibrate/gptq.py).

NVFP4's number for the matrix, and the offset and the second absmax of doubly quantized NF4, are those of the
matrix before any column changed. NF4's first absmax is rounded before its codes are chosen; bitsandbytes
chooses codes for the unrounded one.

Shapes: W [out, in]; a run [out, w]; a column [out]; G runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from unfreeze.quant.bitsandbytes import Bits4
from unfreeze.quant.codec import Codec
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.grids import DTYPES
from unfreeze.quant.int4 import GRID_MAX, Int4
from unfreeze.quant.integers import Integers
from unfreeze.quant.kept import ONTO
from unfreeze.quant.mxfp4 import E2M1, Mxfp4, powers_of_two, round_to_e2m1
from unfreeze.quant.nvfp4 import EMPTY, MAX_CODE, Nvfp4
from unfreeze.quant.scaled import MAX_E4M3, Scaled, to_e4m3

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Run(NamedTuple):
    """Scales of a run of columns: as the file stores them, and float32 [out] as a code is multiplied."""

    stored: Tensor
    factor_O: Tensor


@dataclass(frozen=True)
class Columns:
    """One matrix in a format whose scales are multiplied.

    width  columns of a run
    whole  parts that belong to the matrix, computed before any column changed
    """

    codec: Codec
    width: int
    whole: Mapping[str, Tensor]

    def fit(self, weight_Ow: Tensor, first: int) -> Run:
        """The scales of the run that begins at column `first`."""
        import torch

        stored = self.codec.quantize(weight_Ow.float())[self.codec.suffixes[1]]
        held = self.codec.scale_dtype if isinstance(self.codec, Scaled) else ""
        if held in DTYPES:  # codes are chosen for the scale as the file holds it
            stored = stored.to(getattr(torch, DTYPES[held]))
        return Run(stored, self.factor(stored, len(weight_Ow)))

    def factor(self, stored: Tensor, rows: int) -> Tensor:
        """float32 [out] of stored scales [out, 1]."""
        return stored.float().reshape(-1)

    def level(self, steps_O: Tensor) -> Tensor:
        """The nearest number that a code has."""
        raise NotImplementedError

    def read_in(self, run: Run) -> torch.dtype:
        """The dtype in which the weight is read."""
        return run.stored.dtype

    def nearest(self, weight_O: Tensor, run: Run) -> Tensor:
        """The column as the file will be read, in the dtype of `weight_O`."""
        factor_O = run.factor_O.to(weight_O.dtype)
        none_O = factor_O == 0
        levels_O = self.level(weight_O / factor_O.masked_fill(none_O, 1.0)).masked_fill(none_O, 0.0)
        return (levels_O.float() * run.factor_O).to(self.read_in(run)).to(weight_O.dtype)

    def parts(self, values_OI: Tensor, runs: Sequence[Run]) -> dict[str, Tensor]:
        """The parts of a matrix whose columns are `nearest` of these runs."""
        scale = side_by_side([run.stored for run in runs])
        known = {**self.whole, self.codec.suffixes[1]: scale}
        return ONTO[type(self.codec)](self.codec, values_OI.float(), known)[0]


def side_by_side(stored: Sequence[Tensor]) -> Tensor:
    """Scales of runs [out, 1] -> [out, G], of any dtype; those of a single run as they are."""
    import torch

    if len(stored) == 1:
        return stored[0]
    if stored[0].dtype.itemsize > 1:
        return torch.cat(list(stored), dim=-1)
    return torch.cat([one.view(torch.uint8) for one in stored], dim=-1).view(stored[0].dtype)


class _Int4(Columns):
    def level(self, steps_O: Tensor) -> Tensor:
        return steps_O.round().clamp(-GRID_MAX, GRID_MAX)


class _Integers(Columns):
    codec: Integers

    def factor(self, stored: Tensor, rows: int) -> Tensor:
        return stored.float().reshape(-1).expand(rows)

    def level(self, steps_O: Tensor) -> Tensor:
        half = 1 << (self.codec.bits - 1)
        return steps_O.round().clamp(-half, half - 1)


class _Fp8(Columns):
    codec: Fp8

    def factor(self, stored: Tensor, rows: int) -> Tensor:
        return stored.float().reshape(-1).repeat_interleave(self.codec.block[0])[:rows]

    def level(self, steps_O: Tensor) -> Tensor:
        return to_e4m3(steps_O.float()).to(steps_O.dtype)

    def read_in(self, run: Run) -> torch.dtype:
        import torch

        return torch.bfloat16 if run.stored.dtype == torch.float8_e8m0fnu else run.stored.dtype


class _Fp8Scaled(Columns):
    def factor(self, stored: Tensor, rows: int) -> Tensor:
        return stored.float().reshape(-1).expand(rows)

    def level(self, steps_O: Tensor) -> Tensor:
        return to_e4m3(steps_O.float()).to(steps_O.dtype)


class _Mxfp4(Columns):
    def factor(self, stored: Tensor, rows: int) -> Tensor:
        return powers_of_two(stored).float().reshape(-1)

    def level(self, steps_O: Tensor) -> Tensor:
        return e2m1(steps_O)

    def read_in(self, run: Run) -> torch.dtype:
        import torch

        return torch.bfloat16


class _Nvfp4(Columns):
    codec: Nvfp4

    def fit(self, weight_Ow: Tensor, first: int) -> Run:
        """As the codec's `quantize`, with the number of the matrix as it is."""
        import torch

        number = next(iter(self.whole.values())).reshape(1, 1)
        absmax_O1 = weight_Ow.float().abs().amax(-1, keepdim=True)
        if self.codec.names.divides:
            scales = (number * (absmax_O1 / MAX_CODE)).clamp(max=MAX_E4M3).to(torch.float8_e4m3fn).float()
            scales = torch.where(scales == 0, EMPTY, scales)
        else:
            scales = (absmax_O1 / (MAX_CODE * number)).nan_to_num(0.0)
            scales = torch.where(scales == 0, 1.0, scales).clamp(2.0**-9, MAX_E4M3)
        stored = scales.to(torch.float8_e4m3fn)
        return Run(stored, self.codec.effective(stored.float(), number).reshape(-1))

    def level(self, steps_O: Tensor) -> Tensor:
        return e2m1(steps_O)

    def read_in(self, run: Run) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.codec.names.divides else torch.float32


class _Bits4(Columns):
    codec: Bits4

    def fit(self, weight_Ow: Tensor, first: int) -> Run:
        import torch

        absmax_O = weight_Ow.float().abs().amax(1)
        if not self.codec.double:
            return Run(absmax_O.unsqueeze(1), absmax_O)
        _, absmax, _, nested, numbers2, text = self.codec.suffixes
        runs = len(self.whole[absmax]) // len(weight_Ow)
        block_O = torch.arange(len(weight_Ow)) * runs + first // self.width
        scale_O = self.whole[nested][block_O // self.codec.block2]
        offset, numbers = self.whole[text], self.whole[numbers2]
        codes_O = _nearest_code((absmax_O - offset) / scale_O.masked_fill(scale_O == 0, 1.0), numbers)
        return Run(codes_O.unsqueeze(1), numbers[codes_O.int()] * scale_O + offset)

    def level(self, steps_O: Tensor) -> Tensor:
        numbers = self.whole[self.codec.suffixes[2]]
        return numbers[_nearest_code(steps_O.float(), numbers).int()].to(steps_O.dtype)

    def read_in(self, run: Run) -> torch.dtype:
        import torch

        return getattr(torch, DTYPES[self.codec.dtype])

    def parts(self, values_OI: Tensor, runs: Sequence[Run]) -> dict[str, Tensor]:
        import torch

        factor_OI = torch.stack([run.factor_O for run in runs], 1).repeat_interleave(self.width, 1)
        steps = values_OI.float() / factor_OI.masked_fill(factor_OI == 0, 1.0)
        codes = _nearest_code(steps, self.whole[self.codec.suffixes[2]])
        packed = codes[:, 0::2] << 4 | codes[:, 1::2]
        absmax = side_by_side([run.stored for run in runs]).flatten()
        return {**self.whole, "weight": packed, self.codec.suffixes[1]: absmax}


def e2m1(steps: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, in the dtype of `steps`."""
    import torch

    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)], device=steps.device, dtype=steps.dtype)
    return numbers[round_to_e2m1(steps.float()).int()]


def _nearest_code(steps: Tensor, numbers: Tensor) -> Tensor:
    """uint8: the place in `numbers` of the nearest; as quant/nf4.py's in_blocks."""
    import torch

    ascending, order = numbers.sort(stable=True)
    return order[torch.bucketize(steps, (ascending[1:] + ascending[:-1]) / 2)].to(torch.uint8)


def columns_of(
    codec: Codec, weight_OI: Tensor, nearest: Mapping[str, Tensor] | None = None
) -> Columns | None:
    """The columns of a matrix in this format; None if its codes cannot be chosen column by column.

    That is so for zero points and act-order, and for NF4 if a row is no whole number of blocks. nearest: the
    matrix's parts rounded to the nearest, from which NVFP4 takes its number.
    """
    columns = weight_OI.shape[1]
    if isinstance(codec, Int4):
        return _Int4(codec, codec.group_size, {})
    if isinstance(codec, Integers) and not (codec.zeros or codec.permuted):
        return _Integers(codec, codec.group if codec.group > 0 else columns, {})
    if isinstance(codec, Fp8):
        return _Fp8(codec, codec.block[1], {})
    if isinstance(codec, Fp8Scaled):
        return _Fp8Scaled(codec, columns, {})
    if isinstance(codec, Mxfp4):
        return _Mxfp4(codec, codec.group, {})
    if isinstance(codec, Nvfp4):
        number = codec.suffixes[2]
        return _Nvfp4(codec, codec.group, {number: (nearest or codec.quantize(weight_OI.float()))[number]})
    if isinstance(codec, Bits4) and columns % codec.block == 0:
        return _Bits4(codec, codec.block, codec.quantize(weight_OI.float()))
    return None
