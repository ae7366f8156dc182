"""The doctor's check of the machine: versions, cores, memory, CUDA, dtype and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from unfreeze.core.torchrun import nearest_multiples, started
from unfreeze.core.units import format_bytes, plural
from unfreeze.job.doctor.finding import Finding
from unfreeze.job.opening.kernels import kernels_line
from unfreeze.job.opening.precision import BEGUN, dtype_line
from unfreeze.kernels.precision import slow

if TYPE_CHECKING:
    from unfreeze.job.doctor.checks import Subject


def check_machine(subject: Subject) -> Iterator[Finding]:
    """Report versions, cores, memory, CUDA, dtype and kernels; warn of settings that do not suit them."""
    import platform

    import torch

    import unfreeze
    from unfreeze.kernels import cards
    from unfreeze.parallel.machine import hardware

    threads = subject.config.memory.threads or torch.get_num_threads()
    device = hardware(subject.device)
    cuda = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "no CUDA device"
    facts = (
        f"unfreeze {unfreeze.__version__}, Python {platform.python_version()}, torch {torch.__version__},"
        f" {cuda}; {device.name}, {plural(device.cores, 'core')}, {plural(threads, 'thread')},"
        f" {format_bytes(device.available)}"
        f" of {format_bytes(device.total)} free"
    )
    if threads > device.cores:
        remedy = f"--threads {device.cores}, or unset OMP_NUM_THREADS"
        yield Finding(
            "machine",
            "warn",
            f"{facts}: there are more threads than cores, so they wait for each other",
            remedy,
        )
    else:
        yield Finding("machine", "ok", facts)
    if unused := cards.passed_over(subject.config.memory.device, subject.device):
        yield Finding("machine", "warn", f"the run would be on the CPU: {unused.why}", unused.remedy)
    name = subject.config.memory.dtype
    if why := slow(name, subject.device):
        begun = subject.dtype is not None and subject.dtype.why == BEGUN
        remedy = "--dtype float32" + (" --save.allow-changed dtype" if begun else ", or leave dtype out")
        yield Finding("machine", "warn", why, remedy)
    elif subject.dtype is not None:
        yield Finding("machine", "ok", dtype_line(subject.dtype))
    if subject.device.type == "cpu":
        yield Finding("machine", "ok", kernels_line(name))
    processes, parts = max(started().size, torch.cuda.device_count()), subject.config.memory.micro_batches
    if parts % processes:
        near = " or ".join(f"--micro-batches {count}" for count in nearest_multiples(parts, processes))
        line = (
            f"micro_batches {parts} is no multiple of {processes} processes: processes need equal"
            " shares of a step"
        )
        yield Finding("machine", "warn" if started().size == 1 else "fault", line, near)
