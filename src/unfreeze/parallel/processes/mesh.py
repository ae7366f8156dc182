"""The processes of a run as [data, experts]: who holds which experts, and over whom a gradient is summed.

With split = n, n processes next to each other share one set of experts; each holds all the other weights.
Process r has place r % n among the experts and place r // n among the data: 4 processes with split 2 are

    experts:  process 0 with 1, 2 with 3    each pair holds every expert once
    data:     process 0 with 2, 1 with 3    each pair holds the same experts

Neighbours share experts because torchrun numbers a host's processes one after the other: rows of tokens then
travel inside a host, and between hosts only gradients do.
Every process works on its own micro-batches, so a gradient of a weight that all hold is summed over all. An
expert's gradient holds the rows of all its neighbours' tokens already, so it is summed over the data axis
only. Nothing is divided by a number of processes: a step's losses are divided by one count of tokens
(train/step.py).

E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.rows import Rows, share
from unfreeze.parallel.processes.collectives import ALONE, Group, Processes

Axis = Literal["all", "data"]
_EXPERTS = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True)
class HeldPart:
    """What one process holds of a parameter.

    rows    which rows of dimension 0 are here; None: all.
    summed  the group over which its gradient is still to be summed (ALONE: it is summed already). They hold
            the same rows, so their copies must stay equal to the bit.
    copies  how many processes hold the same rows. The squares of a gradient's parts, each divided by its
            copies, add up over all processes to the square of its norm.
    half    whether the parameter is a float32 master, and the model computes with it rounded (fsdp.py).
    """

    rows: Rows | None
    summed: Group
    copies: int
    half: bool = False


class Mesh:
    """The processes of a run and what each holds.

    all      every process. What all hold is summed over them, and its first speaks.
    data     those that hold the same experts as this one.
    experts  those that share one set of experts with this one.
    rows     the experts held here; None: all.
    """

    def __init__(self, everyone: Group, data: Group, experts: Group, num_experts: int = 0):
        self.all, self.data, self.experts, self.num_experts = everyone, data, experts, num_experts

    @property
    def split(self) -> int:
        """How many processes share one set of experts; 1: every process holds all."""
        return self.experts.size

    @property
    def rows(self) -> Rows | None:
        return self.rows_of(self.experts.rank) if self.split > 1 else None

    def rows_of(self, index: int) -> Rows:
        """The experts of the process that has place `index` among those that share them."""
        return share(self.num_experts, index, self.split)

    def axis_of(self, name: str) -> Axis:
        """Over which processes the gradient of the parameter of that name is summed."""
        return "data" if self.split > 1 and _EXPERTS.search(name) else "all"

    def held(self, name: str) -> HeldPart:
        """What this process holds of the parameter of that name."""
        if self.axis_of(name) == "all":
            return HeldPart(None, self.all, self.all.size)
        return HeldPart(self.rows, self.data, self.data.size)


ONE = Mesh(ALONE, ALONE, ALONE)
"""The mesh of one process."""


def mesh_of(everyone: Group, split: int = 1, num_experts: int = 0) -> Mesh:
    """The mesh of a run's processes, of which `split` share one set of `num_experts` experts.

    All processes call it together.
    Raises ConfigError where the split does not divide the processes, or some would hold no expert.
    """
    check_split(split, everyone.size, num_experts)
    if split == 1:
        return Mesh(everyone, everyone, ALONE, num_experts)
    assert isinstance(everyone, Processes)
    size, data, experts = everyone.size, ALONE, everyone
    if split < size:
        # every process makes every group, in the same order: torch asks for that
        for first in range(0, size, split):
            ranks = list(range(first, first + split))
            experts = everyone.among(ranks) or experts
        for place in range(split):
            ranks = list(range(place, size, split))
            data = everyone.among(ranks) or data
    return Mesh(everyone, data, experts, num_experts)


def check_copies(everyone: Group, tensors: Mapping[str, Tensor], held: Callable[[str], HeldPart]) -> None:
    """Raise UserError in all processes, where copies of the same rows are not equal to the bit.

    held: the name of a tensor -> what is held of it.
    """
    by_group: dict[int, tuple[Group, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        group = held(name).summed
        by_group.setdefault(id(group), (group, {}))[1][name] = tensor
    different: UserError | None = None
    for group, theirs in by_group.values():
        try:
            group.check_replicas(theirs)
        except UserError as error:
            different = error
    # a group is not all: those whose own copies agree end too, with the others and not by waiting for them
    if len(by_group) > 1 and everyone.any(different is not None) and different is None:
        raise UserError(
            "other processes hold different values of the same weights, so this one stops too",
            next="see what they say",
        )
    if different is not None:
        raise different


def check_split(split: int, processes: int, num_experts: int) -> None:
    """Raise ConfigError unless every process can hold a part of the experts."""
    if split == 1:
        return
    fits = [n for n in range(1, processes + 1) if processes % n == 0 and n <= max(1, num_experts)]
    if not num_experts:
        raise ConfigError(f"place.split is {split}, and this model has no experts", next="--place.split 1")
    if processes % split:
        raise ConfigError(
            f"place.split is {split}, and there is one process"
            if processes == 1
            else f"place.split is {split}, which does not divide the {processes} processes",
            next=f"--place.split {' or '.join(map(str, fits))}"
            + ("" if processes > 1 else f", or torchrun --nproc-per-node {split}"),
        )
    if split > num_experts:
        raise ConfigError(
            f"place.split is {split} and the model has {num_experts} experts: some processes would hold none",
            next=f"--place.split {fits[-1]}, the largest here",
        )
