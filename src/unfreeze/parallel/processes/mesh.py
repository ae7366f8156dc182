"""The processes of a run as a mesh [data, experts]: who holds which experts, and where gradients are summed.

With split = n, n neighbouring processes share one set of experts; all other weights are replicated.
Process r has index r % n on the expert axis and r // n on the data axis: 4 processes with split 2 are

experts:  process 0 with 1, 2 with 3    each pair holds every expert once
data:     process 0 with 2, 1 with 3    each pair holds the same experts

torch's DeviceMesh of the dimensions ("data", "experts") makes the groups.
Neighbours share experts because torchrun numbers a host's processes consecutively. So tokens travel within a
host, and only gradients travel between hosts.
Every process works on its own micro-batches, so the gradient of a replicated weight is summed over all. An
expert's gradient already includes the tokens of all its neighbours, so it is summed over the data axis only.
Nothing is divided by a number of processes: a step's losses are divided by one token count (train/step.py).

E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.rows import Rows, share
from unfreeze.parallel.processes.collectives import ALONE, Group, Processes

Axis = Literal["all", "data"]
_EXPERTS = re.compile(r"(^|\.)experts\.")


@dataclass(frozen=True)
class HeldPart:
    """The part of a parameter that one process holds.

    rows    rows of dimension 0 held here; None: all
    summed  the group over which its gradient must still be summed (ALONE: already summed). Its processes
            hold the same rows, so their copies must stay bit-identical
    copies  number of processes that hold the same rows. The squares of a gradient's parts, each divided
            by its copies, add up over all processes to the square of its norm
    half    True if the parameter is a float32 master that the model rounds for its computation (fsdp.py)
    """

    rows: Rows | None
    summed: Group
    copies: int
    half: bool = False


class Mesh:
    """The processes of a run and what each holds.

    all      every process. Gradients of replicated weights are summed over them; its first writes
             messages
    data     those with the same experts as this one
    experts  those that share one set of experts with this one
    rows     the experts held here; None: all
    """

    def __init__(self, everyone: Group, data: Group, experts: Group, num_experts: int = 0):
        self.all, self.data, self.experts, self.num_experts = everyone, data, experts, num_experts

    @property
    def split(self) -> int:
        """Number of processes that share one set of experts; 1: every process holds all."""
        return self.experts.size

    @property
    def rows(self) -> Rows | None:
        return self.rows_of(self.experts.rank) if self.split > 1 else None

    def rows_of(self, index: int) -> Rows:
        """Return the experts of the process with index `index` on the expert axis."""
        return share(self.num_experts, index, self.split)

    def axis_of(self, name: str) -> Axis:
        """Return the axis over which the named parameter's gradient is summed."""
        return "data" if self.split > 1 and _EXPERTS.search(name) else "all"

    def held(self, name: str) -> HeldPart:
        """Return what this process holds of the named parameter."""
        if self.axis_of(name) == "all":
            return HeldPart(None, self.all, self.all.size)
        return HeldPart(self.rows, self.data, self.data.size)


ONE = Mesh(ALONE, ALONE, ALONE)
"""The mesh of one process."""


def mesh_of(everyone: Group, split: int = 1, num_experts: int = 0) -> Mesh:
    """Return the mesh of a run's processes; every `split` of them share one set of `num_experts` experts.

    All processes call it together.
    Raises ConfigError if the split does not divide the processes, or if some would hold no expert.
    """
    check_split(split, everyone.size, num_experts)
    if split == 1:
        return Mesh(everyone, everyone, ALONE, num_experts)
    assert isinstance(everyone, Processes)
    dimensions = (everyone.size // split, split)
    devices = init_device_mesh(everyone.device.type, dimensions, mesh_dim_names=("data", "experts"))
    return mesh_over(devices, everyone, num_experts)


def mesh_over(devices: DeviceMesh, everyone: Processes, num_experts: int) -> Mesh:
    """Return the mesh of torch's, which has the dimensions "data" and "experts" over `everyone`."""
    data, experts = (everyone.among(devices.get_group(name)) for name in ("data", "experts"))
    return Mesh(everyone, data if data.size > 1 else ALONE, experts, num_experts)


def check_copies(everyone: Group, tensors: Mapping[str, Tensor], held: Callable[[str], HeldPart]) -> None:
    """Raise UserError in all processes if copies of the same rows are not bit-identical.

    held: tensor name -> what is held of it.
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
    # processes whose own copies agree must stop too, instead of waiting for the others
    if len(by_group) > 1 and everyone.any(different is not None) and different is None:
        raise UserError(
            "other processes hold different values of the same weights, so this one stops too",
            next="see the messages of those processes",
        )
    if different is not None:
        raise different


def check_split(split: int, processes: int, num_experts: int) -> None:
    """Raise ConfigError unless every process can hold some of the experts."""
    if split == 1:
        return
    fits = [n for n in range(1, processes + 1) if processes % n == 0 and n <= max(1, num_experts)]
    if not num_experts:
        raise ConfigError(f"place.split is {split}, but this model has no experts", next="--place.split 1")
    if processes % split:
        raise ConfigError(
            f"place.split is {split}, but there is only one process"
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
