"""One process of a grader, seen from the parent: a request, a deadline, and a reply or the reason for none.

Nothing that the process sends is trusted: a reply is one bounded line of JSON with the request's token.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import unfreeze
from unfreeze.core.errors import UserError
from unfreeze.core.units import format_bytes
from unfreeze.rollout.child import BY_SIGNAL, CROWDED
from unfreeze.rollout.limits import Confined, Limits
from unfreeze.rollout.reward import MAX_MESSAGE, Outcome
from unfreeze.untrusted.json_object import parse_object

MAX_REPLY = 2**18  # bytes of a reply
MAX_PRINTED = 4 * MAX_MESSAGE  # bytes that are read of what it printed
PATIENCE = 2.0
"""Seconds that a process may take to end."""
GRADER = "UNFREEZE_GRADER"
"""Environment variable that tells a process that it is a grader's."""
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class Gone:
    """The process did not answer. message: why, on one line."""

    outcome: Outcome
    message: str


@dataclass(frozen=True)
class Reply:
    """An answer of a worker, or Gone, and the start of what was printed meanwhile."""

    content: Mapping[str, Any] | Gone
    printed: str


class Worker:
    """A process that can be killed, with all that it started.

    folder   parent of its temporary folder
    alive    False once it was killed
    loaded   True once its files are loaded; set by the pool
    """

    def __init__(self, limits: Limits, folder: Path):
        self.limits, self.alive, self.loaded, self.confined = limits, True, False, Confined()
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL
        self._output = os.open(self.folder / "printed", flags, 0o600)
        os.unlink(self.folder / "printed")
        inherited = os.environ.get("PYTHONPATH", "")
        package = str(Path(unfreeze.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-m", "unfreeze.rollout.child", *self._arguments()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            cwd=self.folder,
            bufsize=0,
            start_new_session=True,
            env={
                **os.environ,
                **dict.fromkeys(ONE_THREAD, "1"),
                "TMPDIR": str(self.folder),
                "PYTHONPATH": os.pathsep.join([package, inherited] if inherited else [package]),
                GRADER: "1",
            },
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.writes, self.reads = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.writes, False)
        os.set_blocking(self.reads, False)
        self._rest, self._line = memoryview(b""), bytearray()
        self._token, self.deadline = "", 0.0
        self.seconds = 0.0

    def _arguments(self) -> list[str]:
        return [json.dumps(self.limits.as_json()), str(self.folder)]

    @property
    def has_more(self) -> bool:
        """True while a part of the request is not written yet."""
        return len(self._rest) > 0

    def ask(self, request: Mapping[str, Any], seconds: float) -> None:
        """Begin a request; `advance` gives its reply, at most `seconds` later."""
        self._token = secrets.token_hex(8)
        request = {**request, "token": self._token, "seconds": seconds}
        self._rest, self._line = memoryview(json.dumps(request, default=str).encode() + b"\n"), bytearray()
        self.seconds, self.deadline = seconds, time.monotonic() + seconds

    def advance(self) -> Reply | None:
        """Write and read as far as it goes without waiting. -> the reply; None if it is still to come.

        After Gone the process is killed.
        """
        try:
            while self._rest:
                self._rest = self._rest[os.write(self.writes, self._rest) :]
        except BlockingIOError:
            pass
        except OSError:  # it has closed its end; reading tells more
            self._rest = memoryview(b"")
        try:
            while b"\n" not in self._line:
                if not (chunk := os.read(self.reads, 2**16)):
                    return self._end(self._why())
                self._line += chunk
                if len(self._line) > MAX_REPLY:
                    return self._end(Gone("garbage", f"its process sent more than {MAX_REPLY:,} bytes"))
        except BlockingIOError:
            if time.monotonic() < self.deadline:
                return None
            return self._end(Gone("timeout", f"no answer within {self.seconds:g} s"))
        content = self._parsed(bytes(self._line))
        if content is None:
            return self._end(Gone("garbage", f"its process sent {bytes(self._line[:60])!r}"))
        printed = self._printed()
        if content.get("leaves"):  # threads or processes that would go on; it ends itself
            self.kill()
        return Reply(content, printed)

    def _parsed(self, line: bytes) -> Mapping[str, Any] | None:
        try:
            content = parse_object(line, "reply", UserError)
        except UserError:
            return None
        return content if content.get("token") == self._token else None

    def _printed(self) -> str:
        text = os.pread(self._output, MAX_PRINTED, 0).decode("utf-8", "replace")[:MAX_MESSAGE]
        os.ftruncate(self._output, 0)
        return text

    def _end(self, gone: Gone) -> Reply:
        printed = self._printed()
        self.kill()
        return Reply(gone, printed)

    def _why(self) -> Gone:
        """Return why the process closed its pipe: its exit code, read before its group's number is free."""
        until = time.monotonic() + 1.0
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (status := os.waitid(os.P_PID, self._process.pid, flags)) is None:
            if time.monotonic() > until:
                return Gone("ended", "it closed the pipe of its answers")
            time.sleep(0.002)
        code = status.si_status if status.si_code == os.CLD_EXITED else BY_SIGNAL + status.si_status
        if code == CROWDED:
            return Gone("processes", f"it started more than {self.limits.processes} processes or threads")
        if code == BY_SIGNAL + signal.SIGXCPU:
            return Gone("timeout", f"more than {self.seconds:g} s of CPU")
        if code == BY_SIGNAL + getattr(signal, "SIGXFSZ", 0):
            most = format_bytes(self.limits.file_bytes)
            return Gone("ended", f"its process was ended for a file of more than {most} (or ulimit -f)")
        if code > BY_SIGNAL:
            with suppress(ValueError):
                return Gone("ended", f"its process was ended by {signal.Signals(code - BY_SIGNAL).name}")
        return Gone("ended", f"its process ended itself, with exit code {code}")

    def kill(self) -> None:
        """Kill the process and all that it started, and remove its folder."""
        if not self.alive:
            return
        self.alive = False
        below: list[psutil.Process] = []
        if not self.confined.processes:  # some may have left the group
            with suppress(psutil.Error):
                below = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()  # it ends those below, waits for them, and ends
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE)
        for process in below:
            with suppress(psutil.Error):
                process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        os.close(self._output)
        shutil.rmtree(self.folder, ignore_errors=True)
