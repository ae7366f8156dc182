"""Rows encoded by all cores: a process for each, which reads batches and answers with what became of them.

    RowBatch ->  [length, marshal]  -> worker: Coder -> [length, marshal] -> EncodedRows

A worker is `python -c`, not a fork and not multiprocessing: it imports what encoding takes, never torch and
never the user's script. It ends when its pipe closes, so none outlives this process, however that ends. It is
in a group of its own, so Ctrl-C reaches this process alone, which then ends it.

The result is bit for bit that of one process: what becomes of a row hangs on no other row.
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
"""Is told how many rows and bytes of the files are encoded, and of how many bytes, after each batch."""

log = logging.getLogger(__name__)

PAYS = 1.5
"""Seconds the rest must take in one process for workers to be started: each takes half of one to begin."""
TRIED = 0.1
"""Seconds of encoding here before that is judged."""
AHEAD = 2
"""Batches for each worker that are read before the first of them is finished."""
LATER = EncodedRows()
"""Stands for a part that is not there yet, where nobody waits for it."""
NICE = 19
"""Of workers beside training: they take what it leaves of the cores."""
MOST = 16
"""Each holds a tokenizer, some 50 to 400 MB."""
SINGLE = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
) | {"TOKENIZERS_PARALLELISM": "false"}
"""A worker is one of as many as there are cores: no library in it starts threads of its own."""


def num_workers() -> int:
    """One for each core that this process may run on, and that a container's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(cores, MOST, cpu_quota()))


def cpu_quota(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Seconds of CPU in a second that the tightest control group of this process allows; inf where none does.

    quota / period: of cpu.max (cgroup v2), of cpu.cfs_quota_us and cpu.cfs_period_us (v1).
    """
    least, v1 = math.inf, ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root, files = (groups / "cpu", v1) if controllers else (groups, ("cpu.max",))
        inner = root / path.lstrip("/")
        for folder in (inner, *(parent for parent in inner.parents if parent.is_relative_to(root))):
            said = " ".join(_text(folder / file) for file in files).split()
            if len(said) == 2 and said[0].isdigit() and int(said[1]):  # "max" or -1: no limit
                least = min(least, int(said[0]) / int(said[1]))
    return least


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # another version of cgroups, another system
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
    """What becomes of the batches, in their order, made here or by `workers` processes (see encode_files).

    ahead: batches that are read before the first of them is finished, where AHEAD for each worker is less.
    waits: asked before each; where it says no, LATER comes instead of a part that is not there yet.
    """
    count = num_workers() if workers is None else workers
    may = count > (1 if workers is None else 0) and tokenizer.origin is not None
    total = sum(text_bytes(Path(path)) for path in spec.paths if os.path.isfile(path))
    started, done, rows = time.perf_counter(), 0, 0
    pool: Workers | None = None
    try:
        # here, until it shows that workers pay and they are ready
        while pool is None or not pool.ready():
            if not waits():
                yield LATER
                continue
            if may and pool is None:
                spent = time.perf_counter() - started
                if workers or (spent > TRIED and spent / max(done, 1) * (total - done) > PAYS):
                    try:
                        pool = Workers(count, spec, tokenizer, ahead)
                    except (OSError, RuntimeError) as error:  # no process, thread or memory is left for them
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
        # then by them
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
    """Processes that encode, each with a thread here that feeds it.

    ahead: batches that are read before the first of them is finished; 0: AHEAD for each, and nothing trains
    beside them
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
        told = json.dumps(hello).encode()
        self._workers: list[Worker] = []
        self._ahead = max(AHEAD * count, ahead)
        self._threads = ThreadPoolExecutor(count, "encode")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._own = threading.local()
        self.given_up = False
        # one call for each thread takes its worker and waits for its first word
        self._together = threading.Barrier(count)
        try:
            for _ in range(count):
                self._workers.append(Worker(told))
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
        """Whether all of them can begin."""
        return all(greeted.done() for greeted in self._greeted)

    def parts(
        self, batches: Iterator[RowBatch], waits: Callable[[], bool] = lambda: True
    ) -> Iterator[tuple[RowBatch, EncodedRows | None]]:
        """Every batch and what became of it, in order; None where it is to be encoded here.

        All are once `given_up` is set, and those that hold more than plain values (a table's dates).

        A worker gets batches in their order too. Where one was killed, all that is left is encoded here.
        Raises DataError where one ended by itself.
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
                except Exception as error:  # a file that cannot be read on: first comes what stands before it
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
            batch, made = waiting.popleft()
            part = made.result()
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
        """From here on this process encodes."""
        if not self.given_up:
            self.given_up = True
            log.warning("%s: the rest is encoded by this process alone", error.message)

    def close(self) -> None:
        """End them, whatever they are doing."""
        self.given_up = True  # they are killed by us
        self._together.abort()  # of threads that wait for one that never came
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()


class Killed(DataError):
    """A worker was ended by a signal: by the kernel for memory, most likely."""


class Worker:
    """One process, seen from here."""

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
        """Tell it how to encode, and wait until it can."""
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
            memory = ", for memory most likely" if code == -signal.SIGKILL else ""
            return Killed(f"a process that encodes rows was killed by signal {-code}{memory}")
        self._said.seek(0)
        last = self._said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        said = f"a process that encodes rows ended with {code}" + (f": {last}" if last else "")
        return DataError(said, next="run the same command again")

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            if pipe is not None:
                with suppress(OSError):  # what was still to be written has no reader
                    pipe.close()


def send(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(len(content).to_bytes(8, "little"))
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """One message; None where the other side has ended."""
    size = pipe.read(8)
    if len(size) < 8:
        return None
    content = pipe.read(length := int.from_bytes(size, "little"))
    return content if len(content) == length else None


def main() -> None:
    """A worker's life: told how, then EncodedRows for each batch, until the pipe closes."""
    # what libraries print goes to stderr: stdout carries the answers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = sys.stdin.buffer
    if (hello := receive(questions)) is None:
        return
    told = json.loads(hello)
    now = told["now"] and datetime.fromisoformat(told["now"])
    tokenizer = load_tokenizer(told["folder"], now=now or None, template_variables=told["variables"])
    if tokenizer.identity != told["identity"]:
        raise SystemExit(f"the tokenizer's files in {told['folder']} changed meanwhile")
    garbage.put_off()
    spec = Spec(**told["spec"])
    coder = Coder(spec, spec.encoder(tokenizer))
    if told["beside training"]:
        with suppress(AttributeError, OSError):  # another system
            os.nice(NICE)
    with suppress(BrokenPipeError), closing(answers):
        send(answers, b"ready")
        while (question := receive(questions)) is not None:
            source, rows = marshal.loads(question)
            part = coder(RowBatch(source, [(RowPlace(*place), raw) for place, raw in rows]))
            send(answers, part.pack())
