"""Where the parts of a run may lie: as asked, or what "auto" tries in its order. The rest is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import ConfigError
from unfreeze.core.torchrun import started
from unfreeze.core.units import format_bytes
from unfreeze.job.trained import Trained

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Shape
    from unfreeze.parallel.plan import Plan

PLACES = ("device", "host", "disk")
OF_CONFIG = 0  # a buffer of the bytes that the config says, or of as many as fit
SHARDED = "sharded"  # every weight trains, and is divided among the processes


class Where(NamedTuple):
    """Where weights lie.

    experts   one of PLACES, or SHARDED
    split     processes that share one set of experts
    rest      of what a layer has besides: "device", or "peers", of which each keeps a part
    boundary  "device" or "host": of the inputs of layers
    optimizer "device" or "host": of the adapters' moments
    buffer    bytes that a buffer of experts may have, or OF_CONFIG; None: as many as a layer's
    """

    experts: str
    split: int = 1
    rest: str = "device"
    boundary: str = "device"
    buffer: int | None = None
    optimizer: str = "device"


def place_of(plan: Plan) -> Where:
    """Where a plan's weights lie."""
    work = plan.work
    experts = SHARDED if work.divided else work.experts
    return Where(experts, work.split, work.rest, work.boundary, work.buffer, work.optimizer)


def possible_places(
    config: TrainingConfig,
    trained: Trained,
    start: Manifest,
    shape: Shape,
    device: torch.device,
    processes: int = 1,
) -> list[Where]:
    """Where the experts' weights may lie, how many processes may share them, and whether peers may keep the
    rest; where every weight trains, whether all may be divided. Whether the inputs of layers, and the
    adapters' moments, may lie in host memory. As asked, or with "auto" all that can be, in the order of their
    speed: a layer's input is small beside what else could move, moments move once a step, and a layer's
    experts come in groups where they do not fit together.

    Raises ConfigError where they are asked to stream, to come in groups, to be split, to be kept in parts, to
    be divided or to lie in host memory, and cannot.
    """
    weights = possible_weights(config, trained, processes)
    rests = possible_rests(config, trained, start, processes)
    splits = possible_splits(config, trained, shape, processes)
    boundaries = possible_boundaries(config, trained, device)
    optimizers = possible_optimizers(config, trained, device)
    shared = [split for split in splits if split > 1]
    asked = config.place.experts
    if not shape.num_experts:
        fault = "this model has no routed experts"
    elif trained.lora is None:
        fault = "every weight trains, and what trains lies on the device"
    elif not start.tensors:
        fault = f"{start.path} has no weights that could be read"
    else:
        places = PLACES if asked == "auto" else (asked,)
        places = [place for place in places if asked != "auto" or place != "host" or device.type == "cuda"]
        # what streams does not fit into each process, so it is shared where that is possible
        grouped = possible_buffers(config, places, splits)
        whole = config.place.buffer == "auto"
        return [
            Where(place, split, rest, boundary, buffer, optimizer)
            for place in places
            for buffer in ([None] if place == "device" else [None] * whole + grouped)
            for rest in rests
            for split in (splits if place == "device" else [1] if buffer is not None else shared or splits)
            for optimizer in optimizers
            for boundary in boundaries
        ]
    if asked in ("host", "disk"):
        raise ConfigError(f"place.experts is {asked}, but {fault}", next="--place.experts auto")
    if config.place.buffer != "auto":
        raise ConfigError(f"place.buffer is {config.place.buffer:g}, but {fault}", next="--place.buffer auto")
    if trained.lora is None:
        return [Where(SHARDED if held == "sharded" else "device") for held in weights]
    return [
        Where("device", split, rest, boundary, optimizer=optimizer)
        for split, rest, optimizer, boundary in product(splits, rests, optimizers, boundaries)
    ]


def possible_buffers(
    config: TrainingConfig, places: Sequence[str], splits: Sequence[int]
) -> list[int | None]:
    """[OF_CONFIG] where a layer's experts may come in groups, else []: those of split experts come whole.

    Raises ConfigError where a buffer of so many bytes is asked for and nothing could use it.
    """
    asked = config.place.buffer
    if asked != "auto" and places == ["device"]:
        fault, remedy = "place.experts is device: nothing comes through a buffer", "--place.experts auto"
    elif asked != "auto" and 1 not in splits:
        fault = f"place.split is {splits[0]}: experts that processes share come a layer at a time"
        remedy = "--place.split 1"
    else:
        return [OF_CONFIG] if 1 in splits else []
    raise ConfigError(f"place.buffer is {asked:g}, but {fault}", next=f"{remedy}, or --place.buffer auto")


def possible_rests(config: TrainingConfig, trained: Trained, start: Manifest, processes: int) -> list[str]:
    """Where the frozen weights besides routed experts may lie: as asked, or with "auto" on each device, then
    in parts on all.

    Raises ConfigError where they are asked to be kept in parts and cannot.
    """
    asked = config.place.rest
    if processes == 1:
        fault, remedy = "there is one process: it has no peers", "torchrun --nproc-per-node 2, or "
    elif trained.lora is None:
        fault, remedy = "every weight trains", "--place.weights sharded, or "
    elif not start.tensors:
        fault, remedy = f"{start.path} has no weights that could be read", ""
    else:
        return ["device", "peers"] if asked == "auto" else [asked]
    if asked == "peers":
        raise ConfigError(f"place.rest is peers, but {fault}", next=f"{remedy}--place.rest auto")
    return ["device"]


def possible_boundaries(config: TrainingConfig, trained: Trained, device: torch.device) -> list[str]:
    """Where the inputs of layers may lie until backward: as asked, or with "auto" on the device, then in host
    memory (CUDA).

    Raises ConfigError where they are asked into host memory and cannot lie there.
    """
    asked, remedy = config.place.boundary, "--place.boundary auto"
    if device.type != "cuda":
        fault = "the device is a CPU: its memory is the host's"
    elif trained.lora is None:
        fault = "every weight trains, and then nothing leaves the device"
    elif config.memory.recompute == "nothing":
        fault, remedy = "recompute is nothing: no layer keeps its input alone", "--recompute layers"
    else:
        return ["device", "host"] if asked == "auto" else [asked]
    if asked == "host":
        raise ConfigError(f"place.boundary is host, but {fault}", next=remedy)
    return ["device"]


def possible_optimizers(config: TrainingConfig, trained: Trained, device: torch.device) -> list[str]:
    """Where the adapters' moments may lie between updates: as asked, or with "auto" on the device, then in
    host memory (CUDA).

    Raises ConfigError where they are asked into host memory and cannot lie there.
    """
    asked = config.place.optimizer
    if device.type != "cuda":
        fault = "the device is a CPU: its memory is the host's"
    elif trained.lora is None:
        fault = "every weight trains, and then nothing leaves the device"
    else:
        return ["device", "host"] if asked == "auto" else [asked]
    if asked == "host":
        raise ConfigError(f"place.optimizer is host, but {fault}", next="--place.optimizer auto")
    return ["device"]


def possible_weights(config: TrainingConfig, trained: Trained, processes: int) -> list[str]:
    """How the weights may be held where every weight trains: as asked, or with "auto" whole, then divided.

    Raises ConfigError where they are asked to be divided and cannot.
    """
    asked = config.place.weights
    fault = ""
    if trained.lora is not None:
        fault = "adapters are trained, and only weights that train are divided"
    elif processes == 1:
        fault = "there is one process"
    if not fault:
        return ["device", "sharded"] if asked == "auto" else [asked]
    if asked == "sharded":
        raise ConfigError(
            f"place.weights is sharded, but {fault}",
            next="--place.weights auto"
            + (", or torchrun --nproc-per-node 2" if processes == 1 and trained.lora is None else ""),
        )
    return ["device"]


def possible_splits(config: TrainingConfig, trained: Trained, shape: Shape, processes: int) -> list[int]:
    """How many processes may share one set of experts: as asked, or with "auto" 1 and what divides those of a
    host, so that rows of tokens stay inside it.

    Raises ConfigError, before anything is planned or loaded, for a split that cannot be.
    """
    split = config.place.split
    if split == "auto":
        if trained.lora is None or not shape.num_experts:
            return [1]
        here = started().on_node if started().size > 1 else processes
        return [n for n in range(1, min(here, shape.num_experts) + 1) if here % n == 0 and processes % n == 0]
    if split > 1 and trained.lora is None:
        raise ConfigError(
            f"place.split is {split}, but every weight trains, and those are not split by experts",
            next="--place.split 1, or --train adapters",
        )
    if split > 1:
        from unfreeze.parallel.mesh import check_split

        check_split(split, processes, shape.num_experts)
    return [split]


def place_words(plan: Plan) -> str:
    """Of a plan that was tried: device; device, split over 4; device, the rest from peers."""
    split = f", split over {plan.work.split}" if plan.work.split > 1 else ""
    rest = ", the rest from peers" if plan.work.rest == "peers" else ""
    boundary = ", inputs of layers in host memory" if plan.work.boundary == "host" else ""
    groups = f" in groups of {format_bytes(plan.work.buffer)}" if plan.work.buffer else ""
    moments = ", moments in host memory" if plan.work.optimizer == "host" else ""
    return f"{plan.work.experts}{groups}{split}{rest}{boundary}{moments}"
