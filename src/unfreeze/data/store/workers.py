"""Encode rows on all cores: one process per core reads batches and answers with the encoded rows.

RowBatch ->  [length, marshal]  -> worker: Coder -> [length, marshal] -> EncodedRows

A worker is `python -c`, not a fork and not multiprocessing: it imports only what encoding needs, never torch
and never the user's script. It ends when its pipe closes, so it cannot outlive this process. It is in its own
process group, so Ctrl-C reaches only this process, which then ends it.

The result is bit-identical to that of one process, because rows are encoded independently.
"""

from __future__ import annotations

import json
import logging
import marshal
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import IO

from unfreeze.core import garbage
from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import text_bytes
from unfreeze.data.rows.row import RowPlace
from unfreeze.data.store.encoding import Coder, EncodedRows, RowBatch, Spec
from unfreeze.data.tokens.tokenizer import Tokenizer, load_tokenizer

Progress = Callable[[int, int, int], None]
"""Called after each batch with rows done, bytes done, and total bytes."""

log = logging.getLogger(__name__)

PAYS = 1.5
"""Minimum seconds of remaining work in one process for workers to pay off: each takes 0.5 s to start."""
TRIED = 0.1
"""Seconds of encoding here before that is estimated."""
AHEAD = 2
"""Batches per worker to read ahead."""
LATER = EncodedRows()
"""Placeholder for a part that is not ready, when the caller does not wait."""
NICE = 19
"""Niceness of workers beside training: they use only spare CPU time."""
MOST = 16
"""Maximum number of workers: each holds a tokenizer, about 50 to 400 MB."""
SINGLE = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
) | {"TOKENIZERS_PARALLELISM": "false"}
"""Environment of a worker: libraries must not start threads, because there is one worker per core."""


def num_workers() -> int:
    """Return the number of cores that this process may use, limited by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, MOST, cpu_quota()))


def cpu_quota(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU seconds per second that this process's control groups allow; inf if unlimited.

    quota / period: from cpu.max (cgroup v2), or cpu.cfs_quota_us and cpu.cfs_period_us (v1).
    """
    least, v1 = math.inf, ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, files = (groups / "cpu", v1) if controllers else (groups, ("cpu.max",))
        inner = root / path.lstrip("/")
        for folder in (inner, *(parent for parent in inner.parents if parent.is_relative_to(root))):
            numbers = " ".join(_text(folder / file) for file in files).split()
            if len(numbers) == 2 and numbers[0].isdigit() and int(numbers[1]):  # "max" or -1: no limit
                least = min(least, int(numbers[0]) / int(numbers[1]))
    return least


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # another version of cgroups, or another system
        return ""


def encoded_parts(
    batches: Iterator[RowBatch],
    coder: Coder,
    spec: Spec,
    tokenizer: Tokenizer,
    workers: int | None,
    progress: Progress | None,
    *,
    ahead: int = 0,
    waits: Callable[[], bool] = lambda: True,
) -> Generator[EncodedRows]:
    """Yield the encoded batches in order, encoded here or by `workers` processes (see encode_files).

    ahead: number of batches to read ahead, if more than AHEAD per worker.
    waits: called before each batch; if it returns False, LATER is yielded for a part that is not ready.
    """
    count = num_workers() if workers is None else workers
    may = count > (1 if workers is None else 0) and tokenizer.origin is not None
    total = sum(text_bytes(Path(path)) for path in spec.paths if os.path.isfile(path))
    started, done, rows = time.perf_counter(), 0, 0
    pool: Workers | None = None
    try:
        # encode here until workers are known to pay off and are ready
        while pool is None or not pool.ready():
            if not waits():
                yield LATER
                continue
            if may and pool is None:
                spent = time.perf_counter() - started
                if workers or (spent > TRIED and spent / max(done, 1) * (total - done) > PAYS):
                    try:
                        pool = Workers(count, spec, tokenizer, ahead)
                    # too few processes or threads, or too little memory
                    except (OSError, RuntimeError) as error:
                        log.warning("rows are encoded by this process alone: %s", error)
                        may = False
                    if workers and pool is not None:
                        break
            batch = next(batches, None)
            if batch is None:
                return
            yield coder(batch)
            rows, done = rows + len(batch.rows), done + batch.num_bytes
            if progress is not None:
                progress(rows, done, total)
        # from now on, the workers encode
        for batch, part in pool.parts(batches, waits):
            if part is LATER:
                yield LATER
                continue
            part = part or coder(batch)
            yield part
            rows, done = rows + len(batch.rows), done + batch.num_bytes
            if progress is not None:
                progress(rows, done, total)
    finally:
        if pool is not None:
            pool.close()


class Workers:
    """Encoding processes, each with a thread here that feeds it.

    ahead: number of batches to read ahead. 0: AHEAD per worker, with no training beside them
    """

    def __init__(self, count: int, spec: Spec, tokenizer: Tokenizer, ahead: int = 0):
        assert tokenizer.origin is not None
        folder, now, variables = tokenizer.origin
        hello = {
            "spec": asdict(spec),
            "folder": str(folder),
            "now": now and now.isoformat(),
            "variables": dict(variables),
            "identity": tokenizer.identity,
            "beside training": ahead > 0,
        }
        greeting = json.dumps(hello).encode()
        self._workers: list[Worker] = []
        self._ahead = max(AHEAD * count, ahead)
        self._threads = ThreadPoolExecutor(count, "encode")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._own = threading.local()
        self.given_up = False
        # each thread claims a worker and waits until it is ready
        self._together = threading.Barrier(count)
        try:
            for _ in range(count):
                self._workers.append(Worker(greeting))
                self._idle.put(self._workers[-1])
            self._greeted = [self._threads.submit(self._greet) for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        self._own.worker = self._idle.get()
        self._together.wait()
        self._own.worker.greet()

    def ready(self) -> bool:
        """Return True if all workers can start."""
        return all(greeted.done() for greeted in self._greeted)

    def parts(
        self, batches: Iterator[RowBatch], waits: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[RowBatch, EncodedRows | None]]:
        """Yield every batch with its encoded rows, in order; None if it must be encoded here.

        That is the case for all batches once `given_up` is set, and for values that are not plain (dates in
        tables).

        A worker gets its batches in order too. If one was killed, the remaining batches are encoded here.
        Raises DataError if one ended by itself.
        """
        for greeted in self._greeted:
            try:
                greeted.result()
            except Killed as error:
                self._alone(error)
        waiting: deque[tuple[RowBatch, Future[EncodedRows | None]]] = deque()
        broken: BaseException | None = None
        while True:
            while broken is None and len(waiting) < self._ahead:
                try:
                    batch = next(batches, None)
                except Exception as error:  # the file cannot be read further: first return earlier batches
                    broken = error
                    break
                if batch is None:
                    break
                waiting.append((batch, self._threads.submit(self._encode, batch)))
            if not waiting:
                break
            if not waits() and not waiting[0][1].done():
                yield waiting[0][0], LATER
                continue
            batch, encoded = waiting.popleft()
            part = encoded.result()
            yield batch, None if self.given_up else part
        if broken is not None:
            raise broken

    def _encode(self, batch: RowBatch) -> EncodedRows | None:
        if self.given_up:
            return None
        try:
            packed = marshal.dumps((batch.source, [(tuple(place), raw) for place, raw in batch.rows]))
        except ValueError:
            return None
        try:
            return self._own.worker.encode(packed)
        except Killed as error:
            self._alone(error)
            return None

    def _alone(self, error: Killed) -> None:
        """Encode the remaining batches in this process."""
        if not self.given_up:
            self.given_up = True
            log.warning("%s: this process encodes the remaining rows", error.message)

    def close(self) -> None:
        """End all workers immediately."""
        self.given_up = True  # they are killed on purpose
        self._together.abort()  # releases threads that wait for a worker that never started
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()


class Killed(DataError):
    """A worker was killed by a signal, most likely by the kernel for memory."""


class Worker:
    """Handle of one worker process."""

    def __init__(self, hello: bytes):
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._hello = hello
        code = f"import sys; sys.path[:] = {[*sys.path]!r}; from {__name__} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | SINGLE,
            process_group=0 if os.name == "posix" else None,
        )

    def greet(self) -> None:
        """Send the options, and wait until the worker is ready."""
        self._asked(self._hello)

    def encode(self, batch: bytes) -> EncodedRows:
        return EncodedRows.unpack(self._asked(batch))

    def _asked(self, question: bytes) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, question)
            answer = receive(self._process.stdout)
        except (OSError, ValueError):
            answer = None
        if answer is None:
            raise self._dead()
        return answer

    def _dead(self) -> DataError:
        code = self._process.wait()
        if code < 0:
            memory = ", most likely for memory" if code == -signal.SIGKILL else ""
            return Killed(f"a process that encodes rows was killed by signal {-code}{memory}")
        self._said.seek(0)
        last = self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        message = f"a process that encodes rows ended with {code}" + (f": {last}" if last else "")
        return DataError(message, next="run the same command again")

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with suppress(OSError):  # nobody reads what is left to write
                    pipe.close()


def send(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little"))
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Receive one message; None if the other side has ended."""
    size = pipe.read(8)
    if len(size) < 8:
        return None
    content = pipe.read(length := int.from_bytes(size, "little"))
    return content if len(content) == length else None


def main() -> None:
    """Run a worker: receive the options, then answer each batch with EncodedRows until the pipe closes."""
    # libraries print to stderr; stdout carries only answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    if (hello := receive(questions)) is None:
        return
    options = json.loads(hello)
    now = options["now"] and datetime.fromisoformat(options["now"])
    tokenizer = load_tokenizer(options["folder"], now=now or None, template_variables=options["variables"])
    if tokenizer.identity != options["identity"]:
        raise SystemExit(f"the tokenizer's files in {options['folder']} changed in the meantime")
    garbage.put_off()
    spec = Spec(**options["spec"])
    coder = Coder(spec, spec.encoder(tokenizer))
    if options["beside training"]:
        with suppress(AttributeError, OSError):  # not available on this system
            os.nice(NICE)
    with suppress(BrokenPipeError), closing(answers):
        send(answers, b"ready")
        while (question := receive(questions)) is not None:
            source, rows = marshal.loads(question)
            part = coder(RowBatch(source, [(RowPlace(*place), raw) for place, raw in rows]))
            send(answers, part.pack())
