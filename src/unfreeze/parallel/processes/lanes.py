"""Lanes: how bytes travel beside the computation.

A CPU's go by a thread, and moments are times. A GPU's go by a stream of their own, moments are events of its
streams, and the host waits for none of them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol, SupportsInt, cast

import torch
from torch import Tensor

from unfreeze.core.errors import DoesNotFit
from unfreeze.core.units import format_bytes


class Lane(Protocol):
    """pins: whether what is copied from must be page-locked host memory."""

    pins: bool

    def begin_thread(self) -> None:
        """What a thread that is to use the lane calls first."""
        ...

    def mark(self) -> Any:
        """This moment: all that was queued so far on the current stream is done then."""
        ...

    def follow(self, mark: Any) -> None:
        """What is queued from now on waits for that moment."""
        ...

    def copying(self, after: Any) -> Any:
        """A context whose copies are queued beside the computation, behind `after`."""
        ...

    def settle(self) -> None:
        """Wait until what was queued in `copying` is done."""
        ...

    def between(self, first: Any, then: Any) -> float:
        """Seconds from one moment to another."""
        ...


class HostLane:
    """On a CPU: who copies has copied when it returns."""

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
    """On a GPU: a stream for copies, and events between it and the computation's."""

    pins = True

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin_thread(self) -> None:
        """Make the GPU the thread's own. A new thread has GPU 0, and leaving `copying` would begin a context
        there, about half a GB of another process's GPU."""
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
    """What is called of CUDA's runtime, which torch leaves without types. Each returns an error, or 0."""

    def cudaHostRegister(self, start: int, nbytes: int, flags: int, /) -> SupportsInt: ...
    def cudaHostUnregister(self, start: int, /) -> SupportsInt: ...


def pinned(nbytes: int, dtype: torch.dtype = torch.uint8, device: torch.device | str = "cpu") -> Tensor:
    """Page-locked host memory of exactly so many bytes.

    torch's own allocator of it rounds each block up to a power of two: a layer of 9.5 GB would take 17.2. So
    the memory is ordinary and is registered with CUDA, as long as this tensor or a view of it is there.
    Raises DoesNotFit where CUDA refuses.
    """
    memory = torch.empty(nbytes, dtype=dtype, device=device)
    cudart = cast("_Cudart", torch.cuda.cudart())
    result = int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if result != 0:
        raise DoesNotFit(
            f"CUDA does not page-lock {format_bytes(memory.nbytes)} of host memory (error {result})",
            next="raise the limit of locked memory (ulimit -l), or --place.experts disk",
        )
    # registered memory that is given back and mapped anew would be copied from where it was before
    storage = memory.untyped_storage()  # which views keep; this tensor they do not
    weakref.finalize(storage, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
