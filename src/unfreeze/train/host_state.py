"""AdamW's moments in host memory: copied to the device in groups for the update, and back afterwards.

up        0   1   2   3               on a stream of its own, into the free slot
update        0   1   2   3           after the group has arrived
down              0   1   2   3       on a third stream, after the update

The device has two slots. Host memory is one block, page-locked if a GPU copies.
The arithmetic is that of moments on the device, tensor by tensor, and bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from unfreeze.parallel.processes.lanes import Lane, pinned
from unfreeze.train.moments import Float32, Int8

# bytes of a slot, unless one tensor's moments are larger: copying it takes a GPU more than 1 ms
CHUNK = 64 << 20
SLOTS = 2
ALIGN = 64

State = Float32 | Int8


class Place(Protocol):
    """Storage of moments. `like`: the device on which a master's new state is created."""

    def like(self, master: Tensor) -> torch.device: ...

    def keep(self, states: Mapping[str, State]) -> None:
        """Take over these states, which are all; called once, before any read."""
        ...

    def rounds(self, states: Mapping[str, State]) -> Iterator[Mapping[str, State]]:
        """Yield groups of these states on their masters' device; changes made there are kept."""
        ...

    def settle(self) -> None:
        """Wait until the states passed to `keep` hold all computed values."""
        ...


class OnDevice:
    """Moments on the device, beside the masters."""

    def like(self, master: Tensor) -> torch.device:
        return master.device

    def keep(self, states: Mapping[str, State]) -> None:
        pass

    def rounds(self, states: Mapping[str, State]) -> Iterator[Mapping[str, State]]:
        yield states

    def settle(self) -> None:
        pass


class InHost:
    """Moments in host memory. up, down: separate lanes to and from `device`.

    `chunk`: bytes of a slot, unless a tensor's moments are larger.
    `poison`, for tests: fill memory that must not be read any more with ones, which is NaN in float32.
    """

    chunk = CHUNK
    poison = False

    def __init__(self, device: torch.device | str, up: Lane, down: Lane):
        self._device, self._up, self._down = device, up, down
        self._slots: list[Tensor] = []
        self._gone: Any = None  # when the last copy to the host is done

    @property
    def device_bytes(self) -> int:
        """Bytes of the slots."""
        return sum(slot.nbytes for slot in self._slots)

    def like(self, master: Tensor) -> torch.device:
        return torch.device("meta")

    def keep(self, states: Mapping[str, State]) -> None:
        """Allocate memory for them, zero-filled. Raises DoesNotFit if CUDA does not page-lock it."""
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
        """Group names in order, as many as fit a slot."""
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
        """Copy a group to its slot; return (its states there, the mark of their arrival).

        The last queued copy to the host is of the group before the previous one, which used the same slot.
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
    """Return the bytes of its moments, each tensor aligned to ALIGN."""
    return sum(-(-tensor.nbytes // ALIGN) * ALIGN for tensor in _moments(state).values())


def _moments(state: State) -> dict[str, Tensor]:
    """Return its tensors except `step`, which is a number on the host."""
    return {name: tensor for name, tensor in state.tensors().items() if name != "step"}


def _pairs(one: State, other: State) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(_moments(one).values(), _moments(other).values(), strict=True)


def _lay(state: State, memory: Tensor) -> None:
    """Make its moments views of this memory."""
    begin = 0
    for name, tensor in _moments(state).items():
        part = memory[begin : begin + tensor.nbytes]
        setattr(state, name, part.view(tensor.dtype).view(tensor.shape))
        begin += -(-tensor.nbytes // ALIGN) * ALIGN
