"""Measures of held-out rows, kept per row, so that two validations are compared on the same rows.

A measure is a mean: the loss is nats over supervised tokens (or pairs), accuracy is hits over pairs. For row
r, s_r is the summed value and n_r its divisor. Compared to an earlier validation of the same rows

change          d = Σ (s_r - s'_r) / Σ n_r
standard error  sqrt(R / (R - 1) · Σ ((s_r - s'_r) - d n_r)²) / Σ n_r        R: rows with n_r > 0

This is the ratio estimator's (Cochran, Sampling Techniques, 3rd ed., 6.13): for equal n_r, that of a mean of
R paired differences. The difficulty of rows cancels out.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.parallel.processes.collectives import Group

Sums = dict[str, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class ByRow:
    """Measure -> (s, n) of each of R rows; in float32, as saved, so that a resumed run gives the same."""

    sums: Mapping[str, tuple[np.ndarray, np.ndarray]]

    @property
    def rows(self) -> int:
        """Number of rows R."""
        return int(max((np.count_nonzero(count_R) for _, count_R in self.sums.values()), default=0))

    def mean(self, name: str) -> float | None:
        """Return Σ s_r / Σ n_r; None if nothing was counted."""
        sum_R, count_R = (each.astype(np.float64) for each in self.sums[name])
        return float(sum_R.sum() / count_R.sum()) if count_R.any() else None

    def same_rows(self, earlier: ByRow) -> bool:
        """Return True if the measures that both have cover equally many rows with the same divisors."""
        both = self.sums.keys() & earlier.sums.keys()
        return all(np.array_equal(self.sums[name][1], earlier.sums[name][1]) for name in both)

    def change(self, earlier: ByRow, name: str) -> tuple[float, float | None] | None:
        """Return (change, its standard error: None for a single row) since an earlier validation.

        None if that was of other rows, or if a number is not finite.
        """
        if name not in earlier.sums or name not in self.sums:
            return None
        (now_R, count_R), (then_R, before_R) = (each.sums[name] for each in (self, earlier))
        if len(now_R) != len(then_R) or not np.array_equal(count_R, before_R) or not count_R.any():
            return None
        held = count_R > 0
        difference = now_R[held].astype(np.float64) - then_R[held].astype(np.float64)
        count = count_R[held].astype(np.float64)
        change = float(difference.sum() / count.sum())
        if not math.isfinite(change):
            return None
        if len(count) < 2:
            return change, None
        spread = float(np.square(difference - change * count).sum()) * len(count) / (len(count) - 1)
        return change, math.sqrt(spread) / float(count.sum())

    def record(self) -> dict[str, list[str]]:
        """Return measure -> s and n as base64 of float32."""
        return {name: [_text(each) for each in pair] for name, pair in self.sums.items()}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ByRow:
        """Restore the result of `record`."""
        return cls({name: (_array(first), _array(second)) for name, (first, second) in record.items()})


class RowSums:
    """Adds up batches per row; `gathered` combines all processes of a group.

    largest: measures for which a row has the largest value instead of the sum, with divisor 1.
    """

    def __init__(self, largest: Collection[str] = ()) -> None:
        self._found: Sums = {}
        self._largest = largest

    def add(self, row_E: Tensor, name: str, value_E: Tensor, count_E: Tensor) -> None:
        """Add E examples: the row of each, its value and its divisor; row -1 is not counted."""
        rows, known = row_E.numpy(), row_E.numpy() >= 0
        size = int(rows.max(initial=-1)) + 1
        largest = name in self._largest
        gather, nothing = (np.maximum, -np.inf) if largest else (np.add, 0.0)
        value_R, count_R = self._found.get(name, (np.zeros(0), np.zeros(0)))
        more = (0, max(0, size - len(value_R)))
        value_R = np.pad(value_R, more, constant_values=nothing)
        count_R = np.pad(count_R, more)
        for whole_R, each_E in ((value_R, value_E), (count_R, count_E)):
            gather.at(whole_R, rows[known], each_E.detach().double().cpu().numpy()[known])
        self._found[name] = (value_R, count_R)

    def gathered(self, group: Group, device: torch.device) -> ByRow | None:
        """Return all rows, the same on every process; None if batches do not contain row numbers."""
        if group.size > 1:
            # a process without a batch of its own knows neither the measures nor the number of rows
            sizes = [text.split() for text in group.texts(" ".join([*self._found, str(self._longest())]))]
            size = max(int(each[-1]) for each in sizes)
            names = sorted({name for each in sizes for name in each[:-1]})
            self._found = {name: self._of_all(name, size, group, device) for name in names}
        sums: Sums = {}
        for name, (value_R, count_R) in self._found.items():
            counted_R = np.where(count_R > 0, value_R, 0.0)
            sums[name] = (counted_R.astype(np.float32), count_R.astype(np.float32))
        return ByRow(sums) if self._longest() else None

    def _of_all(
        self, name: str, size: int, group: Group, device: torch.device
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return sums and divisors [R] over all processes; a row gets the sum or the largest."""
        largest = name in self._largest
        parts_P2R = np.zeros((group.size if largest else 1, 2, size))
        own_2R = parts_P2R[group.rank if largest else 0]
        own_2R[0] = -np.inf if largest else 0.0
        for part_R, each in zip(own_2R, self._found.get(name, ()), strict=False):
            part_R[: len(each)] = each
        total = torch.from_numpy(parts_P2R).to(device)
        group.sum_([total])
        value_R, count_R = total.amax(0).cpu().numpy()
        return value_R, count_R

    def _longest(self) -> int:
        return max((len(count_R) for _, count_R in self._found.values()), default=0)


def example_rows(batch: Batch) -> Tensor | None:
    """Return the row of each example or document, [E]; None for a batch not made by packing/split.py."""
    row_S = batch.documents.get("row")
    if row_S is None or "example" not in batch.documents:
        return row_S
    number_S = batch.documents["example"]
    row_E = row_S.new_full((batch.examples or 0,), -1)
    counted = number_S >= 0
    row_E[number_S[counted]] = row_S[counted]
    return row_E


def _text(each: np.ndarray) -> str:
    return base64.b64encode(each.astype("<f4").tobytes()).decode()


def _array(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<f4")
