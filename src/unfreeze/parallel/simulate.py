"""A step replayed event by event: what each device computes, what arrives over which link, and who waits.

The closed formula (plan/seconds.py) takes one device for all and hides transfers under whole passes. Here a
layer waits for its own weights, a buffer is free only when its layer is done, and an all-to-all waits for the
busiest device. Without streams and with even routing the two agree; the difference is what unevenness costs.

    layer l of a pass starts when its weights are there and the layer before it is done on every device
    its weights start when the link is free and the buffer of layer l - 2 is
    experts of device d take load_ld times the mean; before and after them all devices meet
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unfreeze.parallel.plan.layout import BUFFERS
from unfreeze.parallel.plan.seconds import Seconds

FROM_HOST = ("stream of experts", "stream of the rest")
TAIL = ("head", "optimizer", "launches", "sum of gradients")
APART = {"experts", "all-to-all", "gather of the rest", *FROM_HOST, *TAIL}
"""Terms that are not what every device computes alike in each layer; all others are."""


@dataclass(frozen=True)
class Event:
    """Something that occupied a device or a link, in seconds from the step's start."""

    what: str
    where: str
    layer: int
    start: float
    end: float


@dataclass(frozen=True)
class Replay:
    """A replayed step, in seconds.

    for_weights, for_devices: what the mean device waits for weights, and for other devices.
    """

    step: float
    for_weights: float
    for_devices: float
    events: tuple[Event, ...]


def replay(time: Seconds, layers: int, loads: Sequence[Sequence[float]] = ((1.0,),)) -> Replay:
    """A step of `layers` layers from the formula's terms; several micro-batches are replayed as one pass.

    loads: for each layer, each device's rows over the mean's; fewer layers are repeated.
    """
    events: list[Event] = []
    clock = for_weights = for_devices = 0.0
    for direction, share in (("forward", time.forward), ("backward", 1 - time.forward)):
        order = range(layers) if direction == "forward" else range(layers - 1, -1, -1)
        compute = share / layers * sum(s for name, s in time.terms.items() if name not in APART)
        experts = share / layers * time.terms.get("experts", 0.0)
        exchange = share / layers * time.terms.get("all-to-all", 0.0)
        # both passes stream every layer once, over the link to the host or between devices
        from_host = sum(time.terms.get(name, 0.0) for name in FROM_HOST)
        stream = max(from_host, time.terms.get("gather of the rest", 0.0)) / 2 / layers
        link, done = clock, [clock] * BUFFERS
        for index, layer in enumerate(order):
            # weights: the link, then a buffer
            start = max(link, done[index % BUFFERS])
            link = start + stream
            if stream:
                events.append(Event("weights", "link", layer, start, link))
            for_weights += max(0.0, link - clock)
            begun = max(clock, link) if stream else clock

            # every device computes its rows; the busiest is waited for
            load = loads[layer % len(loads)]
            busiest = max(load)
            for device, rows in enumerate(load):
                end = begun + compute + experts * rows
                events.append(Event(direction, f"device {device}", layer, begun, end))
            for_devices += experts * (busiest - sum(load) / len(load))
            clock = begun + compute + experts * busiest + exchange
            if exchange:
                events.append(Event("all-to-all", "links", layer, clock - exchange, clock))
            done[index % BUFFERS] = clock
    tail = sum(time.terms.get(name, 0.0) for name in TAIL)
    return Replay(clock + tail, for_weights, for_devices, tuple(events))


def loads_of(expert_load: Mapping[str, Sequence[int]], devices: int) -> list[list[float]]:
    """For each layer, each device's rows over the mean; experts are dealt out in order.

    expert_load: layer -> tokens per expert, as a run's "train" events have it.
    """
    found = []
    for counts in expert_load.values():
        share = -(-len(counts) // devices)
        rows = [sum(counts[d * share : (d + 1) * share]) for d in range(devices)]
        mean = sum(rows) / devices
        found.append([row / mean if mean else 1.0 for row in rows])
    return found
