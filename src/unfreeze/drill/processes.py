"""Runs of the sandbox in separate processes, to be killed or to train together.

Only processes started here are killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from unfreeze.drill.fault import Unnamed

# seconds; two starts of torch and a small run take 6 on an idle machine with two cores, and 90 on one shared
# by seven others
PATIENCE = 300.0
CODE = (
    "import sys; from unfreeze.recipes import sft; from unfreeze.core.command import Common; "
    "sft.train(sft.Config.model_validate_json(open(sys.argv[1]).read()), Common(quiet=True))"
)


def start(config: Any, file: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `unfreeze sft` with a Config in a process."""
    file.write_text(config.model_dump_json(), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-c", CODE, str(file)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def kill_in_training(config: Any, run: Path) -> int:
    """Start the run, and kill -9 it once it has saved two steps. -> step of its last complete save."""
    from unfreeze.train.run import latest

    process = start(config, run.with_suffix(".json"))
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        save = latest(run)
        if save is not None and save.name >= "step-000002":
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    process.kill()
    _, error = process.communicate()
    save = latest(run)
    if save is None:
        raise Unnamed(f"the run to be killed never saved: {error[-300:]}")
    return int(save.name.removeprefix("step-"))


def waiting_process(port: int) -> subprocess.Popen[str]:
    """Start process 1 of 2, which registers in the store at that port and then waits."""
    code = (
        "import sys, time; from unfreeze.parallel.processes.roll import Roll, store_at; "
        "Roll(store_at('127.0.0.1', int(sys.argv[1]), first=False), 1, 2); time.sleep(600)"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(port)], text=True)


def train_together(config: Any, run: Path, count: int = 2) -> float:
    """Train on `count` processes, started as torchrun does. -> seconds.

    Raises Unnamed if one fails, or hangs longer than PATIENCE.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    processes = [
        start(config, run.with_suffix(f".{rank}.json"), RANK=str(rank), LOCAL_RANK=str(rank), **group)
        for rank in range(count)
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise Unnamed(
            f"{count} processes did not finish within {PATIENCE:.0f} s: one waits for the other"
        ) from None
    finally:
        for process in processes:
            process.kill()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    if failed:
        raise Unnamed(f"{len(failed)} of {count} processes failed: {failed[0][-300:]}")
    return time.monotonic() - began
