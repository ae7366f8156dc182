"""Claims about moments in host memory: the same bits as on the device whatever a slot holds, all that an update
reads came from there, a save of one goes on in the other, and copies and computation wait for each other."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from unfreeze.parallel.plan.terms import MOMENT_CHUNK, MOMENT_SLOTS
from unfreeze.parallel.processes.lanes import HostLane
from unfreeze.train.host_state import CHUNK, SLOTS, InHost, OnDevice
from unfreeze.train.moments import Float32
from unfreeze.train.optim import AdamW

SIZES = [(16, 40), (3,), (70, 33), (300,), (8, 8), (1, 129)]


class Weights(nn.Module):
    """Tensors of several sizes; some steps give one of them no gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in SIZES])


def in_host(chunk: int = 8192) -> InHost:
    made = InHost("cpu", HostLane(), HostLane())
    made.poison, made.chunk = True, chunk
    return made


def go(weights: Weights, optimizer: AdamW, first: int, last: int) -> None:
    for step in range(first, last):
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for index, parameter in enumerate(weights.all):
            gradient = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            if (step + index) % 3:
                parameter.grad = gradient
        optimizer.collect()
        optimizer.update(3e-3, 1.0)


def same(one: AdamW, other: AdamW) -> bool:
    mine, theirs = ({**each.tensors(), **each.weights()} for each in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("moments", ["float32", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 8192, 1 << 20])
def test_the_bits_of_moments_on_the_device(moments, dtype, chunk) -> None:
    """One tensor at a time, a few, all at once. What nobody may read is NaN, on the device and in host memory."""
    whole, parts = Weights(dtype), Weights(dtype)
    resident, place = AdamW(whole, moments=moments, weight_decay=0.1), in_host(chunk)
    hosted = AdamW(parts, moments=moments, weight_decay=0.1, place=place)
    go(whole, resident, 0, 7)
    go(parts, hosted, 0, 7)
    assert same(resident, hosted) and hosted.learning_rate == resident.learning_rate
    # the device has two slots, each of the largest tensor's moments or of a chunk
    largest = 70 * 33 * 8 if moments == "float32" else 70 * 33 * 2 + 2 * 10 * 4
    if chunk == 1:
        assert largest <= place.device_bytes / 2 < largest + 256


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_a_save_of_one_goes_on_in_the_other(moments) -> None:
    unbroken = Weights()
    wanted = AdamW(unbroken, moments=moments)
    go(unbroken, wanted, 0, 8)
    for places in ((OnDevice(), in_host()), (in_host(), OnDevice()), (in_host(), in_host(1))):
        weights = Weights()
        optimizer = AdamW(weights, moments=moments, place=places[0])
        go(weights, optimizer, 0, 4)
        saved = copy.deepcopy(optimizer.tensors())
        after = AdamW(weights, moments=moments, place=places[1])
        for name, tensor in after.tensors().items():
            tensor.copy_(saved[name])
        go(weights, after, 4, 8)
        assert same(after, wanted)


def test_control_arm_moments_that_never_go_back() -> None:
    class Forgetful(InHost):
        def rounds(self, states):
            for there in super().rounds(states):
                yield {name: copy.deepcopy(state) for name, state in there.items()}

    whole, parts = Weights(), Weights()
    resident, hosted = AdamW(whole), AdamW(parts, place=Forgetful("cpu", HostLane(), HostLane()))
    go(whole, resident, 0, 2)
    go(parts, hosted, 0, 2)
    assert not same(resident, hosted)


class Written(HostLane):
    """A lane that writes down who waits for what; moments are numbers, of all lanes together."""

    def __init__(self, name: str, said: list[str], marks: list[int]):
        self.name, self.said, self.marks = name, said, marks

    def mark(self) -> int:
        self.marks.append(len(self.marks) + 1)
        return self.marks[-1]

    def follow(self, mark: int) -> None:
        self.said.append(f"compute waits for {mark}")

    @contextmanager
    def copying(self, after: int):
        self.said.append(f"{self.name} behind {after}")
        yield

    def settle(self) -> None:
        self.said.append(f"host waits for {self.name}")


def test_copies_and_computation_wait_for_each_other() -> None:
    said, marks = [], []
    up, down = (Written(name, said, marks) for name in ("up", "down"))
    place = InHost("cpu", up, down)
    place.chunk = 1
    states = {name: Float32(name, torch.zeros(64), torch.device("meta")) for name in "abc"}
    place.keep(states)
    for index, there in enumerate(place.rounds(states)):
        said.append(f"update {index}: {','.join(there)}")
    assert said == [
        "up behind 1",  # a, until 2
        "up behind 3",  # b beside it, until 4
        "compute waits for 2",
        "update 0: a",
        "down behind 5",  # a goes behind its update, until 6
        "up behind 6",  # c comes into a's slot when a is gone, until 7
        "compute waits for 4",
        "update 1: b",
        "down behind 8",  # until 9
        "compute waits for 7",
        "update 2: c",
        "down behind 10",  # until 11
    ]
    # the next update's first copy waits for the last one down, and so does who reads the moments
    said.clear()
    next(iter(place.rounds(states)))
    place.settle()
    assert said[0] == "up behind 11" and said[-1] == "host waits for down"


def test_the_plan_counts_these_slots() -> None:
    assert (MOMENT_SLOTS, MOMENT_CHUNK) == (SLOTS, CHUNK)
