"""Claims about lanes: on a CPU moments are times; on a GPU (mocked) copies go by a stream of their own, behind what
reads the buffer and before what reads it next, and the host memory is registered as long as it is there."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from unfreeze.core.errors import DoesNotFit
from unfreeze.parallel.processes import lanes
from unfreeze.train.host_state import InHost
from unfreeze.train.moments import Float32


class Cuda:
    """torch.cuda that writes down what is asked of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.current = "compute"
        self.devices: dict[str, object] = {}  # thread -> its GPU
        self.registered: dict[int, int] = {}
        self.refuses = 0

    def Stream(self, device: object) -> object:
        return Stream(self, "copies", device)

    def set_device(self, device: object) -> None:
        self.devices[threading.current_thread().name] = device

    def Event(self, enable_timing: bool) -> object:
        return Event(self)

    def current_stream(self, device: object = None) -> object:
        return Stream(self, self.current)

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def cudart(self) -> object:
        return self

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.registered[pointer] = nbytes
        return self.refuses

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.registered[pointer]
        return 0


class Stream:
    def __init__(self, cuda: Cuda, name: str, device: object = None):
        self.cuda, self.name, self.device = cuda, name, device

    def wait_event(self, event: Event) -> None:
        self.cuda.said.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.cuda.said.append(f"host waits for {self.name}")


class Event:
    def __init__(self, cuda: Cuda):
        self.cuda, self.name = cuda, ""

    def record(self, stream: Stream) -> None:
        self.name = stream.name
        self.cuda.said.append(f"mark {stream.name}")

    def synchronize(self) -> None:
        self.cuda.said.append("host waits")

    def elapsed_time(self, other: Event) -> float:
        return 500.0


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    return made


def test_on_a_cpu_moments_are_times() -> None:
    lane = lanes.lane_of(torch.device("cpu"))
    first = lane.mark()
    with lane.copying(first):
        then = lane.mark()
    lane.follow(then)
    lane.settle()
    assert lane.between(first, then) == then - first >= 0 and not lane.pins


def test_a_gpus_copies_wait_for_its_computation_and_its_computation_for_them(cuda: Cuda) -> None:
    lane = lanes.lane_of(torch.device("cuda", 0))
    free = lane.mark()  # all that reads the buffer was queued before
    with lane.copying(free):
        arrived = lane.mark()
    lane.follow(arrived)
    assert cuda.said == [
        "mark compute",
        "copies waits for compute",
        "mark copies",
        "compute waits for copies",
    ]
    assert lane.pins
    lane.settle()
    assert lane.between(free, arrived) == 0.5 and cuda.said[-2:] == ["host waits for copies", "host waits"]


def test_pinned_memory_has_the_bytes_asked_for_and_is_given_back(cuda: Cuda) -> None:
    """torch's own allocator would round 9.5 GB up to 17.2."""
    memory = lanes.pinned(4097)
    assert memory.nbytes == 4097 and cuda.registered == {memory.data_ptr(): 4097}
    del memory
    gc.collect()
    assert not cuda.registered


def test_pinned_memory_stays_registered_as_long_as_a_view_of_it_is_there(cuda: Cuda) -> None:
    """AdamW's moments in host memory are such views; without it their copies would wait for the host."""
    states = {name: Float32(name, torch.zeros(50), torch.device("meta")) for name in "ab"}
    lane = lanes.HostLane()
    lane.pins = True
    place = InHost("cpu", lane, lanes.HostLane())
    place.keep(states)
    del place
    gc.collect()
    assert list(cuda.registered) == [states["a"].exp_avg.data_ptr()]
    last = states.pop("b").exp_avg_sq[1:].view(torch.uint8)
    states.clear()
    gc.collect()
    assert len(cuda.registered) == 1
    del last
    gc.collect()
    assert not cuda.registered


def test_a_thread_makes_the_lanes_gpu_its_own(cuda: Cuda) -> None:
    """A new thread has GPU 0, and a stream's context that ends there begins a context on it."""
    lane = lanes.lane_of(torch.device("cuda", 3))
    with ThreadPoolExecutor(1, "copies", lane.begin_thread) as pool:
        pool.submit(int).result()
    assert cuda.devices == {"copies_0": torch.device("cuda", 3)}
    lanes.lane_of(torch.device("cpu")).begin_thread()  # a CPU has nothing to set
    assert len(cuda.devices) == 1


def test_where_cuda_refuses_the_bytes_are_said(cuda: Cuda) -> None:
    cuda.refuses = 2
    with pytest.raises(DoesNotFit, match=r"CUDA cannot page-lock 4\.0 KiB of host memory \(error 2\)"):
        lanes.pinned(4096)


@pytest.mark.parametrize(("cores", "threads"), [(3, 3), (40, lanes.MOST)])
def test_new_pages_are_touched_by_as_many_threads_as_there_are_cores(
    cores: int, threads: int, cuda: Cuda, monkeypatch
) -> None:
    """Under torchrun torch has one thread; a page that is left to the driver is touched by its one."""
    together, ended = threading.Barrier(threads, timeout=5), []

    class Together(ThreadPoolExecutor):
        def submit(self, work, /, *given):
            def at_once():
                together.wait()
                work(*given)
                ended.append(threading.current_thread().name)

            return super().submit(at_once)

    monkeypatch.setattr(lanes, "ThreadPoolExecutor", Together)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    memory = torch.ones(50 * lanes.PAGE + 1, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: memory)
    assert lanes.pinned(memory.nbytes) is memory and cuda.registered
    assert len(ended) == len(set(ended)) == threads
    written = torch.nonzero(memory == 0).flatten()
    assert torch.equal(written, torch.arange(0, memory.nbytes, lanes.PAGE))


@pytest.mark.parametrize("nbytes", [0, 1, lanes.PAGE, lanes.PAGE + 1])
def test_fewer_pages_than_threads(nbytes: int) -> None:
    memory = torch.ones(nbytes, dtype=torch.uint8)
    lanes.touch(memory, 4)
    assert int((memory == 0).sum()) == -(-nbytes // lanes.PAGE)
