"""The first run on a machine compiles its CPU loops: some 20 seconds of one core in bf16.

A second process (prepare.py) compiles those of backward and of the optimizer. It starts before this one
imports torch, which takes 2 s in each. It continues while the run reads the model and generates the samples
(decision 77).

Both keep their compiled code in numba's cache on disk, where the next run finds it. A stamp beside the cache
says that it is complete. The stamp is named after the loops' source, so edited loops are compiled again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from unfreeze.kernels.loops.on_disk import stamp

_RUNNING: list[subprocess.Popen[bytes]] = []
COMPILER = "unfreeze.kernels.choice.prepare"


@contextmanager
def compiling(device: str, threads: int, dtype: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """While the body runs, a second process compiles the loops; it stops with the body.

    None if there is nothing to compile (a GPU, one thread, or already done), and in all processes of a host
    but the first. The second process checks again, with torch: it stops at once if "auto" is a GPU or torch
    takes one thread.

    device: a torch device name or "auto"; threads: of the run, 0: the machine's; dtype: a torch dtype name,
    "bfloat16" or "float32".
    """
    one_thread = 1 in (threads, os.cpu_count()) or (not threads and os.environ.get("OMP_NUM_THREADS") == "1")
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    done_stamp = None if one_thread or not first or device.startswith("cuda") else stamp(dtype)
    if done_stamp is None or done_stamp.exists():
        yield None
        return
    with beside(COMPILER, dtype, device) as process:
        yield process


@contextmanager
def beside(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """While the body runs, so does `python -m module …` in a second process. It stops with the body.

    None where no process can be started (a limit, an embedded Python): it is help, and nothing needs it.
    """
    nowhere = subprocess.DEVNULL
    command = [sys.executable, "-m", module, *arguments]
    try:
        process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
    except OSError:
        yield None
        return
    _RUNNING.append(process)
    try:
        yield process
    finally:
        _RUNNING.remove(process)
        process.terminate()
        process.wait()


@contextmanager
def quiet() -> Iterator[None]:
    """While the body runs, the second process is paused: timings have the machine to themselves."""
    stopped = (
        [process for process in _RUNNING if process.poll() is None] if hasattr(signal, "SIGSTOP") else []
    )
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)
