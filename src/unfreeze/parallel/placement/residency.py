"""Offloaded weights: prefetched layer by layer into two buffers on the device.

Streaming("disk")   passed to place(): it takes the experts' tensors out of what is loaded, and creates
Streamed            the model's residency (models/blocks/residency.py): called before each layer, it waits
                    until that layer's experts have arrived, and prefetches the next layer's
Host, Disk          the sources; peers.py is a third one, for the other weights

A layer whose experts exceed the buffer size is loaded in groups of experts (groups.py), each of which counts
as a layer here.

Layer l always uses buffer l mod 2, so its tensors are the same objects at every visit, and only their memory
changes. While layer l computes, l + 1 arrives; in backward, l - 1 does. When forward turns into backward the
last two layers are still loaded, and when backward ends the first two are. So of L layers, the run's first
micro-batch reads 2 L - 2, and each later one, also of the next steps, 2 L - 4 (L > 2).

All writes go through views with their own version counters: autograd would refuse a weight that was written
since forward, and here the same values are written again.
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
from unfreeze.models.blocks.chain import Again
from unfreeze.models.blocks.experts import Experts, ExpertWeight
from unfreeze.models.blocks.moe import NormedMoE
from unfreeze.models.blocks.residency import Residency
from unfreeze.parallel.machine import hardware
from unfreeze.parallel.placement.groups import InGroups, part_of
from unfreeze.parallel.placement.units import Layout, Unit, layout_bytes, layout_of, units_of
from unfreeze.parallel.processes.lanes import Lane, lane_of, pinned

BUFFERS = 2
# Share of the free memory: experts that take more on disk than this would evict each other from the page
# cache before they are read again.
CACHED = 0.5

Kept = Literal["host", "disk"]
From = Literal["host", "disk", "peers"]


class WeightSource(Protocol):
    """A source of weights. Layers are numbered among those that have such weights."""

    name: From

    def begin(self, layer: int, into: Slot) -> Callable[[], object]:
        """Start loading a layer; called in program order by the visitor. Exchanges must be queued here.

        The returned function is called beside the computation. It fills the layer's tensors in `into`, or on
        CUDA queues that on the current stream.
        """
        ...

    def close(self) -> None: ...


class Slot:
    """The memory of one buffer."""

    def __init__(self, nbytes: int, device: torch.device | str, *, pin: bool = False):
        empty = pinned if pin else torch.empty
        self.bytes = empty(nbytes, dtype=torch.uint8, device=device)

    def views(self, layout: Layout) -> dict[str, Tensor]:
        """Return a layer's tensors in this memory, each with its own version counter."""
        return {
            name: self.bytes[start : start + size].view(dtype).view(shape).data
            for name, (start, size, dtype, shape) in layout.items()
        }


def streamed_names(layer: nn.Module, name: str) -> list[str]:
    """Return the names of a layer's offloaded tensors: routed experts' weights, not biases or adapters."""
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
    """Return the buffer bytes for each layer's experts, for the layers that have some."""
    sizes: list[int] = []
    for layer in layers:
        tensors = {**dict(layer.named_parameters("0")), **dict(layer.named_buffers("0"))}
        held = {
            name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in streamed_names(layer, "0")
        }
        sizes.append(layout_bytes(layout_of(list(held), held)))
    return [size for size in sizes if size]


def bytes_of_expert(layers: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """Return the bytes of one expert in each offloaded tensor, for the layers that have experts."""
    by_layer: list[tuple[int, ...]] = []
    for layer in layers:
        tensors = {**dict(layer.named_parameters("0")), **dict(layer.named_buffers("0"))}
        held = [tensors[name] for name in streamed_names(layer, "0")]
        by_layer.append(tuple(tensor.nbytes // len(tensor) for tensor in held))
    return [sizes for sizes in by_layer if sizes]


def come_whole(layers: Sequence[nn.Module]) -> bool:
    """Return True if experts cannot be loaded in groups, because something in the layer reads their output.

    A norm's gradient reads it, or the next pass of a chain.
    """
    return any(isinstance(module, NormedMoE | Again) for layer in layers for module in layer.modules())


def reads_of(layers: int, *, first: bool) -> int:
    """Return the number of layers loaded in a forward and backward pass; first: nothing is loaded before.

    At both turns BUFFERS layers are already loaded: from forward to backward, and at the start of the next
    pass.
    """
    return max(layers if first else 0, 2 * layers - BUFFERS * (1 if first else 2))


def buffer_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the buffers: each as large as the largest layer that uses it."""
    return sum(max(sizes[first::BUFFERS], default=0) for first in range(BUFFERS))


@dataclass(frozen=True)
class Transfers:
    """The loads since the last query.

    seconds  spent on transfers, and waited: those of them without computation
    """

    reads: int
    bytes: int
    seconds: float
    waited: float

    @property
    def hidden(self) -> float | None:
        """Share of the transfer time hidden behind computation; None if nothing was loaded."""
        return max(0.0, 1 - self.waited / self.seconds) if self.seconds else None


class Streamed:
    """A residency with two buffers.

    `poison`, for tests: fill a buffer that must not be read with NaN.
    """

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
        self._layers = list(layers)  # keep references, so that ids stay unique
        self._sizes, self._slots, self._lane = sizes, slots, lane
        self._holds: list[tuple[int, Future[Any]] | None] = [None] * BUFFERS
        self._last = 0
        self._worker = ThreadPoolExecutor(1, "layers", lane.begin_thread)
        self._came: list[tuple[int, Future[Any]]] = []
        self._waits: list[tuple[Any, Any]] = []

    def visit(self, layer: object) -> None:
        """Wait until the layer's experts have arrived, and prefetch the next layer's.

        Raises CheckpointError if they cannot be read.
        """
        index = self._index.get(id(layer))
        if index is None:
            return
        ready = self._send_for(index)
        before = self._lane.mark()
        try:
            _, arrived = ready.result()
        except BaseException:
            self._holds[index % BUFFERS] = None  # a retry reads it again
            raise
        self._lane.follow(arrived)
        self._waits.append((before, self._lane.mark()))
        following = self._following(index)
        self._last = index
        if following is not None:
            self._send_for(following)

    def take(self) -> Transfers:
        """Return the loads since the last call. On CUDA this waits for copies in progress."""
        came, waits = self._came, self._waits
        self._came, self._waits = [], []
        between = self._lane.between
        # one still in transit is counted next time
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
        """Return the next layer in the current direction.

        At the first layer it is the second, and at the last the one before it: a pass turns or starts there.
        """
        last = len(self._sizes) - 1
        if last == 0:
            return None
        if index in (0, last):
            return 1 if index == 0 else last - 1
        return index - 1 if index < self._last else index + 1

    def _send_for(self, index: int) -> Future[Any]:
        """Start loading the layer into its buffer, unless it is there already."""
        held = self._holds[index % BUFFERS]
        if held is not None and held[0] == index:
            return held[1]
        slot = self._slots[index % BUFFERS]
        self._holds[index % BUFFERS] = None
        if held is not None:
            # A layer that was prefetched but not visited before the pass ended may still be arriving. A
            # gather runs from `begin` on, and gloo's threads may finish two in any order. It would overwrite
            # this layer.
            held[1].exception()
        if self.poison:
            slot.bytes.fill_(0xFF)
        free = self._lane.mark()  # all reads of the buffer's old contents are queued before this
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
    """Several residencies as one: each layer is visited in all of them, in order."""

    def __init__(self, *parts: Streamed):
        self.parts = parts

    def visit(self, layer: nn.Module) -> None:
        for part in self.parts:
            part.visit(layer)


def streams_of(residency: Residency) -> list[Streamed]:
    """Return the parts of a model's weights that are loaded layer by layer; empty if all are resident."""
    if isinstance(residency, Together):
        return list(residency.parts)
    return [residency] if isinstance(residency, Streamed) else []


class Streaming:
    """For place(): which tensors are offloaded, where to, and the resulting residency.

    buffer: maximum bytes of a buffer; a larger layer is loaded in groups. None: the largest layer's size.
    Raises ConfigError if the model has no routed experts, or if they are trained.
    """

    def __init__(self, kept: Kept, buffer: int | None = None):
        self.kept: Kept = kept
        self.buffer = buffer
        self.residency: Streamed | None = None

    def names(self, model: nn.Module, params: Params) -> frozenset[str]:
        """Return the names in `params` that are offloaded."""
        return frozenset(
            name
            for place, layer in layers_of(model)
            for name in streamed_names(layer, place)
            if name in params
        )

    def take(
        self, model: nn.Module, placements: Sequence[Placement], params: Params, device: torch.device | str
    ) -> dict[str, Tensor]:
        """Return name -> tensor for offloaded weights, in memory that its layer shares with others.

        placements: of all of `params`. Those of a packed weight's extras are left to the load, which compares
        them.
        """
        by_name = {
            layer: [name for name in streamed_names(layer, place) if name in params]
            for place, layer in layers_of(model)
        }
        layers = {layer: names for layer, names in by_name.items() if names}
        if not layers:
            raise ConfigError(
                f"place.experts is {self.kept}, and this model has no routed experts to offload",
                next="--place.experts auto",
            )

        if self.kept == "disk" and torch.device(device).type == "cpu":
            give_back_freed()

        # two buffers, as large as the largest layer or group that uses them
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
                # for a layer in groups, the parameter only provides shape and dtype: all its experts are one
                tensors[name] = view if unit.rows is None else view[:1].expand(params[name][1])
        held = dict(zip((id(unit) for unit in units), views, strict=True))
        for place, layer in layers_of(model):
            if len(theirs := by_layer.get(layer, [])) > 1:
                self._in_groups(place, layer, theirs, [held[id(unit)] for unit in theirs])

        # the source
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
        """Run the layer's experts on its rows group by group."""
        inner, experts = next((name, m) for name, m in named_modules(layer) if isinstance(m, Experts))
        reads = come_whole([layer])
        if reads or experts.dispatch is not None:
            why = "a norm reads its experts' output" if reads else "place.split divides its experts"
            raise ConfigError(
                f"{place}'s experts are larger than a buffer of {format_bytes(self.buffer or 0)}, and cannot"
                f" be loaded in groups: {why}",
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
    """Return (name, layer) of a decoder's layers, in order."""
    name, layers = next((name, m) for name, m in named_modules(model) if isinstance(m, nn.ModuleList))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


class Host:
    """All experts in host memory, page-locked if a GPU copies from it."""

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

    For a CPU they are read straight into the buffer; for a GPU, through page-locked memory the size of one
    layer.
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
            self._lane.settle()  # before the next layer's data overwrites it

    def close(self) -> None:
        self._reader.close()
