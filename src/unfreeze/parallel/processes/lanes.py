"""Lanes: transfers that run beside the computation.

On a CPU, a thread copies, and marks are times. On a GPU, copies use their own stream, marks are events, and
the host never waits for them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol, SupportsInt, cast

import torch
from torch import Tensor

from unfreeze.core.errors import DoesNotFit
from unfreeze.core.units import format_bytes
from unfreeze.parallel.machine import num_cores

PAGE = 4096  # bytes
MOST = 16  # threads that touch new pages


class Lane(Protocol):
    """pins: True if the source of copies must be page-locked host memory."""

    pins: bool

    def begin_thread(self) -> None:
        """Must be called first by a thread that uses the lane."""
        ...

    def mark(self) -> Any:
        """Return a mark that is reached when everything queued so far on the current stream is done."""
        ...

    def follow(self, mark: Any) -> None:
        """Make everything queued from now on wait for that mark."""
        ...

    def copying(self, after: Any) -> Any:
        """Return a context whose copies are queued beside the computation, after the mark `after`."""
        ...

    def settle(self) -> None:
        """Wait until everything queued in `copying` is done."""
        ...

    def between(self, first: Any, then: Any) -> float:
        """Return the seconds between two marks."""
        ...


class HostLane:
    """Lane on a CPU: a copy is complete when its call returns."""

    pins = False

    def begin_thread(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def follow(self, mark: float) -> None:
        pass

    @contextmanager
    def copying(self, after: float) -> Generator[None]:
        yield

    def settle(self) -> None:
        pass

    def between(self, first: float, then: float) -> float:
        return then - first


class CudaLane:
    """Lane on a GPU: a copy stream, and events between it and the compute stream."""

    pins = True

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin_thread(self) -> None:
        """Set this thread's current GPU.

        A new thread has GPU 0, and leaving `copying` would create a context there, about half a GB of another
        process's GPU.
        """
        torch.cuda.set_device(self._stream.device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    @contextmanager
    def copying(self, after: torch.cuda.Event) -> Generator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            yield

    def settle(self) -> None:
        self._stream.synchronize()

    def between(self, first: torch.cuda.Event, then: torch.cuda.Event) -> float:
        then.synchronize()
        return first.elapsed_time(then) / 1000


def lane_of(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else HostLane()


class _Cudart(Protocol):
    """Functions of CUDA's runtime that torch leaves untyped. Each returns an error code, or 0."""

    def cudaHostRegister(self, start: int, nbytes: int, flags: int, /) -> SupportsInt: ...
    def cudaHostUnregister(self, start: int, /) -> SupportsInt: ...


def pinned(nbytes: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> Tensor:
    """Allocate exactly `nbytes` of page-locked host memory.

    torch's own allocator rounds each block up to a power of two: a layer of 9.5 GB would take 17.2. So this
    memory is ordinary, and is registered with CUDA as long as this tensor or a view of it exists.
    Raises DoesNotFit if CUDA refuses.
    """
    memory = torch.empty(nbytes, dtype=dtype, device=device)
    # the driver would touch new pages one after the other, 71 GB in about a minute
    touch(memory, min(num_cores(), MOST))
    cudart = cast("_Cudart", torch.cuda.cudart())
    result = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if result != 0:
        raise DoesNotFit(
            f"CUDA cannot page-lock {format_bytes(memory.nbytes)} of host memory (error {result})",
            next="raise the limit of locked memory (ulimit -l), or --place.experts disk",
        )
    # without unregistering, memory that is freed and mapped again would be copied from its old pages
    storage = memory.untyped_storage()  # views keep the storage alive, but not this tensor
    weakref.finalize(storage, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def touch(memory: Tensor, threads: int) -> None:
    """Write to every page of contiguous host memory, each thread to its own range of pages.

    The system then maps them: on the NUMA node of the cores that these threads may run on.
    """
    # numpy lets go of the GIL, and starts no threads of its own. torch has one thread under torchrun
    # (OMP_NUM_THREADS=1), or would start as many again in each of these
    pages = memory.view(torch.uint8).numpy()[::PAGE]
    edges = [len(pages) * thread // threads for thread in range(threads + 1)]
    with ThreadPoolExecutor(threads, "pages") as pool:
        for done in [pool.submit(pages[first:then].fill, 0) for first, then in pairwise(edges)]:
            done.result()
