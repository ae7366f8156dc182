"""Sides: each loaded in a process of its own, then called in turn (A B B A …).

They take turns so that a drift of the machine's speed affects all of them alike.

    ours = Side("unfreeze", "benchmarks.cases.moe:ours", {"checkpoint": …})
    with Sides([ours, Side("peft", …)], say) as sides:
        sides.take_turns("step", warmup=1, rounds=5)        -> sides["peft"].median("seconds"), .peak()
        sides["unfreeze"].call("check")                     -> {"loss": …}

A side is a function that loads and returns a Worker: facts about what was loaded, and named calls. The two
processes exchange lines of JSON: a request {"call": name, …arguments} on the worker's stdin, a reply
{…result, "seconds", "peak", "resident"} on its stdout. Output of libraries goes to a file; its last lines
are shown if the worker dies. A worker ends when its stdin does, so none outlives the command.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from unfreeze.core.errors import UserError
from unfreeze.core.units import format_seconds

Say = Callable[[str], None]
SHOWN = 6  # last lines of a dead worker's stderr
GRACE, HASTE = 3.0, 0.3  # seconds a worker has to end by itself, and after Ctrl-C or an error


class SideFailed(UserError):
    """A worker process died or answered with an error.

    The message names the side and the call, and has the last lines of its output.
    """


@dataclass(frozen=True)
class Worker:
    """The return value of a side's function.

    facts: JSON values about what was loaded. calls: name -> function(**arguments) -> JSON values.
    """

    calls: Mapping[str, Callable[..., dict[str, Any]]]
    facts: Mapping[str, Any] = field(default_factory=dict)


OF_PEERS = {"GOMP_SPINCOUNT": "300000"}
"""Variables of a peer's process: libgomp's own default, which `import unfreeze` changes."""


class Side:
    """One side of a benchmark.

    load       "module:function", called in the worker with `arguments` (JSON values)
    threads    torch's in the worker; 0: all cores
    environment  variables of its process, added to ours
    loaded     facts, with load_seconds, load_peak (peak bytes while loading) and loaded_resident (bytes
               after loading)
    replies    call -> the reply of each turn after the warm-up
    """

    def __init__(self, name: str, load: str, arguments: Mapping[str, Any], *, threads: int = 0):
        self.name, self.load, self.arguments, self.threads = name, load, dict(arguments), threads
        self.environment: Mapping[str, str] = OF_PEERS if load.startswith("harness.peers:") else {}
        self.loaded: dict[str, Any] = {}
        self.replies: dict[str, list[dict[str, Any]]] = {}
        self._peaks: dict[str, int] = {}
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None

    def start(self) -> None:
        """Start the process and wait until it is loaded. Raises SideFailed."""
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed in stop)
        job = json.dumps({"load": self.load, "arguments": self.arguments, "threads": self.threads})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.sides", job],
            env=os.environ | {"PYTHONPATH": python_path()} | dict(self.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self.loaded = self._read("loading")

    def call(self, name: str, *, within: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Send one request; -> the result of the call, with seconds, cpu_seconds, peak and resident (bytes).

        On a GPU peak is the memory that torch allocated there, and host_peak that of the process.
        fresh_peak=True: peaks start with this call. within: seconds, after which the process is ended.
        Raises SideFailed.
        """
        assert self._process is not None and self._process.stdin is not None, "start the side first"
        try:
            self._process.stdin.write(json.dumps({"call": name, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: its last output is read below
        reply = self._read(name, within)
        if arguments.get("fresh_peak"):
            self._peaks.pop(name, None)
        self._peaks[name] = max(self._peaks.get(name, 0), reply["peak"])
        return reply

    def values(self, call: str, name: str) -> list[Any]:
        """The field `name` of every timed reply of a call."""
        return [reply[name] for reply in self.replies[call]]

    def median(self, name: str, call: str = "step") -> float:
        return statistics.median(self.values(call, name))

    def peak(self, call: str = "step") -> int:
        """Return the peak bytes of the timed calls.

        From the end of loading, or of the last such call with fresh_peak, to the end of the last such call.
        """
        return self._peaks[call]

    def stop(self, grace: float = GRACE) -> None:
        """End the process: close its stdin; then SIGTERM and SIGKILL, each after `grace` seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        for end in (lambda: process.stdin and process.stdin.close(), process.terminate, process.kill):
            try:
                end()
            except BrokenPipeError:
                pass
            try:
                process.wait(grace)
                break
            except subprocess.TimeoutExpired:
                continue
        if process.stdout:
            process.stdout.close()
        if self._said:
            self._said.close()

    def _read(self, at: str, within: float | None = None) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        # one line answers each request, so nothing is in the buffer yet
        if within is not None and not select.select([self._process.stdout], [], [], within)[0]:
            self._process.kill()
            raise SideFailed(f"{self.name} did not finish {at} within {within:g} s")
        line = self._process.stdout.readline()
        if line:
            reply = json.loads(line)
            if "error" in reply:
                raise SideFailed(
                    f"{self.name} failed at {at}: {reply['error']}", next=reply.get("next", "")
                ) from None
            return reply
        raise SideFailed(f"{self.name} died at {at}: {ending(self._process.wait())}{self._last_words()}")

    def _last_words(self) -> str:
        assert self._said is not None
        self._said.seek(0)
        lines = [
            line.strip() for line in self._said.read().decode("utf-8", "replace").splitlines() if line.strip()
        ]
        return f"; it said last: {' | '.join(lines[-SHOWN:])}" if lines else "; it said nothing"


def python_path() -> str:
    """PYTHONPATH of a process that imports `benchmarks`: the repository's root, then the current value."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def ending(code: int) -> str:
    """An exit code in words; -9 (SIGKILL) is how the kernel ends a process when memory is full."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name if -code in {s.value for s in signal.Signals} else f"signal {-code}"
    return f"ended by {name}" + (
        ", as the kernel does when memory is full" if -code == signal.SIGKILL else ""
    )


class Sides:
    """Sides that are loaded at the same time.

    A context manager: its exit ends every process, also after Ctrl-C.
    """

    def __init__(self, sides: Sequence[Side], say: Say):
        self._sides, self.say = {side.name: side for side in sides}, say
        if len(self._sides) < len(sides):
            raise ValueError(f"two sides have one name: {[side.name for side in sides]}")

    def __enter__(self) -> Sides:
        try:
            for side in self._sides.values():
                side.start()
                self.say(f"{side.name}: loaded in {format_seconds(side.loaded['load_seconds'])}")
        except BaseException:
            self.stop(HASTE)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(GRACE if error is None else HASTE)

    def __getitem__(self, name: str) -> Side:
        return self._sides[name]

    def __iter__(self):
        return iter(self._sides.values())

    def stop(self, grace: float = GRACE) -> None:
        for side in self._sides.values():
            side.stop(grace)

    def take_turns(
        self,
        call: str = "step",
        *,
        warmup: int,
        rounds: int,
        peaks: Literal["all", "timed"] = "all",
        **arguments: Any,
    ) -> None:
        """Call each side once per round, in order.

        Every second round is in reverse order (A B B A), so that no side always follows the same one.
        The first `warmup` rounds are not in `replies`. With peaks "timed" they don't count for `peak`
        either, because compiling a loop takes memory once.
        """
        for index in range(warmup + rounds):
            order = list(self) if index % 2 == 0 else list(self)[::-1]
            times = []
            for side in order:
                fresh = {"fresh_peak": True} if peaks == "timed" and index == warmup else {}
                reply = side.call(call, **arguments, **fresh)
                times.append(f"{side.name} {reply['seconds']:.2f} s")
                if index >= warmup:
                    side.replies.setdefault(call, []).append(reply)
            label = (
                f"warm-up {index + 1}/{warmup}" if index < warmup else f"round {index - warmup + 1}/{rounds}"
            )
            self.say(f"{label}: {', '.join(times)}")


def work(job: str, requests: IO[str], replies: IO[str]) -> None:
    """The worker's side of the protocol: load and reply, then reply to each request until stdin closes."""
    import torch

    from unfreeze.parallel.machine import num_cores, resident_bytes
    from unfreeze.train.memory import peak_bytes, reset_peak_bytes

    config = json.loads(job)
    torch.set_num_threads(config["threads"] or num_cores())
    host = torch.device("cpu")

    def answer(run: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        try:
            started, cpu = time.perf_counter(), time.process_time()
            result = dict(run())
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        except UserError as error:
            return {"error": error.message, "next": error.next}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
        memory = {"peak": peak_bytes(host), "resident": resident_bytes()}
        if torch.cuda.is_initialized():
            memory |= {"host_peak": memory["peak"], "peak": peak_bytes(torch.device("cuda"))}
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, **memory, **result}

    def restart_peaks() -> None:
        reset_peak_bytes(host)
        if torch.cuda.is_initialized():
            reset_peak_bytes(torch.device("cuda"))

    def send(reply: Mapping[str, Any]) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    loaded: list[Worker] = []

    def load() -> Mapping[str, Any]:
        module, _, function = config["load"].partition(":")
        loaded.append(getattr(importlib.import_module(module), function)(**config["arguments"]))
        return loaded[0].facts

    reply = answer(load)
    if "error" not in reply:
        reply |= {
            "load_seconds": reply.pop("seconds"),
            "load_peak": reply.pop("peak"),
            "loaded_resident": reply.pop("resident"),
        }
    send(reply)
    restart_peaks()
    for line in requests if loaded else ():
        request = json.loads(line)
        gc.collect()  # so that cycles left by an earlier call are not counted here
        if request.pop("fresh_peak", False):
            restart_peaks()
        send(answer(lambda: loaded[0].calls[request.pop("call")](**request)))  # noqa: B023  (called at once)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's: it closes our stdin, or ends us
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr; stdout carries the protocol
    work(sys.argv[1], sys.stdin, replies)


if __name__ == "__main__":
    main()
