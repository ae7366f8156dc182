"""A few processes that hold the same functions of a user, and what they are asked, each with a deadline."""

from __future__ import annotations

import math
import os
import selectors
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unfreeze.core.closing import Closing
from unfreeze.core.errors import ConfigError
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.user_code import UserCode
from unfreeze.rollout.worker import GRADER, Gone, Reply, Worker

MOST = 4  # processes, unless a number is given
LISTEN = 0.2  # seconds between two questions to `leave`
NETWORK = "graders can reach the network: this system gives a process none of its own"
"""Said once, where it is so."""


FUNCTIONS: Mapping[str, Any] = {"do": "load"}
Leave = Callable[[Reply | None], bool]
"""Called with each reply, and with None now and then; True ends the requests that are not answered yet."""
SKIPPED = Reply(Gone("skipped", "not waited for: too many answers before it took too long"), "")


class Job(NamedTuple):
    """A request to any process, or to the one of that number."""

    request: Mapping[str, Any]
    place: int | None = None


class Pool(Closing):
    """Processes that start when they are needed, and again after they were killed.

    codes  what each loads first, and from which it answers
    first  the request that loads them
    count  processes; 0: one for each core, at most MOST
    """

    def __init__(
        self,
        codes: Sequence[UserCode],
        limits: Limits,
        *,
        first: Mapping[str, Any] = FUNCTIONS,
        count: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ):
        if os.environ.get(GRADER):
            raise ConfigError(
                "this program started itself in a grader's process",
                next='put its call under: if __name__ == "__main__":',
            )
        self.codes, self.limits, self._first, self._say = tuple(codes), limits, first, say
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="unfreeze-graders-", ignore_cleanup_errors=True)
        except OSError as error:
            raise ConfigError(
                f"graders need a folder for temporary files: {error.strerror or error}",
                next="free space there, name another folder with TMPDIR, or raise ulimit -f",
            ) from error
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers: list[Worker | None] = [None] * (count or min(MOST, cores))
        self.loaded: Mapping[str, Any] = {}
        self._paths = [os.path.abspath(path) for path in sys.path]
        self.restarts = 0

    def close(self) -> None:
        """Kill every process."""
        for worker in self.workers:
            if worker is not None:
                worker.kill()
        self._folder.cleanup()

    def load(self) -> Mapping[str, Any]:
        """Load the functions in the first process. -> its reply.

        Raises ConfigError in the child's words, or if it ends, hangs or runs out of something.
        """
        if not self.loaded:
            self._run(deque(), {0: self._start(0)}, [])
        return self.loaded

    def run(self, jobs: Sequence[Job], leave: Leave | None = None) -> list[Reply]:
        """Return the reply to each request; SKIPPED for those that `leave` ended.

        Raises ConfigError if a process cannot be started again.
        """
        replies: list[Reply | None] = [None] * len(jobs)
        self._run(deque(enumerate(jobs)), {}, replies, leave)
        return [reply or SKIPPED for reply in replies]

    def _run(
        self,
        waiting: deque[tuple[int, Job]],
        busy: dict[int, int | None],
        replies: list[Reply | None],
        leave: Leave | None = None,
    ) -> None:
        """Deal the jobs; busy: process -> number of its job, None while it loads."""
        try:
            while waiting or busy:
                if leave and leave(None):
                    return self._end(busy)
                self._deal(waiting, busy)
                self._wait(busy, LISTEN if leave else math.inf)
                for place, number in list(busy.items()):
                    worker = self._at(place)
                    if (reply := worker.advance()) is None:
                        continue
                    del busy[place]
                    if number is None:
                        self._keep(worker, reply)
                    else:
                        replies[number] = reply
                        if leave and leave(reply):
                            return self._end(busy)
        except BaseException:  # Ctrl-C: a late reply must not be the next job's
            self._end(busy)
            raise

    def _end(self, busy: Mapping[int, int | None]) -> None:
        """Kill the processes that still work."""
        for place in busy:
            self._at(place).kill()

    def _deal(self, waiting: deque[tuple[int, Job]], busy: dict[int, int | None]) -> None:
        for place in range(len(self.workers)):
            mine = next((each for each in waiting if each[1].place in (None, place)), None)
            if mine is None or place in busy:
                continue
            worker = self.workers[place]
            if worker is None or not worker.alive:
                busy[place] = self._start(place)
                continue
            waiting.remove(mine)
            worker.ask(mine[1].request, self.limits.seconds)
            busy[place] = mine[0]

    def _start(self, place: int) -> None:
        self.restarts += self.workers[place] is not None
        worker = self.workers[place] = Worker(self.limits, Path(self._folder.name))
        codes = [code.as_json() for code in self.codes]
        request = {**self._first, "codes": codes, "paths": self._paths}
        worker.ask(request, self.limits.load_seconds)

    def _at(self, place: int) -> Worker:
        worker = self.workers[place]
        assert worker is not None
        return worker

    def _wait(self, busy: Mapping[int, int | None], longest: float) -> None:
        """Wait until a process can be written to or read from, until a deadline, or `longest` seconds."""
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for place in busy:
                worker = self._at(place)
                selector.register(worker.reads, selectors.EVENT_READ)
                if worker.has_more:
                    selector.register(worker.writes, selectors.EVENT_WRITE)
            first = min(self._at(place).deadline for place in busy)
            selector.select(min(longest, max(0.0, first - time.monotonic())))

    def _keep(self, worker: Worker, reply: Reply) -> None:
        """Take the reply to `load`."""
        files = ", ".join(Path(code.path).name for code in self.codes)
        if isinstance(reply.content, Gone):
            words = f"{files} cannot be loaded: {reply.content.message}"
            printed = f"; it printed: {reply.printed}" if reply.printed else ""
            raise ConfigError(words + printed, next=f"python {self.codes[0].path}")
        if refused := reply.content.get("refused"):
            worker.kill()
            raise ConfigError(f"{files}: {refused}", next=str(reply.content.get("next", "")))
        walls = reply.content.get("confined", {})
        worker.confined = type(worker.confined)(**walls)
        worker.loaded = True
        if not self.loaded and not self.limits.network and not worker.confined.network:
            self._say(f"warning: {NETWORK}")
        self.loaded = reply.content


class Pooled(Closing):
    """Something with a pool."""

    _pool: Pool

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()
