"""Several adapters at once: each sequence of a pass has its own, or none.

y += scale · B A x for the rows of each adapter; the base's product is one for all rows. An adapter's slot is
its number (kernels/decode_step/slots.py).

S sequences, T tokens, n rows, R rank, in/out features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.core.errors import UserError
from unfreeze.kernels.decode_step.mixture import EachExperts
from unfreeze.kernels.decode_step.slots import NONE, SlotTable
from unfreeze.kernels.expert_mlp import ExpertFactors

Group = tuple[int, Tensor | None]
"""A slot, and the rows that have it; None: all rows."""


class Assigned:
    """The slot of each sequence of the pass; all layers of a model read the same.

    Nothing assigned: no sequence has an adapter. `changes` counts what a recorded program would not see: a
    layer that has its first adapter, more slots, a greater rank.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.changes = 0
        self._documents: tuple[list[int], ...] = ()  # tokens of each sequence, and those with cached ones
        self._groups: dict[tuple[int, torch.device], list[Group]] = {}

    def assign(self, slots: Sequence[int]) -> None:
        """Set the slot of each sequence, in the order of the pass."""
        self.slots, self._documents, self._groups = list(slots), (), {}

    def documents(self, lengths: Sequence[int] = (), ends: Sequence[int] = ()) -> None:
        """Begin a pass over documents of these lengths, one a sequence; none: a step.

        ends: the length of each with what the cache holds of it: latent attention expands all of that.
        """
        self._documents, self._groups = tuple(list(each) for each in (lengths, ends) if each), {}

    @contextmanager
    def only(self, sequences: Sequence[int]) -> Iterator[None]:
        """Context of a pass over some of the sequences."""
        before = self.slots
        self.assign([before[i] for i in sequences] if before else [])
        try:
            yield
        finally:
            self.assign(before)

    def of_rows(self, count: int) -> list[int]:
        """The slot of each of `count` rows: of sequences, of tokens, or several of each in a row.

        Raises UserError for rows of which it is not known whose they are, unless all sequences have the same.
        """
        same = {*self.slots}
        if len(same) < 2:
            return [*same, NONE][:1] * count
        ones = [1] * len(self.slots)
        known = [each for each in (ones, *self._documents) if len(each) == len(ones)]
        for lengths in known:
            if count == sum(lengths):
                return _repeated(self.slots, lengths)
        tokens = sum((self._documents or (ones,))[0])
        if count % tokens:
            raise UserError(
                f"{len(same)} adapters in one pass of {len(ones)} sequences, {tokens} tokens: whose {count}"
                " rows of a layer are is unknown",
                next="answer with one adapter at a time",
            )
        times = count // tokens
        return _repeated(self.slots, [length * times for length in (self._documents or (ones,))[0]])

    def groups(self, count: int, device: torch.device) -> list[Group]:
        """The rows of each slot, of `count` rows; found once a pass."""
        name = count, device
        if name not in self._groups:
            of_rows = self.of_rows(count)
            present = list(dict.fromkeys(of_rows))
            self._groups[name] = (
                [(slot, None) for slot in present]
                if len(present) == 1
                else [
                    (slot, torch.tensor([i for i, s in enumerate(of_rows) if s == slot], device=device))
                    for slot in present
                ]
            )
        return self._groups[name]


def _repeated(slots: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]


@dataclass
class LinearAdapters:
    """The adapters of one Linear."""

    assigned: Assigned
    table: SlotTable

    @property
    def tables(self) -> tuple[SlotTable, ...]:
        return (self.table,)

    def groups(
        self, count: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor, float, Tensor | None]]:
        """(A, B, scale, rows) of each adapter that rows have here."""
        for slot, rows in self.assigned.groups(count, device):
            if (factors := self.table.factors.get(slot)) is not None:
                yield factors.A, factors.B, factors.scale, rows

    def add(self, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        """y, to which each row's scale · (x Aᵀ) Bᵀ is added in place, in x's dtype as one adapter's is."""
        for A, B, scale, rows in self.groups(len(x_TI), x_TI.device):
            x, y = (x_TI, y_TO) if rows is None else (x_TI[rows], y_TO[rows])
            t_TR = F.linear(x, A.to(x.dtype)).mul_(scale)
            y.flatten(0, -2).addmm_(t_TR.flatten(0, -2), B.to(x.dtype).t())
            if rows is not None:
                y_TO[rows] = y
        return y_TO

    def recorded(self) -> SlotTable | None:
        """The table for a program; None if no adapter has been here."""
        return self.table if self.table.rank else None


@dataclass
class ExpertAdapters:
    """The adapters of one layer's experts: gate and up together, and down."""

    assigned: Assigned
    gate_up: SlotTable
    down: SlotTable

    @property
    def tables(self) -> tuple[SlotTable, ...]:
        return self.gate_up, self.down

    def factors(self, slot: int) -> ExpertFactors | None:
        """Factors of a slot; None if it leaves these experts as they are."""
        gate_up, down = self.gate_up.factors.get(slot), self.down.factors.get(slot)
        if gate_up is None and down is None:
            return None
        A, B, scale = gate_up or (None, None, 1.0)
        down_A, down_B, down_scale = down or (None, None, 1.0)
        return ExpertFactors(A, B, down_A, down_B, scale, down_scale)

    def product(
        self,
        x_nD: Tensor,
        ids_nK: Tensor,
        weights_nK: Tensor,
        compute: Callable[[Tensor, Tensor, Tensor, ExpertFactors | None], Tensor],
    ) -> Tensor:
        """compute(x, ids, weights, factors) for the rows of each adapter."""
        y_nD = torch.empty_like(x_nD)
        for slot, rows in self.assigned.groups(len(x_nD), x_nD.device):
            if rows is None:
                return compute(x_nD, ids_nK, weights_nK, self.factors(slot))
            y_nD[rows] = compute(x_nD[rows], ids_nK[rows], weights_nK[rows], self.factors(slot))
        return y_nD

    def recorded(self) -> EachExperts:
        """The tables for a program; None if no adapter has been here."""
        gate_up, down = (table if table.rank else None for table in self.tables)
        return EachExperts(gate_up, down)


__all__ = ["Assigned", "ExpertAdapters", "LinearAdapters"]
