"""Shard the frozen weights: each of n processes keeps 1/n of every layer's bytes and gathers layers on visit.

FromPeers(mesh)   passed to place(): it takes the non-expert weights of each layer out of what is loaded,
                  reads this process's part of them, and creates
Streamed          the model's residency (parallel/placement/residency.py), whose source is
Peers             the parts of all processes, all-gathered into one of two buffers

These weights ("the rest") are everything in a layer except routed experts: attention, dense MLP, shared
experts, norms and the router, with packed weights as packed bytes. Embeddings, last norm and head are
replicated on every process. A layer's tensors are contiguous in its buffer, and process r keeps bytes
r S : (r + 1) S of it. So bytes are gathered, whatever they mean, and results equal those of replicated
weights.

Every process gathers the same layers in the same order, because the order depends on the layers only, not on
a process's rows. The gathers use their own process group and run beside the computation. But the code that
visits a layer queues the next layer's gather, not a separate thread. So all exchanges of a process, these and
those of training, are queued in program order, as NCCL requires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unfreeze.checkpoint.packing import bytes_read
from unfreeze.checkpoint.resolve import Params, Placement
from unfreeze.checkpoint.stream import Progress
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import ConfigError
from unfreeze.models.blocks.experts import Experts
from unfreeze.parallel.placement.owned import Shared, cut_placement, give, read_part, spans_of
from unfreeze.parallel.placement.residency import BUFFERS, From, Slot, Streamed, layers_of
from unfreeze.parallel.placement.units import ALIGN, Layout, layout_bytes, layout_of
from unfreeze.parallel.processes.collectives import Group, Processes
from unfreeze.parallel.processes.lanes import lane_of
from unfreeze.parallel.processes.mesh import Mesh


class Peers:
    """Gathers a layer's bytes from all processes; each part has `parts[layer].numel()` bytes."""

    name: From = "peers"

    def __init__(self, group: Group, parts: Sequence[Tensor]):
        self._group, self._parts = group, list(parts)

    def begin(self, layer: int, into: Slot) -> Callable[[], object]:
        """Queue the gather: NCCL needs the same order of exchanges in every process."""
        part = self._parts[layer]
        return self._group.gather(into.bytes[: self._group.size * len(part)], part)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Rest:
    """A layer's non-expert weights: their place in a buffer, the bytes per process, and who reads what.

    reads[r]  placements that process r reads: those in its part
    shared[r]  of these, what the others need too, because it could not be cut at the parts' boundaries
    """

    layout: Layout
    part: int
    reads: list[list[Placement]]
    shared: list[list[Placement]]


class FromPeers:
    """For place(): which tensors are sharded, how they are read, and the resulting residency.

    rounded, expanded_bytes  of what was read, as in LoadStats

    Created by all processes together. Raises ConfigError if there is only one.
    """

    def __init__(self, mesh: Mesh):
        if not isinstance(mesh.all, Processes):
            raise ConfigError(
                "place.rest is peers, but there is only one process, so no peers can keep a part",
                next="torchrun --nproc-per-node 2, or --place.rest device",
            )
        self._everyone, self._group = mesh.all, mesh.all.again()
        self.residency: Streamed | None = None
        self.rounded = self.expanded_bytes = 0

    def names(self, model: nn.Module, params: Params) -> frozenset[str]:
        """Return the names in `params` that are sharded."""
        return frozenset(
            name for place, layer in layers_of(model) for name in rest_names(layer, place) if name in params
        )

    def rests(self, model: nn.Module, placements: Sequence[Placement], params: Params) -> list[Rest]:
        """Return each layer's Rest. placements: of all of `params`."""
        of_param: dict[str, list[Placement]] = {}
        for placement in placements:
            of_param.setdefault(placement.param, []).append(placement)
        rests: list[Rest] = []
        for place, layer in layers_of(model):
            layout = layout_of([name for name in rest_names(layer, place) if name in params], params)
            theirs = [p for name in layout for p in of_param.get(name, ()) if p.expected is None]
            self.expanded_bytes += sum(placement.expanded_bytes for placement in theirs)
            rests.append(rest_of(layout, theirs, self._group.size))
        return rests

    def take(
        self,
        model: nn.Module,
        rests: Sequence[Rest],
        device: torch.device | str,
        progress: Progress | None = None,
    ) -> dict[str, Tensor]:
        """Read this process's parts.

        Return name -> tensor for these weights, in memory that its layer shares with others.
        Raises CheckpointError if they cannot be read; in the other processes UserError.
        """
        group, size = self._everyone, self._everyone.size
        most = [max((rest.part for rest in rests[first::BUFFERS]), default=0) for first in range(BUFFERS)]
        slots = [Slot(size * part, device) for part in most]
        tensors: dict[str, Tensor] = {}
        parts: list[Tensor] = []
        total, done = sum(_nbytes(rest.reads[group.rank]) for rest in rests), 0

        # layer by layer through the layer's buffer, which is larger than this process's part
        for index, rest in enumerate(rests):
            slot = slots[index % BUFFERS]
            views = slot.views(rest.layout)
            self._read(rest, views)
            first = group.rank * rest.part
            parts.append(slot.bytes[first : first + rest.part].clone())
            tensors |= views
            done += _nbytes(rest.reads[group.rank])
            if progress is not None:
                progress(done, total)

        layers, lane = [layer for _, layer in layers_of(model)], lane_of(torch.device(device))
        came = [(size - 1) * rest.part for rest in rests]
        self.residency = Streamed(layers, came, slots, Peers(self._group, parts), lane)
        return tensors

    def _read(self, rest: Rest, views: Mapping[str, Tensor]) -> None:
        group = self._everyone
        self.rounded += read_part(group, rest.reads[group.rank], views)
        give(Shared(group, [spans_of(placements) for placements in rest.shared]), views)


def rest_names(layer: nn.Module, name: str) -> list[str]:
    """Return the names of a layer's tensors other than routed experts."""
    inside = {
        id(tensor)
        for experts in layer.modules()
        if isinstance(experts, Experts)
        for tensor in [*experts.parameters(), *experts.buffers()]
    }
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return [f"{name}.{own}" for own, tensor in tensors if id(tensor) not in inside]


def rest_bytes(layers: Sequence[nn.Module]) -> list[int]:
    """Return the bytes of a buffer for each layer's non-expert weights. The layers may be on meta."""
    sizes: list[int] = []
    for layer in layers:
        tensors = {f"0.{name}": tensor for name, tensor in layer.state_dict().items()}
        held = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        layout = layout_of([name for name in rest_names(layer, "0") if name in held], held)
        sizes.append(layout_bytes(layout))
    return sizes


def part_bytes(layer: int, size: int) -> int:
    """Return the bytes of a layer that each of `size` processes keeps: a multiple of ALIGN."""
    return -(-layer // (size * ALIGN)) * ALIGN


def rest_of(layout: Layout, placements: Sequence[Placement], size: int) -> Rest:
    """Split a layer's non-expert weights over `size` processes: S bytes each.

    S is a multiple of ALIGN, so that no number is cut.
    """
    part = part_bytes(layout_bytes(layout), size)
    reads: list[list[Placement]] = [[] for _ in range(size)]
    shared_reads: list[list[Placement]] = [[] for _ in range(size)]
    packs: dict[tuple[object, int], int] = {}
    for placement in placements:
        packing = placement.info.packed_from
        if packing is not None or placement.parse is not None or placement.transposed or placement.alias:
            least = min(range(size), key=lambda rank: _nbytes(reads[rank]))
            if packing is not None:  # one process packs a matrix, and has all of its parts
                least = packs.setdefault((packing.source.file, packing.source.offset), least)
            reads[least].append(placement)
            shared_reads[least].append(placement)
            continue
        # the placement fills elements start:stop of its parameter; process r keeps first:last of them
        begin, _, dtype, _ = layout[placement.param]
        numel = placement.info.nbytes // ITEMSIZE[placement.info.dtype]
        for rank in range(size):
            ends = ((edge * part - begin) // dtype.itemsize - placement.start for edge in (rank, rank + 1))
            first, last = (min(max(0, end), numel) for end in ends)
            if first < last:
                whole = last - first == numel
                reads[rank].append(
                    placement if whole else cut_placement(placement, first, last, (last - first,))
                )
    return Rest(layout, part, reads, shared_reads)


def read_by(rests: Sequence[Rest]) -> list[int]:
    """Return the bytes that each process reads of them; [] if there are none."""
    return [sum(map(_nbytes, reads)) for reads in zip(*(rest.reads for rest in rests), strict=True)]


def _nbytes(placements: Sequence[Placement]) -> int:
    return sum(map(bytes_read, placements))
