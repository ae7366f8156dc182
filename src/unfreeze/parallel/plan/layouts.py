"""Expand a requested layout to the layouts a machine can have, fastest first; refuse impossible ones.

A run uses the first that fits; a plan for another machine predicts the seconds of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import RESIDENT, Layout

MANY = "--hardware with several devices, or "


@dataclass(frozen=True)
class Facts:
    """Facts that determine the possible layouts.

    kind          of device: "cpu" or "cuda"
    processes     one per device
    num_experts   per layer; 0: it has none
    every_weight  True if every weight trains, not adapters
    frozen        True if some weights stay frozen even then
    splits        how many processes may share one set of experts, if "auto" leaves that open
    files         True if there are weights on disk to stream
    model         its path, for messages
    more          the flag that gives a run more processes
    host          True if there is host memory beside the device's
    unbuilt       True to include layouts that no run can have yet
    packs         if weights are packed while they are loaded: the command that writes them packed
    """

    kind: str
    processes: int
    num_experts: int
    every_weight: bool
    splits: tuple[int, ...] = (1,)
    files: bool = True
    model: str = ""
    more: str = "torchrun --nproc-per-node 2, or "
    host: bool = True
    unbuilt: bool = False
    frozen: bool = False
    packs: str = ""


def layouts(wish: Layout, facts: Facts) -> list[Layout]:
    """Return every layout that the request allows on that machine, fastest first.

    recompute stays as requested. Layer inputs are small compared to what else could be offloaded, moments
    move once per step, and a layer's experts are loaded in groups if they do not fit together. `buffer`
    "auto":
    groups
    as large as fit.

    Raises ConfigError for an impossible request, before anything is read.
    """
    if facts.every_weight:
        _refuse_every_weight(wish)
    weights = _weights(wish, facts)
    splits, rests = _splits(wish, facts), _rests(wish, facts)
    places, states, boundaries = _experts(wish, facts), _states(wish, facts), _boundaries(wish, facts)
    shared = [split for split in splits if split > 1]
    candidates: list[Layout] = []
    for experts in places:
        for buffer in _buffers(wish, facts, experts, places, splits):
            # offloaded experts do not fit into each process, so they are shared if possible
            by = splits if experts == "device" or facts.unbuilt else [1] if buffer else shared or splits
            for rest, split, state, boundary, held in product(rests, by, states, boundaries, weights):
                candidates.append(
                    wish.but(
                        experts=experts,
                        buffer=buffer,
                        split=split,
                        weights=held,
                        rest=rest,
                        boundary=boundary,
                        **state,
                    )
                )
    return candidates


def _experts(wish: Layout, facts: Facts) -> list[str]:
    """Return the possible places for routed experts."""
    fault = ""
    if not facts.num_experts:
        fault = "this model has no routed experts"
    elif not facts.files:
        fault = f"{facts.model} has no weights that could be read"
    if fault:
        if wish.experts in ("host", "disk"):
            raise ConfigError(f"place.experts is {wish.experts}, but {fault}", next="--place.experts auto")
        if wish.buffer not in ("auto", 0):
            raise ConfigError(f"place.buffer is {wish.buffer:g}, but {fault}", next="--place.buffer auto")
        return ["device"]
    if facts.every_weight:
        return ["device"]
    if facts.packs and wish.experts == "disk":
        raise ConfigError(
            "place.experts is disk, but quantize packs the experts while they are loaded: disk has none so",
            next=f"{facts.packs} --out DIR, and --model DIR",
        )
    if wish.experts == "auto":
        on_disk = ["disk"] * (not facts.packs)
        return ["device", *["host"] * (facts.kind == "cuda" and facts.host), *on_disk]
    if facts.unbuilt and facts.kind == "cpu" and wish.experts == "host":
        _refuse_host("experts", facts)
    return [wish.experts]


def _buffers(wish: Layout, facts: Facts, experts: str, places: list[str], splits: list[int]) -> Iterator[Any]:
    """Return the possible buffers. 0: a layer's experts are loaded at once; a size or "auto": in groups.

    Split experts are loaded whole. Raises ConfigError if a buffer is requested that nothing could use.
    """
    requested = wish.buffer
    if requested not in ("auto", 0) and places == ["device"]:
        fault, remedy = "place.experts is device: nothing uses a buffer", "--place.experts auto"
        raise ConfigError(
            f"place.buffer is {requested:g}, but {fault}", next=f"{remedy}, or --place.buffer auto"
        )
    if requested not in ("auto", 0) and 1 not in splits and not facts.unbuilt:
        fault = f"place.split is {splits[0]}: experts shared by processes are loaded a whole layer at a time"
        remedy = "--place.split 1, or --place.buffer auto"
        raise ConfigError(f"place.buffer is {requested:g}, but {fault}", next=remedy)
    if experts == "device" or requested in ("auto", 0):
        yield 0.0
    if experts != "device" and requested != 0 and (1 in splits or facts.unbuilt):
        yield requested


def _rests(wish: Layout, facts: Facts) -> list[str]:
    """Return the possible places for frozen non-expert weights: on each device, then sharded over all."""
    if facts.processes == 1:
        fault, remedy = "there is only one process, which has no peers", facts.more
    elif facts.every_weight:
        fault, remedy = "every weight trains", "--place.weights sharded, or "
    elif not facts.files:
        fault, remedy = f"{facts.model} has no weights that could be read", ""
    else:
        fault, remedy = "", ""
    if wish.rest == "peers" and fault:
        raise ConfigError(f"place.rest is peers, but {fault}", next=f"{remedy}--place.rest auto")
    if wish.rest == "host":
        _refuse_unbuilt("rest", wish, facts)
    if wish.rest != "auto":
        return [wish.rest]
    unbuilt = facts.unbuilt and facts.kind == "cuda" and facts.host and not facts.every_weight
    return ["device", *["peers"] * (not fault), *["host"] * unbuilt]


def _boundaries(wish: Layout, facts: Facts) -> list[str]:
    """Return the possible places for layer inputs until backward: device, then host memory (CUDA)."""
    if wish.boundary == "host":
        _refuse_host("boundary", facts)
        if wish.recompute == "nothing":
            fault = "recompute is nothing: no layer keeps only its input"
            raise ConfigError(f"place.boundary is host, but {fault}", next="--place.recompute layers")
    free = facts.kind == "cuda" and facts.host and not facts.every_weight and wish.recompute != "nothing"
    return [wish.boundary] if wish.boundary != "auto" else ["device", *["host"] * free]


def _states(wish: Layout, facts: Facts) -> list[dict[str, str]]:
    """Return the possible places for adapters and (between updates) their moments: device, then host."""
    if wish.optimizer == "host":
        _refuse_host("optimizer", facts)
    if wish.adapters == "host":
        _refuse_unbuilt("adapters", wish, facts)
    free = facts.kind == "cuda" and facts.host and not facts.every_weight
    both = [
        ("device", "device"),
        *[("device", "host")] * free,
        *[("host", "host")] * (free and facts.unbuilt),
    ]
    if wish.adapters == "host":
        both = [("host", "host")]
    elif wish.adapters == "device":
        both = [each for each in both if each[0] == "device"]
    if wish.optimizer != "auto":
        both = [each for each in both if each[1] == wish.optimizer]
    return [{"adapters": adapters, "optimizer": optimizer} for adapters, optimizer in both]


def _weights(wish: Layout, facts: Facts) -> list[str]:
    """Return how weights may be held if every weight trains: replicated, then sharded."""
    fault = ""
    if not facts.every_weight:
        fault = "adapters are trained, and only trained weights can be sharded"
    elif facts.frozen:
        fault = "this model's indexer stays frozen, and only trained weights can be sharded"
    elif facts.processes == 1:
        fault = "there is one process"
    if not fault:
        return ["device", "sharded"] if wish.weights == "auto" else [wish.weights]
    if wish.weights == "sharded":
        remedy = facts.more if facts.every_weight and not facts.frozen else ""
        raise ConfigError(f"place.weights is sharded, but {fault}", next=f"{remedy}--place.weights auto")
    return ["device"]


def _splits(wish: Layout, facts: Facts) -> list[int]:
    """Return how many processes may share one set of experts: 1, and the divisors of a host's processes.

    Tokens then stay within the host.
    """
    if wish.split == "auto":
        return [1] if facts.every_weight or not facts.num_experts else list(facts.splits)
    if wish.split > 1:
        if facts.every_weight:
            raise ConfigError(
                f"place.split is {wish.split}, but every weight trains, and trained experts are not split",
                next="--place.split 1, or --train adapters",
            )
        from unfreeze.parallel.processes.mesh import check_split

        check_split(wish.split, facts.processes, facts.num_experts)
    return [wish.split]


def _refuse_every_weight(wish: Layout) -> None:
    """Raise ConfigError for placements that are only possible for frozen weights."""
    for name, value in wish.moved().items():
        if name in ("experts", "boundary", "optimizer", "adapters"):
            fault = "every weight trains, and trained weights must be on the devices"
            raise ConfigError(f"place.{name} is {value}, but {fault}", next=f"--place.{name} auto")


def _refuse_host(name: str, facts: Facts) -> None:
    """Raise ConfigError if the device's memory is the host's."""
    if facts.kind == "cpu":
        fault = "the device is a CPU: its memory is the host's"
        raise ConfigError(f"place.{name} is host, but {fault}", next=f"--place.{name} auto")


def _refuse_unbuilt(name: str, wish: Layout, facts: Facts) -> None:
    """Raise ConfigError if a run requests a placement that only a plan supports."""
    if not facts.unbuilt:
        words = RESIDENT.but(**{name: "host"}).not_built()[0]
        raise ConfigError(
            f"place.{name} is host: {words} is not built; `unfreeze plan` counts it",
            next=f"--place.{name} auto",
        )
    _refuse_host(name, facts)
