"""The machine's cores, and its total and free memory within the limits of a container and ulimit."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from unfreeze.core.cpu import processor

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for no limit


@dataclass(frozen=True)
class Hardware:
    """One device.

    total, available   bytes; available: what a process could still allocate now
    limit              what limits `available`: "memory", the "container", or "ulimit"
    process            bytes of host memory this process already uses (interpreter, libraries), which
                       `available` does not include. 0 for CUDA
    host               for CUDA: bytes of host memory that a process could still allocate; 0 for a CPU
    """

    kind: str
    name: str
    cores: int
    total: int
    available: int
    limit: str = "memory"
    process: int = 0
    host: int = 0
    unbound: int = 0
    """`available` without this process's own ulimit, if that is the limit; else 0."""

    def shared(self, count: int) -> Hardware:
        """Return the share of one of `count` processes on this host; they all use the same memory."""
        if count == 1:
            return self
        name = f"{self.name}, shared by {count} processes"
        available = self.available
        if self.kind == "cpu":
            available = min(available, (self.unbound or available) // count)
        return replace(self, name=name, available=available, host=self.host // count)


def hardware(device: torch.device | str = "cpu") -> Hardware:
    """Measure the given device now. For CUDA, cores are those of the host, and memory is the device's."""
    place = torch.device(device)
    if place.type == "cuda":
        free, total = torch.cuda.mem_get_info(place)
        reusable = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        name, host = torch.cuda.get_device_name(place), hardware("cpu").available
        return Hardware("cuda", name, num_cores(), total, free + reusable, host=host)
    (total, available), limit, unbound = host_memory(), "memory", 0
    bound = container_memory()
    if bound is not None and bound[0] < total:
        total, available, limit = bound[0], min(available, bound[1]), "container"
    own = own_limit()
    if own is not None and own < available:
        available, limit, unbound = own, "ulimit", available
    return Hardware(
        "cpu", processor(), num_cores(), total, available, limit, resident_bytes(), unbound=unbound
    )


def own_limit() -> int | None:
    """Return the bytes this process may still map: the tighter of ulimit -v and -d; None if unlimited."""
    try:
        import resource
    except ImportError:  # not available on Windows
        return None
    used = psutil.Process().memory_info()
    pairs = ((resource.RLIMIT_AS, used.vms), (resource.RLIMIT_DATA, getattr(used, "data", 0)))
    limits = [(resource.getrlimit(kind)[0], mapped) for kind, mapped in pairs]
    left = [limit - mapped for limit, mapped in limits if limit != resource.RLIM_INFINITY]
    return max(0, min(left)) if left else None


def resident_bytes() -> int:
    """Return the bytes of host memory this process uses now."""
    return psutil.Process().memory_info().rss


def num_cores() -> int:
    """Return the number of cores this process may run on (affinity included)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the host; the page cache counts as available."""
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def container_memory(cgroup: Path = CGROUP, proc: Path = PROC) -> tuple[int, int] | None:
    """Return (limit, available within it) of the tightest cgroup (v2, else v1) of this process.

    None if there is no limit.

    Available is limit - usage + inactive file cache, which the kernel drops before it kills processes.
    """
    limits: list[tuple[int, int]] = []
    for folder, limit_file, usage_file, cache_field in _groups(cgroup, proc):
        limit = _number(folder / limit_file)
        if limit is None or limit >= UNLIMITED:
            continue
        stat = _text(folder / "memory.stat")
        match = re.search(rf"^{cache_field} (\d+)$", stat, re.MULTILINE)
        cache = int(match[1]) if match else 0
        limits.append((limit, max(0, limit - (_number(folder / usage_file) or 0) + cache)))
    return min(limits, key=lambda pair: pair[1]) if limits else None


def _groups(cgroup: Path, proc: Path) -> list[tuple[Path, str, str, str]]:
    """Return every cgroup folder from this process's own up to the root, with its file names."""
    lines = [
        line.split(":", 2) for line in _text(proc / "self" / "cgroup").splitlines() if line.count(":") >= 2
    ]
    folders: list[tuple[Path, str, str, str]] = []
    for _, controllers, path in lines:
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = (
                cgroup / "memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        own = root / path.lstrip("/")
        folders += [
            (folder, *names) for folder in (own, *own.parents) if folder == root or root in folder.parents
        ]
    return folders


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # a cgroup file may be absent (other version) or hidden by the container
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None
