"""Weights that do not lie on the device: layer by layer they come into two buffers.

    Streaming("disk")   given to place(): it takes the experts' tensors out of what is loaded, and makes
    Streamed            the model's residency (models/blocks/residency.py): told each layer, it waits until
                        that layer's experts are here, and sends for those of the next
    Host, Disk          where they come from; peers.py is a third place, for the other weights

A layer whose experts are larger than a buffer may be comes in groups of them (groups.py), each of
which counts as a layer here.

Layer l always uses buffer l mod 2, so that its tensors are the same objects at every visit; only their memory
changes. While layer l computes, l + 1 arrives; in backward l - 1 does. Where forward turns into backward the
last two layers are still here, and where backward ends the first two are. So of L layers a step's first
micro-batch reads 2 L - 2, each later one, and each of the next steps, 2 L - 4 (L > 2).

All writing goes through views with version counters of their own: autograd would refuse a weight that was
written to since forward, and here the same numbers are written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from unfreeze.checkpoint.reader import TensorReader
from unfreeze.checkpoint.resolve import Params, Placement
from unfreeze.checkpoint.stream import stream
from unfreeze.core.errors import ConfigError
from unfreeze.core.process import give_back_freed
from unfreeze.core.rows import Rows
from unfreeze.core.torch_types import named_modules
from unfreeze.core.units import format_bytes
from unfreeze.models.blocks.experts import Experts, ExpertWeight
from unfreeze.models.blocks.moe import NormedMoE
from unfreeze.models.blocks.residency import Residency
from unfreeze.parallel.machine import hardware
from unfreeze.parallel.placement.groups import InGroups, part_of
from unfreeze.parallel.placement.units import Layout, Unit, layout_bytes, layout_of, units_of
from unfreeze.parallel.processes.lanes import Lane, lane_of, pinned

BUFFERS = 2
# Of the memory that is free: experts that take more on disk than this would push each other out of the page
# cache before they are read again.
CACHED = 0.5

Kept = Literal["host", "disk"]
From = Literal["host", "disk", "peers"]


class WeightSource(Protocol):
    """Where weights come from. Layers are counted among those that have some."""

    name: From

    def begin(self, layer: int, into: Slot) -> Callable[[], object]:
        """Called by who visits, in the program's order: what must be queued in it, as an exchange, is here.

        What it gives is called beside the computation: it fills the layer's tensors in `into`, or on CUDA
        queues that on the current stream.
        """
        ...

    def close(self) -> None: ...


class Slot:
    """The memory of a buffer."""

    def __init__(self, nbytes: int, device: torch.device | str, *, pin: bool = False):
        empty = pinned if pin else torch.empty
        self.bytes = empty(nbytes, dtype=torch.uint8, device=device)

    def views(self, layout: Layout) -> dict[str, Tensor]:
        """The tensors of a layer in this memory, each with a version counter of its own."""
        return {
            name: self.bytes[start : start + size].view(dtype).view(shape).data
            for name, (start, size, dtype, shape) in layout.items()
        }


def streamed_names(layer: nn.Module, name: str) -> list[str]:
    """Names of a layer's tensors that stream: weights of its routed experts, without biases and adapters."""
    return [
        f"{name}.{inner}.{leaf}"
        for inner, experts in named_modules(layer)
        if isinstance(experts, Experts)
        for projection, weight in experts.named_children()
        if isinstance(weight, ExpertWeight)
        for leaf in (
            f"{projection}.{own}" for own, _ in [*weight.named_parameters(), *weight.named_buffers()]
        )
    ]


def streamed_bytes(layers: Sequence[nn.Module]) -> list[int]:
    """Bytes of a buffer that holds each layer's experts, for the layers that have some."""
    sizes: list[int] = []
    for layer in layers:
        tensors = {**dict(layer.named_parameters("0")), **dict(layer.named_buffers("0"))}
        held = {
            name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in streamed_names(layer, "0")
        }
        sizes.append(layout_bytes(layout_of(list(held), held)))
    return [size for size in sizes if size]


def bytes_of_expert(layers: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """Bytes of one expert in each tensor that streams, for the layers that have some."""
    found: list[tuple[int, ...]] = []
    for layer in layers:
        tensors = {**dict(layer.named_parameters("0")), **dict(layer.named_buffers("0"))}
        held = [tensors[name] for name in streamed_names(layer, "0")]
        found.append(tuple(tensor.nbytes // len(tensor) for tensor in held))
    return [sizes for sizes in found if sizes]


def come_whole(layers: Sequence[nn.Module]) -> bool:
    """Whether experts cannot come in groups: a norm's gradient reads what they made."""
    return any(isinstance(module, NormedMoE) for layer in layers for module in layer.modules())


def reads_of(layers: int, *, first: bool) -> int:
    """Layers that come in a forward and backward pass; first: nothing is here before.

    Both turns find BUFFERS layers here: where forward becomes backward, and where the next pass begins.
    """
    return max(layers if first else 0, 2 * layers - BUFFERS * (1 if first else 2))


def buffer_bytes(sizes: Sequence[int]) -> int:
    """Bytes of the buffers: each as large as the largest layer that uses it."""
    return sum(max(sizes[first::BUFFERS], default=0) for first in range(BUFFERS))


@dataclass(frozen=True)
class Transfers:
    """What came since they were last asked for.

    seconds  that transfers took, and waited: of them those in which nothing was computed
    """

    reads: int
    bytes: int
    seconds: float
    waited: float

    @property
    def hidden(self) -> float | None:
        """Share of the transfers under computation; None where nothing came."""
        return max(0.0, 1 - self.waited / self.seconds) if self.seconds else None


class Streamed:
    """A residency with two buffers. `poison`, for tests: fill a buffer that nobody may read with NaN."""

    poison = False

    def __init__(
        self,
        layers: Sequence[object],
        sizes: Sequence[int],
        slots: Sequence[Slot],
        source: WeightSource,
        lane: Lane,
    ):
        self.source = source
        self.reads = 0
        self._index = {id(layer): index for index, layer in enumerate(layers)}
        self._layers = list(layers)  # their ids stay theirs
        self._sizes, self._slots, self._lane = sizes, slots, lane
        self._holds: list[tuple[int, Future[Any]] | None] = [None] * BUFFERS
        self._last = 0
        self._worker = ThreadPoolExecutor(1, "layers", lane.begin_thread)
        self._came: list[tuple[int, Future[Any]]] = []
        self._waits: list[tuple[Any, Any]] = []

    def visit(self, layer: object) -> None:
        """Wait until the layer's experts are here, and send for the next layer's.

        Raises CheckpointError where they cannot be read.
        """
        index = self._index.get(id(layer))
        if index is None:
            return
        ready = self._send_for(index)
        before = self._lane.mark()
        try:
            _, arrived = ready.result()
        except BaseException:
            self._holds[index % BUFFERS] = None  # asked again, it is read again
            raise
        self._lane.follow(arrived)
        self._waits.append((before, self._lane.mark()))
        following = self._following(index)
        self._last = index
        if following is not None:
            self._send_for(following)

    def take(self) -> Transfers:
        """What came since the last call. On CUDA it waits for the copies that are under way."""
        came, waits = self._came, self._waits
        self._came, self._waits = [], []
        between = self._lane.between
        # one that is still coming is counted with the next
        self._came += [(index, future) for index, future in came if not future.done()]
        done = [
            (index, future.result()) for index, future in came if future.done() and not future.exception()
        ]
        return Transfers(
            reads=len(done),
            bytes=sum(self._sizes[index] for index, _ in done),
            seconds=sum(between(begun, arrived) for _, (begun, arrived) in done),
            waited=sum(between(*wait) for wait in waits),
        )

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self.source.close()

    def _following(self, index: int) -> int | None:
        """The layer after this one in the direction of travel.

        At the first it is the second, and at the last the one before: that is where a pass turns, or begins.
        """
        last = len(self._sizes) - 1
        if last == 0:
            return None
        if index in (0, last):
            return 1 if index == 0 else last - 1
        return index - 1 if index < self._last else index + 1

    def _send_for(self, index: int) -> Future[Any]:
        """The layer in its buffer, or on its way there."""
        held = self._holds[index % BUFFERS]
        if held is not None and held[0] == index:
            return held[1]
        slot = self._slots[index % BUFFERS]
        self._holds[index % BUFFERS] = None
        if held is not None:
            # What was sent for and not visited, where a pass ended, may still be coming: a gather is under
            # way from `begin` on, and gloo's threads finish two in any order. It would overwrite this layer.
            held[1].exception()
        if self.poison:
            slot.bytes.fill_(0xFF)
        free = self._lane.mark()  # all that reads what the buffer held was queued before
        with self._lane.copying(free):
            bring = self.source.begin(index, slot)
        future = self._worker.submit(self._bring, bring, free)
        self._holds[index % BUFFERS] = index, future
        self._came.append((index, future))
        self.reads += 1
        return future

    def _bring(self, bring: Callable[[], object], free: Any) -> tuple[Any, Any]:
        with self._lane.copying(free):
            begun = self._lane.mark()
            bring()
            return begun, self._lane.mark()


class Together:
    """Several residencies as one: each layer is visited in all of them, in their order."""

    def __init__(self, *parts: Streamed):
        self.parts = parts

    def visit(self, layer: nn.Module) -> None:
        for part in self.parts:
            part.visit(layer)


def streams_of(residency: Residency) -> list[Streamed]:
    """What of a model's weights comes layer by layer; nothing where all of them are here."""
    if isinstance(residency, Together):
        return list(residency.parts)
    return [residency] if isinstance(residency, Streamed) else []


class Streaming:
    """For place(): which tensors stream, where from, and the residency that follows.

    buffer: bytes that a buffer may have; a larger layer comes in groups. None: the largest layer's.
    Raises ConfigError where the model has no routed experts, or they train.
    """

    def __init__(self, kept: Kept, buffer: int | None = None):
        self.kept: Kept = kept
        self.buffer = buffer
        self.residency: Streamed | None = None

    def names(self, model: nn.Module, params: Params) -> frozenset[str]:
        """Of `params`, what streams."""
        return frozenset(
            name
            for place, layer in layers_of(model)
            for name in streamed_names(layer, place)
            if name in params
        )

    def take(
        self, model: nn.Module, placements: Sequence[Placement], params: Params, device: torch.device | str
    ) -> dict[str, Tensor]:
        """name -> tensor of what streams, in memory that its layer shares with others.

        placements: of all of `params`. Those of a packed weight's extras are left to the load, which compares
        them.
        """
        found = {
            layer: [name for name in streamed_names(layer, place) if name in params]
            for place, layer in layers_of(model)
        }
        layers = {layer: names for layer, names in found.items() if names}
        if not layers:
            raise ConfigError(
                f"place.experts is {self.kept}, and this model has no routed experts that could stream",
                next="--place.experts auto",
            )

        if self.kept == "disk" and torch.device(device).type == "cpu":
            give_back_freed()

        # two buffers, as large as the layers, or groups, that use them
        by_layer = {layer: units_of(layer, names, params, self.buffer) for layer, names in layers.items()}
        units = [unit for theirs in by_layer.values() for unit in theirs]
        layouts = [unit.layout for unit in units]
        sizes = [layout_bytes(layout) for layout in layouts]
        lane = lane_of(torch.device(device))
        slots = [Slot(max(sizes[first::BUFFERS], default=0), device) for first in range(BUFFERS)]
        views = [slots[index % BUFFERS].views(unit.layout) for index, unit in enumerate(units)]
        tensors: dict[str, Tensor] = {}
        for unit, own in zip(units, views, strict=True):
            for name, view in zip(unit.names, own.values(), strict=True):
                # of a layer in groups the parameter only says shape and dtype: all its experts are one
                tensors[name] = view if unit.rows is None else view[:1].expand(params[name][1])
        held = dict(zip((id(unit) for unit in units), views, strict=True))
        for place, layer in layers_of(model):
            if len(theirs := by_layer.get(layer, [])) > 1:
                self._in_groups(place, layer, theirs, [held[id(unit)] for unit in theirs])

        # where they come from
        of_name: dict[str, list[Placement]] = {}
        for placement in placements:
            if placement.expected is None:
                of_name.setdefault(placement.param, []).append(placement)
        by_unit = [unit.placements(of_name, params) for unit in units]
        source = (
            Host(by_unit, layouts, sizes, lane.pins)
            if self.kept == "host"
            else ExpertsOnDisk(by_unit, layouts, slots, lane)
        )
        on_disk = [sum(p.info.nbytes for p in unit) for unit in by_unit]
        self.residency = Streamed([unit.key for unit in units], on_disk, slots, source, lane)
        return tensors

    def _in_groups(
        self, place: str, layer: nn.Module, units: Sequence[Unit], views: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Let the layer's experts go through its rows group by group."""
        inner, experts = next((name, m) for name, m in named_modules(layer) if isinstance(m, Experts))
        reads = come_whole([layer])
        if reads or experts.dispatch is not None:
            why = "a norm reads what its experts made" if reads else "place.split divides its experts"
            raise ConfigError(
                f"{place}'s experts are larger than a buffer of {format_bytes(self.buffer or 0)}, and cannot"
                f" come in groups: {why}",
                next="a machine with more memory",
            )
        cut = len(f"{place}.{inner}.")

        def parts() -> list[tuple[Rows, Experts]]:
            return [
                (
                    unit.rows,
                    part_of(
                        experts,
                        unit.rows,
                        {name[cut:]: view for name, view in zip(unit.names, own.values(), strict=True)},
                    ),
                )
                for unit, own in zip(units, views, strict=True)
                if unit.rows is not None
            ]

        def visit(group: int) -> None:
            assert self.residency is not None
            self.residency.visit(units[group].key)

        experts.dispatch = InGroups(parts, experts.num_experts, visit)


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, layer) of a decoder's layers in their order."""
    name, layers = next((name, m) for name, m in named_modules(model) if isinstance(m, nn.ModuleList))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


class Host:
    """All experts in host memory, page-locked where a GPU copies from it."""

    name: From = "host"

    def __init__(
        self,
        by_layer: Sequence[Sequence[Placement]],
        layouts: Sequence[Layout],
        sizes: Sequence[int],
        pin: bool,
    ):
        self._layers = [Slot(size, "cpu", pin=pin) for size in sizes]
        tensors = {
            name: tensor
            for slot, layout in zip(self._layers, layouts, strict=True)
            for name, tensor in slot.views(layout).items()
        }
        stream([placement for layer in by_layer for placement in layer], tensors)

    def begin(self, layer: int, into: Slot) -> Callable[[], object]:
        held = self._layers[layer].bytes
        return lambda: into.bytes[: len(held)].copy_(held, non_blocking=True)

    def close(self) -> None:
        pass


class ExpertsOnDisk:
    """All experts in their files, read at each visit.

    For a CPU straight into the buffer, for a GPU through one layer's worth of page-locked memory.
    """

    name: From = "disk"

    def __init__(
        self,
        by_layer: Sequence[Sequence[Placement]],
        layouts: Sequence[Layout],
        slots: Sequence[Slot],
        lane: Lane,
    ):
        on_disk = sum(placement.info.nbytes for layer in by_layer for placement in layer)
        self._reader = TensorReader(forget=on_disk > CACHED * hardware("cpu").available)
        self._lane = lane
        self._staging = Slot(max(map(layout_bytes, layouts)), "cpu", pin=True) if lane.pins else None
        self._sizes = [layout_bytes(layout) for layout in layouts]
        self._parts = [
            self._reader.part(placements, (self._staging or slots[index % BUFFERS]).views(layout))
            for index, (placements, layout) in enumerate(zip(by_layer, layouts, strict=True))
        ]

    def begin(self, layer: int, into: Slot) -> Callable[[], object]:
        return lambda: self._bring(layer, into)

    def _bring(self, layer: int, into: Slot) -> None:
        self._parts[layer].read()
        if self._staging is not None:
            size = self._sizes[layer]
            into.bytes[:size].copy_(self._staging.bytes[:size], non_blocking=True)
            self._lane.settle()  # before the next layer is read over it

    def close(self) -> None:
        self._reader.close()
