"""AdamW's moments in host memory: for the update some come to the device, and go back when they have changed.

    up        0   1   2   3               on a stream of its own, into the slot that is free
    update        0   1   2   3           behind its arrival
    down              0   1   2   3       on a third stream, behind the update

The device has two slots. Host memory is one block, page-locked where a GPU copies.
The arithmetic is that of moments on the device, tensor by tensor: the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from unfreeze.parallel.processes.lanes import Lane, pinned
from unfreeze.train.moments import Float32, Int8

CHUNK = 64 << 20  # bytes of a slot, or the largest tensor's moments: a copy of it takes a GPU more than 1 ms
SLOTS = 2
ALIGN = 64

State = Float32 | Int8


class Place(Protocol):
    """Where moments lie. `like`: which device the tensors of a new state are made on, for a master."""

    def like(self, master: Tensor) -> torch.device: ...

    def keep(self, states: Mapping[str, State]) -> None:
        """Take these, which are all; once, before anything is read."""
        ...

    def rounds(self, states: Mapping[str, State]) -> Iterator[Mapping[str, State]]:
        """Those states on the device of their masters, some at a time; what is changed there is kept."""
        ...

    def settle(self) -> None:
        """Wait until the states that `keep` took are what was computed."""
        ...


class OnDevice:
    """Beside the masters."""

    def like(self, master: Tensor) -> torch.device:
        return master.device

    def keep(self, states: Mapping[str, State]) -> None:
        pass

    def rounds(self, states: Mapping[str, State]) -> Iterator[Mapping[str, State]]:
        yield states

    def settle(self) -> None:
        pass


class InHost:
    """In host memory. up, down: lanes of their own to and from `device`.

    `chunk`: bytes of a slot, unless a tensor's moments are larger.
    `poison`, for tests: fill with ones, NaN in float32, what nobody may read any more.
    """

    chunk = CHUNK
    poison = False

    def __init__(self, device: torch.device | str, up: Lane, down: Lane):
        self._device, self._up, self._down = device, up, down
        self._slots: list[Tensor] = []
        self._gone: Any = None  # when the last copy down is done

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.nbytes for slot in self._slots)

    def like(self, master: Tensor) -> torch.device:
        return torch.device("meta")

    def keep(self, states: Mapping[str, State]) -> None:
        """Give them memory, of zeros. Raises DoesNotFit where CUDA does not page-lock it."""
        sizes = [size_of(state) for state in states.values()]
        host = (pinned if self._up.pins else torch.empty)(sum(sizes), dtype=torch.uint8)
        host.zero_()
        begin = 0
        for state, size in zip(states.values(), sizes, strict=True):
            _lay(state, host[begin : begin + size])
            begin += size
        each = min(sum(sizes), max(self.chunk, *sizes))
        self._slots = [torch.empty(each, dtype=torch.uint8, device=self._device) for _ in range(SLOTS)]

    def rounds(self, states: Mapping[str, State]) -> Iterator[Mapping[str, State]]:
        groups = list(self._groups(states))
        coming = [self._send_for(states, groups, 0)] if groups else []
        for index, names in enumerate(groups):
            if index + 1 < len(groups):
                coming.append(self._send_for(states, groups, index + 1))
            there, arrived = coming.pop(0)
            self._up.follow(arrived)
            yield there
            with self._down.copying(self._down.mark()):
                for name in names:
                    for own, held in _pairs(there[name], states[name]):
                        held.copy_(own, non_blocking=True)
                self._gone = self._down.mark()
            if self.poison:
                self._down.settle()
                self._slots[index % SLOTS].fill_(0xFF)

    def settle(self) -> None:
        self._down.settle()

    def _groups(self, states: Mapping[str, State]) -> Iterator[list[str]]:
        """Names in their order, as many as a slot holds."""
        group: list[str] = []
        held = 0
        for name, state in states.items():
            size = size_of(state)
            if group and held + size > len(self._slots[0]):
                yield group
                group, held = [], 0
            group.append(name)
            held += size
        if group:
            yield group

    def _send_for(
        self, states: Mapping[str, State], groups: Sequence[Sequence[str]], index: int
    ) -> tuple[dict[str, State], Any]:
        """(the states of a group in its slot, when they are there).

        The copy down that was queued last is of the group before the last one, which had this slot.
        """
        slot, begin = self._slots[index % SLOTS], 0
        there: dict[str, State] = {}
        with self._up.copying(self._up.mark() if self._gone is None else self._gone):
            for name in groups[index]:
                there[name] = copy(states[name])
                size = size_of(states[name])
                _lay(there[name], slot[begin : begin + size])
                begin += size
                for own, held in _pairs(there[name], states[name]):
                    own.copy_(held, non_blocking=True)
            arrived = self._up.mark()
        if self.poison:
            self._up.settle()
            for name in groups[index]:
                for _, held in _pairs(there[name], states[name]):
                    held.view(-1).view(torch.uint8).fill_(0xFF)
        return there, arrived


def size_of(state: State) -> int:
    """Bytes of its moments, each tensor at a multiple of ALIGN."""
    return sum(-(-tensor.nbytes // ALIGN) * ALIGN for tensor in _moments(state).values())


def _moments(state: State) -> dict[str, Tensor]:
    """Its tensors but `step`, a number on the host."""
    return {name: tensor for name, tensor in state.tensors().items() if name != "step"}


def _pairs(one: State, other: State) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(_moments(one).values(), _moments(other).values(), strict=True)


def _lay(state: State, memory: Tensor) -> None:
    """Its moments become views of this memory."""
    begin = 0
    for name, tensor in _moments(state).items():
        part = memory[begin : begin + tensor.nbytes]
        setattr(state, name, part.view(tensor.dtype).view(tensor.shape))
        begin += -(-tensor.nbytes // ALIGN) * ALIGN
