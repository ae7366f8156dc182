"""Scripts that begin where one process has imported everything: a fork of it each.

    forkserver.run([SCRIPT, "word"], env=…, timeout=60)    as subprocess.run([sys.executable, SCRIPT, "word"], …)
    forkserver.start(…)                                    as subprocess.Popen: poll, wait, kill

For what does not test how Python starts: importing torch and the rooms takes seconds of a core, each time.
The process that forks runs nothing itself: it has no threads, no group and no model. What it forks is a process
of its own, with its environment, folder and output, and dies alone. An environment that is read by an import
(TRITON_INTERPRET, NUMBA_CACHE_DIR, UNFREEZE_CPU_CLASS) is that of the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

IMPORTED = (  # what a run of two processes imports
    "numpy",
    "pytest",
    "safetensors.torch",
    "torch._dynamo",  # torch's optimizers import it at their first step
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "unfreeze.adapters",
    "unfreeze.cli",
    "unfreeze.generate.open",
    "unfreeze.job.job",
    "unfreeze.kernels.choice.ops",
    "unfreeze.parallel.processes.collectives",
    "unfreeze.recipes.sft",
    "unfreeze.train.fit",
    "unfreeze.train.follower",
    "unfreeze.train.state",
)


class Started:
    """A script that was begun; `stdout` and `stderr` are the files it writes to."""

    def __init__(self, server: ForkServer, pid: int, stdout: Path, stderr: Path):
        self.server, self.pid, self.stdout, self.stderr = server, pid, stdout, stderr
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus the signal's number where one ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self.server.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired where it still runs after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)


class ForkServer:
    """The process that forks; it starts at the first script, and ends with the tests."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="forkserver-"))
        self.count = 0

    def ask(self, **words: Any) -> Any:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def start(
        self, script: Sequence[object], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Started:
        """script: a file and its words, or `-c` and code."""
        self.count += 1
        files = [self.folder / f"{self.count}.{end}" for end in ("out", "err")]
        pid = self.ask(
            start=[str(word) for word in script],
            env=dict(os.environ if env is None else env),
            cwd=str(cwd or Path.cwd()),
            files=[str(file) for file in files],
        )
        return Started(self, pid, *files)

    def run(
        self,
        script: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """To its end, or to that of `timeout` seconds, where it is killed and TimeoutExpired is raised."""
        started = self.start(script, env=env, cwd=cwd)
        try:
            code = started.wait(timeout)
        finally:
            started.kill()
        said = [
            file.read_text(encoding="utf-8", errors="replace") for file in (started.stdout, started.stderr)
        ]
        return subprocess.CompletedProcess(list(map(str, script)), code, *said)

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


def serve() -> None:
    """A line of JSON in, one out: {"start": …} -> the process' number; {"poll": number} -> its code or null."""
    for name in IMPORTED:
        importlib.import_module(name)
    # numba reads its own library at the first call of a loop: .4 s, and as much in each fork that calls one
    target = importlib.import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()
    target.target_context.refresh()
    gc.collect()
    gc.freeze()
    answer_all(os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w"))


def answer_all(asking: TextIO, answering: TextIO) -> None:
    """To the end of `asking`; in a process without threads, whose forks have what it imported."""
    while line := asking.readline():
        asked = json.loads(line)
        if "poll" in asked:
            gone, status = os.waitpid(asked["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if gone else None
        elif (answer := os.fork()) == 0:
            for file in (asking, answering):
                os.close(file.fileno())
            become(asked)
        answering.write(json.dumps(answer) + "\n")
        answering.flush()


def become(asked: Mapping[str, Any]) -> NoReturn:
    """The script, in this process, as `python SCRIPT` would run it."""
    code: object = 1
    try:
        if asked.get("session"):
            os.setsid()
        for fd, path in enumerate([os.devnull, *asked["files"]]):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.dup2(file, fd)
            os.close(file)
        os.environ.clear()
        os.environ.update(asked["env"])
        os.chdir(asked["cwd"])
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
        what, *words = asked["start"]
        added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[0:1] = added
        if what == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [what, *words]
            sys.path.insert(0, str(Path(what).parent))
            runpy.run_path(what, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve()
