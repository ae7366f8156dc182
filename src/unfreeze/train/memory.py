"""Memory of this process, as the train events report it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


def memory_fields(device: torch.device) -> dict[str, int]:
    """peak_bytes; on CUDA also fragmentation_bytes.

    Fragmentation: reserved by the allocator minus allocated, so held and not in use (docs/why/trust.md L2).
    """
    fields = {"peak_bytes": peak_bytes(device)}
    if device.type == "cuda":
        fields["fragmentation_bytes"] = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )
    return fields


def peak_bytes(device: torch.device) -> int:
    """Bytes at the highest point since the process started or reset_peak_bytes was called.

    cuda: allocated by torch on that device. cpu: resident memory, VmHWM of /proc/self/status (on macOS
    ru_maxrss, since start only).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024  # bytes on macOS, KiB elsewhere


def reset_peak_bytes(device: torch.device) -> bool:
    """Start a new measurement from the present use.

    False where the system doesn't allow it: the peak then counts from process start.

    On Linux writes 5 to /proc/self/clear_refs, which also resets what a parent process reads as ru_maxrss.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except (FileNotFoundError, PermissionError):  # macOS has no /proc; some containers mount it read-only
        return False
    return True
