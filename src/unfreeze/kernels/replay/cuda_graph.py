"""Launches as one CUDA graph: recorded at the first call, replayed at each. Not measured on a GPU yet, so no record chooses it.

Before it records, it calls twice on a stream of its own: once for what happens at a first call only (kernels compiled, tables copied), once with
torch watching for whatever makes the host wait, which a graph cannot hold. That one's message is the reason given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.kernels.loops.scratch import held
from unfreeze.kernels.replay.launches import CannotRecord, Launches


@dataclass
class Recorded:
    """scratch: the buffers the graph writes into; another call may outgrow and replace them, and the graph would write into memory given back."""

    graph: torch.cuda.CUDAGraph
    output: Tensor
    scratch: list[Tensor]


def replay(launches: Launches) -> Tensor:
    """The result lies where the next replay writes its own."""
    if launches.recorded is None:
        launches.recorded = record(launches)
    launches.recorded.graph.replay()
    return launches.recorded.output


def record(launches: Launches) -> Recorded:
    """Raises CannotRecord, with what torch says of the launch that cannot be recorded."""
    with torch.cuda.device(launches.device):
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):
                launches.run(*launches.buffers)
                _watched(launches)
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads of the process may go on using the GPU
                output = launches.run(*launches.buffers)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotRecord(f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}") from error
        finally:
            here.wait_stream(aside)
    return Recorded(graph, output, held())


def _watched(launches: Launches) -> None:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launches.run(*launches.buffers)
    finally:
        torch.cuda.set_sync_debug_mode(before)
