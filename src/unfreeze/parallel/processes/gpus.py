"""The GPU of each process: its number, proof that it is its own, and the traces of an exchange that hangs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch

from unfreeze.core.errors import ConfigError
from unfreeze.core.torchrun import started
from unfreeze.parallel.processes.roll import has_agent

TRACES = {
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
    ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): "{run}/nccl_trace_",
    ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    ("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"): "1",
}
"""torch's flight recorder (FlightRecorder.hpp, ProcessGroupNCCL.hpp): names of a variable, today's first, and
its value. Exchanges kept, the files (torch appends the rank), when they are written, and a report of which
process is missing in which exchange."""


def local_device(device: torch.device) -> torch.device:
    """Map cuda to cuda:LOCAL_RANK under torchrun, so that each process has its own GPU.

    A task of Slurm may see one GPU, its own: then that is cuda:0, whatever LOCAL_RANK says.
    Raises ConfigError if a node has more processes than GPUs.
    """
    index = cast("int | None", device.index)  # torch's types omit None
    if os.environ.get("LOCAL_RANK") is None or device.type != "cuda" or index is not None:
        return device
    here, visible = started(), torch.cuda.device_count()
    if started().size == 1:
        return torch.device("cuda", 0)
    if here.local < visible:
        return torch.device("cuda", here.local)
    if visible == 1 and not has_agent():  # torchrun's agent shows all its processes the same GPUs
        return torch.device("cuda", 0)
    raise ConfigError(
        f"{here.on_node} processes on this node, and torch sees {visible}"
        f" {'GPU' if visible == 1 else 'GPUs'} here: process {here.rank} (LOCAL_RANK {here.local}) has none",
        next=f"torchrun --nproc-per-node {visible}, or --device cpu",
    )


def gpu_of(device: torch.device) -> str:
    """Return the identity of a process's GPU, by which two processes on one are found; "" for a CPU."""
    if device.type != "cuda":
        return ""
    properties = cast("Any", torch.cuda).get_device_properties(device)
    return str(properties.uuid)


def keep_traces(run: Path) -> None:
    """Let torch write a trace of each process into the run's folder when an exchange times out.

    A variable that the user set stays.
    """
    for names, value in TRACES.items():
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value.format(run=run.resolve())
