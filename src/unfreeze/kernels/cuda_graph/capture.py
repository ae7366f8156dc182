"""Launches as one CUDA graph: captured at the first call, replayed at each.

Not measured on a GPU yet, so no record chooses it. Before it captures, it calls twice on a stream of its own:
once for what happens at a first call only (kernels compiled, tables copied), once with torch watching for
whatever makes the host wait, which a graph cannot hold. That one's message is the reason given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.kernels.cuda_graph.launches import CannotCapture, Launches
from unfreeze.kernels.loops.scratch import forget_contents, held


@dataclass
class Captured:
    """A captured graph and what it needs.

    scratch: the buffers the graph writes into; another call may outgrow and replace them, and the graph would
    write into memory given back.
    """

    graph: torch.cuda.CUDAGraph
    output: Tensor
    scratch: list[Tensor]


def replay(launches: Launches) -> Tensor:
    """The result lies where the next replay writes its own."""
    captured = launches.captured
    if not isinstance(captured, Captured):
        captured = launches.captured = capture(launches)
    captured.graph.replay()
    forget_contents()
    return captured.output


def capture(launches: Launches) -> Captured:
    """Raises CannotCapture, with what torch says of the launch that cannot be captured."""
    with torch.cuda.device(launches.device):
        aside, here = torch.cuda.Stream(), torch.cuda.current_stream()
        aside.wait_stream(here)
        try:
            with torch.cuda.stream(aside):
                launches.run(*launches.buffers)
                _refuse_waiting(launches)
            here.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # other threads of the process may go on using the GPU
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = launches.run(*launches.buffers)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CannotCapture(
                f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
            ) from error
        finally:
            here.wait_stream(aside)
    return Captured(graph, output, held())


def _refuse_waiting(launches: Launches) -> None:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launches.run(*launches.buffers)
    finally:
        torch.cuda.set_sync_debug_mode(before)
