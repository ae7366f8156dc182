"""A KV cache in which the answers to a prompt share its keys and values.

G answers of at most A tokens to a prompt of P take P + G · A positions, instead of G · (P + A). Recorded
steps read it in place (kernels/decode_step). A block that runs as in training gets a copy (`read`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.core.errors import UserError
from unfreeze.models.blocks.cache import Cache


class SharedCache(Cache):
    """R rows of at most `capacity` positions behind their prompts, and `slots` prompts of at most `longest`.

    prompts  per layer tensors [slots, longest, …]; `layers` are those of the rows, [R, capacity, …]
    prompt_summaries   of the blocks that lie in a prompt, [slots, blocks, …]; `summaries` are of later ones
    slot     of each running row, the place of its prompt; -1: it has none yet
    shared   length of the prompt in each slot
    """

    def __init__(self, num_sequences: int, capacity: int, *, slots: int, longest: int, routes: bool = False):
        super().__init__(num_sequences, capacity, routes=routes)
        self.prompts: dict[int, tuple[Tensor, ...]] = {}
        self.prompt_routes: dict[int, Tensor] = {}
        self.prompt_summaries: dict[int, Tensor] = {}
        self.longest = longest
        self.shared = [0] * slots
        self.slot = [-1] * num_sequences

    @property
    def nbytes(self) -> int:
        every = [store for tensors in self.prompts.values() for store in tensors]
        every += [*self.prompt_routes.values(), *self.prompt_summaries.values()]
        return super().nbytes + sum(store.nbytes for store in every)

    @property
    def positions(self) -> int:
        return self.longest + self.capacity

    def own(self, row: int) -> int:
        return self.lengths[row] - self.shared_of(row)

    def shared_of(self, row: int) -> int:
        """Return the positions of a row that lie in its prompt."""
        return 0 if self.slot[row] < 0 else self.shared[self.slot[row]]

    def room_for_prompts(self) -> int:
        return len(self.shared) - len({slot for slot in self.slot if slot >= 0})

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.slot[row] = -1

    def begin(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.release(rows)
        taken = {*self.slot}
        free = [slot for slot in range(len(self.shared)) if slot not in taken]
        if len(rows) > len(free) or max(lengths) > self.longest:
            raise UserError(
                f"{len(rows)} prompts, the longest of {max(lengths)} tokens; {len(free)} of at most"
                f" {self.longest} fit beside those that are being answered"
            )
        for row, slot, length in zip(rows, free, lengths, strict=False):
            self.slot[row], self.shared[slot] = slot, length

    def write(self, layer: int, rows_T: Tensor, positions_T: Tensor, new: tuple[Tensor, ...]) -> None:
        if layer not in self.layers:
            self.layers[layer] = tuple(self._empty(value) for value in new)
            self.prompts[layer] = tuple(self._empty_prompts(value) for value in new)
        where = self._where(rows_T, positions_T)
        for prompts, rows, value in zip(self.prompts[layer], self.layers[layer], new, strict=True):
            _write(prompts, rows, value, *where)

    def write_route(self, layer: int, rows_T: Tensor, positions_T: Tensor, ids_TK: Tensor) -> None:
        if self.routes is not None:
            new = ids_TK.to(torch.int16)
            if layer not in self.routes:
                self.routes[layer], self.prompt_routes[layer] = self._empty(new), self._empty_prompts(new)
            where = self._where(rows_T, positions_T)
            _write(self.prompt_routes[layer], self.routes[layer], new, *where)

    def write_summaries(
        self, layer: int, rows_E: Tensor, blocks_E: Tensor, size: int, summary_E: Tensor
    ) -> None:
        """A block that begins in the prompt and ends behind it is the row's own, its first."""
        if layer not in self.summaries:
            self.version += 1
            blocks = (self.capacity + size - 2) // size + 1
            self.summaries[layer] = summary_E.new_zeros(self.rows, blocks, *summary_E.shape[1:])
            inside = max(1, self.longest // size)
            self.prompt_summaries[layer] = summary_E.new_zeros(len(self.shared), inside, *summary_E.shape[1:])
        slots_R, shared_R = self.table().to(rows_E.device).unbind(1)
        slots_E, before_E = slots_R[rows_E], shared_R[rows_E] // size
        inside_E = blocks_E < before_E
        where = (
            inside_E,
            slots_E[inside_E],
            blocks_E[inside_E],
            rows_E[~inside_E],
            (blocks_E - before_E)[~inside_E],
        )
        _write(self.prompt_summaries[layer], self.summaries[layer], summary_E, *where)

    def read_summaries(self, layer: int, rows: int, blocks: int, size: int) -> Tensor:
        """Put the rows together: a copy."""
        prompts, own = self.prompt_summaries[layer], self.summaries[layer]
        return self._together(prompts, own, range(rows), blocks, size)

    def read(self, layer: int, rows: int, longest: int) -> tuple[Tensor, ...]:
        """Put the rows together, [rows, longest, …]: a copy."""
        pairs = zip(self.prompts[layer], self.layers[layer], strict=True)
        return tuple(self._together(prompts, own, range(rows), longest) for prompts, own in pairs)

    def route(self, row: int) -> Tensor:
        length, layers = self.lengths[row], sorted(self.routes or {})
        if self.routes is None or not layers:
            return torch.empty(length, 0, 0, dtype=torch.int16)
        each = [
            self._together(self.prompt_routes[layer], self.routes[layer], [row], length)[0]
            for layer in layers
        ]
        return torch.stack(each, 1).cpu()

    def more(self, count: int) -> None:
        super().more(count)
        self.slot = self.slot + [-1] * count

    def fork(self, source: int, rows: Sequence[int], length: int) -> None:
        """Nothing is copied. Raises UserError if `length` is not the length of the source's prompt."""
        if length != self.shared_of(source):
            raise UserError(f"rows share the {self.shared_of(source)} positions of a prompt, not {length}")
        self.fork_states(source, rows, length)
        for row in rows:
            self.slot[row], self.lengths[row] = self.slot[source], length

    def require_room(self) -> None:
        if max(map(self.own, range(len(self.lengths)))) >= self.capacity:
            raise UserError(
                f"the cache holds {self.capacity} positions behind each prompt and all are filled; create it"
                " with a larger capacity"
            )

    def keep(self, rows: list[int]) -> list[int]:
        order = super().keep(rows)
        self.slot = [self.slot[row] for row in order]
        return order

    def table(self) -> Tensor:
        """Return the slot and the shared positions of each running row, int64 [S, 2]."""
        running = range(len(self.lengths))
        return torch.tensor([(max(0, self.slot[row]), self.shared_of(row)) for row in running])

    def _where(self, rows_T: Tensor, positions_T: Tensor) -> tuple[Tensor, ...]:
        """-> tokens that lie in prompts (bool), their slots and positions; rows and positions of the rest."""
        slots_T, shared_T = self.table().to(rows_T.device)[rows_T].unbind(1)
        inside_T = positions_T < shared_T
        rest_T = ~inside_T
        own_T = positions_T - shared_T
        return inside_T, slots_T[inside_T], positions_T[inside_T], rows_T[rest_T], own_T[rest_T]

    def _together(
        self, prompts: Tensor, own: Tensor, rows: Sequence[int], longest: int, size: int = 1
    ) -> Tensor:
        whole = own.new_zeros(len(rows), longest, *own.shape[2:])
        for place, row in enumerate(rows):
            shared = min(longest, self.shared_of(row) // size)
            whole[place, :shared] = prompts[self.slot[row], :shared]
            count = min(longest - shared, own.shape[1])
            whole[place, shared : shared + count] = own[row, :count]
        return whole

    def _empty_prompts(self, value: Tensor) -> Tensor:
        self.version += 1
        return value.new_zeros(len(self.shared), self.longest, *value.shape[1:])


def _write(
    prompts: Tensor,
    rows: Tensor,
    value: Tensor,
    inside_T: Tensor,
    slots: Tensor,
    positions: Tensor,
    own_rows: Tensor,
    own: Tensor,
) -> None:
    if len(slots):
        prompts[slots, positions] = value[inside_T]
    if len(own_rows):
        rows[own_rows, own] = value[~inside_T]
