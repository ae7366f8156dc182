"""Launches as one CUDA graph: captured at the first call, replayed at each.

1.8 times as fast at one row on an H100 (docs/measured/h100.md). Before capturing, it calls the launches twice
on a separate stream. The first call is a warm-up (kernels compiled, tables copied). During the second, torch
watches for anything that makes the host wait, which a graph cannot hold; that message is the reason reported.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.kernels.cuda_graph.launches import CannotCapture, Launches
from unfreeze.kernels.loops.scratch import forget_contents, held

# torch's own message has numbers: the log would not know it again
NO_MEMORY = "the GPU has no memory left for a graph, which keeps its own"


@dataclass
class Captured:
    """A captured graph and the tensors it needs.

    scratch: the buffers that the graph writes to. Without these references another call may outgrow and
    replace them, and the graph would write to freed memory.
    """

    graph: torch.cuda.CUDAGraph
    output: Tensor
    scratch: list[Tensor]


def replay(launches: Launches) -> Tensor:
    """The result is in memory that the next replay overwrites."""
    captured = launches.captured
    if not isinstance(captured, Captured):
        captured = launches.captured = capture(launches)
    captured.graph.replay()
    forget_contents()
    return captured.output


def capture(launches: Launches) -> Captured:
    """Capture the launches.

    Raises CannotCapture if one cannot be captured, with torch's message, or if memory runs out. Then nothing
    of the attempt is kept: what is launched instead needs that memory.
    """
    with torch.cuda.device(launches.device):
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        try:
            return _captured(launches, aside, here)
        except RuntimeError as error:
            reason = _reason(error)
        finally:
            # torch leaves its capturing stream current if ending the capture fails too
            torch.cuda.set_stream(here)
            here.wait_stream(aside)
        # outside the handler: the error's traceback held the graph and the results of its launches
        torch.cuda.empty_cache()
        raise CannotCapture(reason)


def _captured(launches: Launches, aside: torch.cuda.Stream, here: torch.cuda.Stream) -> Captured:
    with torch.cuda.stream(aside):
        launches.run(*launches.buffers)
        _refuse_waiting(launches)
    here.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # other threads of the process may keep using the GPU
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = launches.run(*launches.buffers)
    return Captured(graph, output, held())


def _reason(error: RuntimeError) -> str:
    """The first line of torch's message; NO_MEMORY if memory ran out, before or while the capture ended."""
    if any(isinstance(each, torch.OutOfMemoryError) for each in (error, error.__context__)):
        return NO_MEMORY
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refuse_waiting(launches: Launches) -> None:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch's, that this mode is a prototype
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        launches.run(*launches.buffers)
    finally:
        torch.cuda.set_sync_debug_mode(before)
