"""What a wish allows: what "auto" tries and in which order, and what cannot be, each in one line with a remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import RESIDENT, Layout
from unfreeze.parallel.plan.layouts import MANY, Facts, layouts

WISH = Layout()
HERE = Facts("cpu", 1, num_experts=6, every_weight=False, model="m")


def facts(cpu: bool = True, processes: int = 1, **others: Any) -> Facts:
    """Of a run of six experts a layer, which a divisor of the processes may share."""
    splits = tuple(n for n in range(1, min(processes, 6) + 1) if processes % n == 0)
    return replace(HERE, kind="cpu" if cpu else "cuda", processes=processes, splits=splits, **others)


def found(cpu: bool, processes: int, **place: Any) -> list[Layout]:
    return layouts(Layout(**place), facts(cpu, processes))


def at(experts: str, split: int = 1, rest: str = "device", **others: Any) -> Layout:
    """What layers recompute is left open."""
    return RESIDENT.but(experts=experts, split=split, rest=rest, recompute="auto", **others)


def test_auto_tries_what_is_fastest_first_and_the_smallest_split_that_may_fit():
    """All on the device; split; the rest from peers; and what streams is shared too. 6 experts are not
    divided among 8."""
    assert found(True, 1) == [at("device"), at("disk"), at("disk", buffer="auto")]

    def each(experts: str, *splits: int) -> list[Layout]:
        return [at(experts, split, rest) for rest in ("device", "peers") for split in splits]

    def grouped(experts: str) -> list[Layout]:
        """What is not shared: a layer's experts come in groups."""
        return [at(experts, 1, rest, buffer="auto") for rest in ("device", "peers")]

    disk = [*each("disk", 2, 4), *grouped("disk")]
    assert found(True, 4) == [*each("device", 1, 2, 4), *disk]
    gpu = [*each("device", 1, 2, 4), *each("host", 2, 4), *grouped("host"), *disk]
    assert found(False, 8, boundary="device", optimizer="device") == gpu
    host = {"boundary": "host"}, {"optimizer": "host"}, {"boundary": "host", "optimizer": "host"}
    assert found(False, 8)[:5] == [gpu[0], *(gpu[0].but(**moved) for moved in host), gpu[1]]
    assert len(found(False, 8)) == 4 * len(gpu)
    assert found(True, 4, split=2) == [*each("device", 2), *each("disk", 2)]
    alone = {"experts": "disk", "split": 1, "rest": "device"}
    assert found(True, 4, **alone) == [at("disk"), at("disk", buffer="auto")]
    assert found(True, 4, **alone, buffer=0.5) == [at("disk", buffer=0.5)]
    assert found(True, 4, **alone, buffer=0) == [at("disk")]
    assert found(True, 2, experts="device", split=1, rest="peers") == [at("device", 1, "peers")]


def test_what_the_wish_says_of_recompute_stays_and_nothing_else_is_left_open():
    for layout in found(False, 8, recompute="selective", keep_layers=2):
        assert (layout.recompute, layout.keep_layers) == ("selective", 2)
        left = [name for name, value in layout.model_dump().items() if value == "auto"]
        assert left == (["buffer"] if layout.experts != "device" and layout.split == 1 else [])


@pytest.mark.parametrize(
    ("here", "said", "remedy"),
    [
        (facts(True, 1), "there is only one process", "torchrun"),
        (facts(True, 1, more=MANY), "there is only one process", "--hardware with several devices"),
        (facts(True, 2, every_weight=True), "every weight trains", "--place.weights sharded"),
        (facts(True, 2, files=False), "no weights that could be read", "--place.rest auto"),
    ],
)
def test_a_rest_that_cannot_lie_with_peers_is_one_line(here, said, remedy):
    with pytest.raises(ConfigError, match=f"place.rest is peers, but .*{said}") as caught:
        layouts(Layout(rest="peers"), here)
    assert caught.value.next.startswith(remedy) and caught.value.next.endswith("--place.rest auto")
    assert {layout.rest for layout in layouts(WISH, here)} == {"device"}


@pytest.mark.parametrize(
    ("here", "recompute", "said", "remedy"),
    [
        (facts(True), "auto", "the device is a CPU", "--place.boundary auto"),
        (facts(False, every_weight=True), "auto", "every weight trains", "--place.boundary auto"),
        (facts(False), "nothing", "recompute is nothing", "--place.recompute layers"),
    ],
)
def test_inputs_of_layers_that_cannot_leave_the_device_are_one_line(here, recompute, said, remedy):
    with pytest.raises(ConfigError, match=f"place.boundary is host, but .*{said}") as caught:
        layouts(Layout(boundary="host", recompute=recompute), here)
    assert caught.value.next == remedy
    assert {layout.boundary for layout in layouts(Layout(recompute=recompute), here)} == {"device"}


@pytest.mark.parametrize(
    ("here", "said"),
    [(facts(True), "the device is a CPU"), (facts(False, every_weight=True), "every weight trains")],
)
def test_moments_that_cannot_leave_the_device_are_one_line(here, said):
    with pytest.raises(ConfigError, match=f"place.optimizer is host, but .*{said}") as caught:
        layouts(Layout(optimizer="host"), here)
    assert caught.value.next == "--place.optimizer auto"
    assert {layout.optimizer for layout in layouts(WISH, here)} == {"device"}


def test_nothing_is_split_by_itself_where_nothing_can_be():
    for here in (facts(True, 4, num_experts=0), facts(True, 4, every_weight=True)):
        assert {layout.split for layout in layouts(WISH, here)} == {1}
    assert {layout.split for layout in layouts(WISH, facts(True, 4))} == {1, 2, 4}  # control arm


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (facts(True, 2, every_weight=True), "every weight trains"),
        (facts(True, 2, num_experts=0), "has no experts"),
    ],
)
def test_a_split_that_cannot_be_is_one_line(here, said):
    with pytest.raises(ConfigError, match=said) as caught:
        layouts(Layout(split=2), here)
    assert caught.value.next.startswith("--place.split 1")


@pytest.mark.parametrize(
    ("place", "said", "remedy"),
    [
        ({"split": 2}, "place.split is 2", "--place.split 1"),
        ({"experts": "device"}, "nothing uses a buffer", "--place.experts auto"),
    ],
)
def test_a_buffer_that_nothing_could_use_is_one_line(place, said, remedy):
    with pytest.raises(ConfigError, match=f"place.buffer is 0.5, but .*{said}") as caught:
        found(True, 2, buffer=0.5, **place)
    assert caught.value.next == f"{remedy}, or --place.buffer auto"


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (facts(num_experts=0), "this model has no routed experts"),
        (facts(files=False), "m has no weights that could be read"),
    ],
)
def test_experts_that_cannot_stream_are_one_line(here, said):
    for name, value in (("experts", "host"), ("experts", "disk"), ("buffer", 0.5)):
        with pytest.raises(ConfigError, match=f"place.{name} is {value}, but {said}") as caught:
            layouts(Layout(**{name: value}), here)
        assert caught.value.next == f"--place.{name} auto"
    assert {layout.experts for layout in layouts(WISH, here)} == {"device"}


def test_where_every_weight_trains_they_are_whole_or_divided_and_nothing_leaves_the_device():
    every = facts(False, 2, every_weight=True)
    assert layouts(WISH, every) == [at("device"), at("device", weights="sharded")]
    some = replace(every, frozen=True)  # DeepSeek-V4's indexers
    assert layouts(WISH, some) == [at("device")]
    with pytest.raises(ConfigError, match="this model's indexer stays frozen") as caught:
        layouts(Layout(weights="sharded"), some)
    assert caught.value.next == "--place.weights auto"
    for name in ("experts", "boundary", "optimizer", "adapters"):
        with pytest.raises(ConfigError, match=f"place.{name} is host, but every weight trains") as caught:
            layouts(Layout(**{name: "host"}), every)
        assert caught.value.next == f"--place.{name} auto"


@pytest.mark.parametrize("name", ["rest", "adapters"])
def test_what_is_not_built_is_counted_by_a_plan_and_refused_by_a_run(name):
    moved = Layout(**{name: "host"})
    with pytest.raises(
        ConfigError, match=rf"place.{name} is host: .* is not built; `unfreeze plan`"
    ) as caught:
        layouts(moved, facts(False))
    assert caught.value.next == f"--place.{name} auto"
    planned = facts(False, unbuilt=True)
    assert {getattr(layout, name) for layout in layouts(moved, planned)} == {"host"}
    assert {getattr(layout, name) for layout in layouts(WISH, planned)} == {"device", "host"}
    # control arm: no run has such a layout by itself, and a CPU has no other memory
    for here in (facts(False), facts(True, unbuilt=True)):
        assert {getattr(layout, name) for layout in layouts(WISH, here)} == {"device"}
    with pytest.raises(ConfigError, match=f"place.{name} is host, but the device is a CPU"):
        layouts(moved, facts(True, unbuilt=True))


def test_a_layout_says_what_is_not_on_the_device():
    assert RESIDENT.words() == "everything on the device; recompute layers"
    moved = RESIDENT.but(experts="host", split=8, rest="peers")
    assert moved.words(6) == "experts on host, split over 8; rest on peers; recompute layers"
    assert moved.words(0) == "rest on peers; recompute layers"
    grouped = RESIDENT.but(experts="disk", buffer=0.5, optimizer="host", recompute="selective", keep_layers=2)
    assert grouped.words(6) == (
        "experts on disk in groups of 512.0 MiB; optimizer on host;"
        " recompute selective except in the last 2 layers"
    )
