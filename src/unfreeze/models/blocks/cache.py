"""The KV cache of a generation, with the recurrent states of its rows.

R rows, K experts per token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.core.errors import UserError


class Cache:
    """The KV cache of at most R sequences (`rows`): per layer a few tensors [R, capacity, …].

    They are keys and values, or MLA's latent with its rotary key. The first S = len(lengths) rows are
    running; `lengths` (on the host) counts the filled positions of each. Rows are independent: `more` adds
    some, `fork` gives the positions of one to others, `keep` drops some.

    The tensors keep their addresses while rows come and go. `version` counts their allocations: a recording
    of a step holds as long as it does not change.
    `routes`: the experts that each MoE layer chose, int16 [R, capacity, K] per layer; None if not asked for.
    `states`: what a layer keeps of all of a row's tokens together, [R, …] per name: it does not grow.
    `stepping`: the rows that take part in a step; None: all that run.
    `summaries`: what a layer keeps of each block of a row's positions, [R, blocks, …] (blocks/moba.py).
    """

    stepping: list[int] | None = None

    def __init__(self, num_sequences: int, capacity: int, *, routes: bool = False):
        self.lengths = [0] * num_sequences
        self.rows, self.capacity = num_sequences, capacity
        self.longest = capacity  # of a prompt
        self.layers: dict[int, tuple[Tensor, ...]] = {}
        self.routes: dict[int, Tensor] | None = {} if routes else None
        self.states: dict[str, Tensor] = {}
        self.summaries: dict[int, Tensor] = {}
        self.version = 0

    @property
    def nbytes(self) -> int:
        every = *self._stores(), *self.states.values(), *self.summaries.values()
        return sum(store.nbytes for store in every)

    @property
    def positions(self) -> int:
        """Most positions of a row."""
        return self.capacity

    def _stores(self) -> list[Tensor]:
        every = [store for tensors in self.layers.values() for store in tensors]
        return every + list((self.routes or {}).values())

    def write(self, layer: int, rows_T: Tensor, positions_T: Tensor, new: tuple[Tensor, ...]) -> None:
        """Store one value per token at (row, position); the layer's tensors are allocated on first use."""
        if layer not in self.layers:
            self.layers[layer] = tuple(self._empty(value) for value in new)
        for store, value in zip(self.layers[layer], new, strict=True):
            store[rows_T, positions_T] = value

    def write_route(self, layer: int, rows_T: Tensor, positions_T: Tensor, ids_TK: Tensor) -> None:
        """Store the experts that were chosen for each token, if `routes` are asked for."""
        if self.routes is not None:
            new = ids_TK.to(torch.int16)
            if layer not in self.routes:
                self.routes[layer] = self._empty(new)
            self.routes[layer][rows_T, positions_T] = new

    def write_state(self, name: str, rows_S: Tensor, state: Tensor) -> None:
        """Replace the state of these rows; allocated on first use."""
        if name not in self.states:
            self.version += 1
            self.states[name] = state.new_zeros(self.rows, *state.shape[1:])
        self.states[name][rows_S] = state

    def state(self, name: str, rows: int) -> Tensor:
        """The state of the `rows` rows of a step."""
        return self.states[name][self._places(rows)]

    def move_state(self, name: str, state_S: Tensor) -> None:
        """Replace the state of the rows of a step."""
        self.states[name][self._places(len(state_S))] = state_S

    def _places(self, rows: int) -> slice | list[int]:
        """The `rows` rows of a step."""
        return slice(rows) if self.stepping is None else self.stepping

    def shortened(self, by: int, stepping: list[int] | None = None) -> Cache:
        """This cache for layers that have one position per `by` of a row's (passes.py: shorten).

        It has the same stores and states; those of such a layer are allocated in its size.
        """
        view = copy.copy(self)
        view.capacity, view.longest = -(-self.capacity // by), -(-self.longest // by)
        view.lengths = [length // by for length in self.lengths]
        view.stepping = stepping
        return view

    def write_summaries(
        self, layer: int, rows_E: Tensor, blocks_E: Tensor, size: int, summary_E: Tensor
    ) -> None:
        """Store a summary of each of these blocks of `size` positions; allocated on first use."""
        if layer not in self.summaries:
            self.version += 1
            blocks = -(-self.capacity // size)
            self.summaries[layer] = summary_E.new_zeros(self.rows, blocks, *summary_E.shape[1:])
        self.summaries[layer][rows_E, blocks_E] = summary_E

    def read_summaries(self, layer: int, rows: int, blocks: int, size: int) -> Tensor:
        """Return those of the first blocks of the `rows` rows of a step, [rows, blocks, …]."""
        return self.summaries[layer][self._places(rows), :blocks]

    def route(self, row: int) -> Tensor:
        """Return the experts chosen at the filled positions of a row, int16 [positions, MoE layers, K].

        On the host. Empty [positions, 0, 0] without MoE layers.
        """
        stores = [store for _, store in sorted((self.routes or {}).items())]
        length = self.lengths[row]
        if not stores:
            return torch.empty(length, 0, 0, dtype=torch.int16)
        return torch.stack([store[row, :length] for store in stores], 1).cpu()

    def _empty(self, value: Tensor) -> Tensor:
        self.version += 1
        return value.new_zeros(self.rows, self.capacity, *value.shape[1:])

    def read(self, layer: int, rows: int, longest: int) -> tuple[Tensor, ...]:
        """Return the first `longest` positions of the `rows` rows of a step, [rows, longest, …]."""
        places = self._places(rows)
        return tuple(store[places, :longest] for store in self.layers[layer])

    def own(self, row: int) -> int:
        """Return the number of positions that a row holds itself."""
        return self.lengths[row]

    def room_for_prompts(self) -> int:
        """Return the number of further prompts that can be filled, if there are rows for them."""
        return self.rows

    def release(self, rows: Sequence[int]) -> None:
        """Forget the prompts of running rows that will be dropped or filled anew."""

    def begin(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Prepare these running rows to be filled with prompts of these lengths."""

    def more(self, count: int) -> None:
        """Add empty rows behind the running ones. Raises UserError if there are fewer."""
        if len(self.lengths) + count > self.rows:
            raise UserError(
                f"the cache has {self.rows} rows, {len(self.lengths)} of them run: no {count} more"
            )
        self.lengths = self.lengths + [0] * count

    def fork(self, source: int, rows: Sequence[int], length: int) -> None:
        """Give the first `length` positions of row `source` to other running rows, in place of theirs.

        They are copied. `source` itself may be among the rows; it then forgets what came after.
        Raises UserError if it has states and another length: they are those of all its positions.
        """
        self.fork_states(source, rows, length)
        others = [row for row in rows if row != source]
        if others:
            for store in self._stores():
                # a copy first: torch refuses it within a store that `length` fills, as in shortened layers
                store[others, :length] = store[source, :length].clone()
            self._copy_summaries(source, others)
        for row in rows:
            self.lengths[row] = length

    def fork_states(self, source: int, rows: Sequence[int], length: int) -> None:
        """Give the states of row `source` to others."""
        if self.states and length != self.lengths[source]:
            raise UserError(
                f"row {source} has a state after {self.lengths[source]} positions, none after {length}"
            )
        others = [row for row in rows if row != source]
        for state in self.states.values() if others else ():
            state[others] = state[source].clone()

    def copy(self, source: int, row: int, length: int) -> None:
        """Copy the first `length` positions of a row to another; neither needs to run.

        States and summaries come whole.
        """
        for store in self._stores():
            store[row, :length] = store[source, :length]
        for state in (*self.states.values(), *self.summaries.values()):
            state[row] = state[source]

    def exchange(self, one: int, other: int, length: int) -> None:
        """Exchange the first `length` positions of two rows; neither needs to run."""
        stores = [store[:, :length] for store in self._stores()]
        for store in (*stores, *self.states.values(), *self.summaries.values()):
            kept = store[one].clone()
            store[one] = store[other]
            store[other] = kept

    def clear(self, row: int) -> None:
        """Set a row to 0: what is not finite would pass on through attention that hides positions."""
        for store in (*self._stores(), *self.states.values(), *self.summaries.values()):
            store[row] = 0

    def resizes(self) -> bool:
        """True if all that it holds has one place per position."""
        return not (self.states or self.summaries) and all(
            store.shape[1] == self.capacity for store in self._stores()
        )

    def resize(self, rows: int, capacity: int, order: Sequence[int], lengths: Sequence[int]) -> None:
        """Allocate other sizes; row order[i] becomes row i and keeps its first lengths[i] positions.

        Layer by layer, so one layer is held twice. Only if it `resizes`.
        """
        self.version += 1

        def moved(store: Tensor) -> Tensor:
            new = store.new_zeros(rows, capacity, *store.shape[2:])
            for place, (row, length) in enumerate(zip(order, lengths, strict=True)):
                new[place, :length] = store[row, :length]
            return new

        for layer in self.layers:
            self.layers[layer] = tuple(map(moved, self.layers[layer]))
        for layer in self.routes or {}:
            self.routes[layer] = moved(self.routes[layer])  # type: ignore[index]
        self.rows, self.capacity, self.longest = rows, capacity, capacity

    def _copy_summaries(self, source: int, rows: int | list[int]) -> None:
        """All of them: one that is not complete is written again before it is read."""
        for store in self.summaries.values():
            store[rows] = store[source].clone()

    def require_room(self) -> None:
        """Raise UserError if a row has no position left."""
        if max(self.lengths) >= self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} positions and all are filled; create it with a larger"
                " capacity"
            )

    def keep(self, rows: list[int]) -> list[int]:
        """Keep only these rows: finished sequences leave the batch.

        Returns for each remaining row the index it had before. The last rows move into the freed places and
        nothing else is copied: at most one row per finished sequence. The freed memory is for `more` rows.
        """
        stays, moves = (
            {row for row in rows if row < len(rows)},
            sorted(row for row in rows if row >= len(rows)),
        )
        order = [row if row in stays else moves.pop() for row in range(len(rows))]
        for place, row in enumerate(order):
            if place != row:
                for store in self._stores():
                    store[place, : self.own(row)] = store[row, : self.own(row)]
                for state in self.states.values():
                    state[place] = state[row]
                self._copy_summaries(row, place)
        self.lengths = [self.lengths[row] for row in order]
        return order
