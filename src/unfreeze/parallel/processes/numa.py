"""Bind a process to the cores beside its GPU: page-locked memory is then on the node that it reads fastest.

Linux puts a page on the node of the core that touches it first. With eight processes that pin experts in host
memory, half of them would read over the link between the sockets.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

log = logging.getLogger(__name__)
SYS = Path("/sys")


def bind(device: torch.device, rank: int, sys: Path = SYS) -> list[int]:
    """Let this process run only on the cores of its GPU's NUMA node; return them, [] if it stays as it was.

    It stays if the machine does not say which cores these are, or if none of them is allowed.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return []
    node = _number(sys / "bus" / "pci" / "devices" / pci_address(device) / "numa_node")
    if node is None or node < 0:  # -1: one node, or a virtual machine that does not say
        return []
    cores = _cores(sys / "devices" / "system" / "node" / f"node{node}" / "cpulist")
    here = sorted(cores & os.sched_getaffinity(0))
    if not here:
        return []
    # Linux binds a thread, not a process: torch's own may be there already. New ones (lanes.touch) inherit it
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), here)
    log.info("process %d: bound to %d cores of NUMA node %d, where its GPU is", rank, len(here), node)
    return here


def pci_address(device: torch.device) -> str:
    """Return "0000:1b:00.0", the name of a GPU's folder in /sys."""
    properties = cast("Any", torch.cuda).get_device_properties(device)
    where = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return "{:04x}:{:02x}:{:02x}.0".format(*where)


def _cores(file: Path) -> set[int]:
    """Return the cores of a list such as "0-23,48-71"."""
    cores: set[int] = set()
    for span in _text(file).split(","):
        first, _, last = span.partition("-")
        if first.isdigit() and (last or first).isdigit():
            cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.lstrip("-").isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # hidden by the container
        return ""
