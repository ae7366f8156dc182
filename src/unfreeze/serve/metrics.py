"""Counts of a server, in Prometheus' text format 0.0.4 (GET /metrics).

A request waits from `submit` to its first token, and runs from then to its end. Times are those of the
engine, without the way to the client.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from unfreeze.serve.visit import VISIT, Visit

if TYPE_CHECKING:
    from unfreeze.generate.answer import Completion, Piece
    from unfreeze.serve.speaker import Load, Speaker, Top, Work

FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper limits in seconds of the buckets: of the time to the first token, and of each later one."""
OUTCOMES = ("answered", "refused", "busy", "unavailable", "failed", "gone", "too long", "drained")
OWN = ("/health", "/metrics")
RECENT = 50  # answers whose rate Retry-After is made of


class Histogram:
    """Counts of values by upper limits, and their sum."""

    def __init__(self, limits: tuple[float, ...]):
        self.limits, self.counts, self.sum = limits, [0] * (len(limits) + 1), 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.sum += value

    def lines(self, name: str, help: str) -> Iterable[str]:
        """Yield the lines of Prometheus: each bucket counts all values up to its limit."""
        yield from (f"# HELP {name} {help}", f"# TYPE {name} histogram")
        total = 0
        for limit, count in zip((*self.limits, math.inf), self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{"+Inf" if math.isinf(limit) else limit}"}} {total}'
        yield from (f"{name}_sum {self.sum}", f"{name}_count {total}")


class Metrics:
    """The counts of one server. Its methods may be called by every thread.

    load  -> what the engine does now; None: not known
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.waiting = self.running = self.tokens_in = self.tokens_out = 0
        self.first, self.each = Histogram(FIRST), Histogram(EACH)
        self.load: Callable[[], Load] | None = None
        self.updating = False
        """True while an optimizer step runs on the model: its sessions wait for it."""
        self._lock = threading.Lock()
        self._ends: deque[float] = deque(maxlen=RECENT)

    def ended(self, status: int, path: str, visit: Visit) -> None:
        """Count a request of HTTP by its outcome; who asks how the server is does not count."""
        if path not in OWN:
            with self._lock:
                self.outcomes[outcome(status, visit)] += 1

    def retry_after(self) -> int:
        """Seconds after which a place is likely: the requests that wait, at the rate of the last answers."""
        with self._lock:
            if len(self._ends) < 2:
                return 1
            rate = (len(self._ends) - 1) / max(1e-3, time.monotonic() - self._ends[0])
            return math.ceil(max(1.0, 0.5 * self.waiting / rate))

    def counted(self, work: Work) -> None:
        """Count a request to the engine from here on."""
        start, last, heard = time.monotonic(), dict[int, float](), work.heard

        def listen(piece: Piece) -> None:
            now = time.monotonic()
            with self._lock:
                if not last:
                    self.waiting, self.running = self.waiting - 1, self.running + 1
                    self.tokens_in += len(work.prompt)
                    self.first.add(now - start)
                elif piece.row in last:
                    self.each.add(now - last[piece.row])
                self.tokens_out += 1
                last[piece.row] = now
            heard(piece)

        def end(done: Future[tuple[list[Completion], list[Top]]]) -> None:
            with self._lock:
                self.waiting, self.running = self.waiting - (not last), self.running - bool(last)
                if not done.cancelled() and done.exception() is None:
                    self._ends.append(time.monotonic())

        work.heard = listen
        with self._lock:
            self.waiting += 1
        work.done.add_done_callback(end)

    def refused(self) -> None:
        """Take back the last `counted`: the engine did not take the request."""
        with self._lock:
            self.waiting -= 1

    def text(self) -> str:
        """Return everything as Prometheus reads it."""
        engine = _engine(self.load()) if self.load else ()  # before the lock: the engine has its own
        with self._lock:
            return "\n".join([*self._lines(), *engine, ""])

    def _lines(self) -> Iterable[str]:
        name = "unfreeze_requests_total"
        yield from (f"# HELP {name} requests of HTTP by outcome", f"# TYPE {name} counter")
        yield from (f'{name}{{outcome="{each}"}} {self.outcomes[each]}' for each in OUTCOMES)
        yield from _one("requests_running", "gauge", "requests that have their first token", self.running)
        yield from _one("requests_waiting", "gauge", "requests without a token yet", self.waiting)
        yield from _one("prompt_tokens_total", "counter", "tokens of prompts", self.tokens_in)
        yield from _one("generation_tokens_total", "counter", "tokens of answers", self.tokens_out)
        words = "seconds from a request to its first token"
        yield from self.first.lines("unfreeze_time_to_first_token_seconds", words)
        yield from self.each.lines(
            "unfreeze_time_per_token_seconds", "seconds between two tokens of a request"
        )
        words = "1 while an optimizer step runs and sessions wait"
        yield from _one("weights_updating", "gauge", words, int(self.updating))


def _engine(load: Load) -> Iterable[str]:
    yield from _one("cache_rows", "gauge", "rows of the cache", load.rows)
    yield from _one("cache_rows_used", "gauge", "rows with an answer", load.running + load.filling)
    yield from _one("cache_row_tokens", "gauge", "tokens that a row holds", load.positions)
    yield from _one("cache_bytes", "gauge", "bytes of the cache", load.cache)
    yield from _one(
        "prompt_tokens_reused_total", "counter", "tokens of prompts taken from the cache", load.reused
    )


def _one(name: str, kind: str, help: str, value: int) -> Iterable[str]:
    name = f"unfreeze_{name}"
    return (f"# HELP {name} {help}", f"# TYPE {name} {kind}", f"{name} {value}")


def outcome(status: int, visit: Visit) -> str:
    """Return the word of OUTCOMES for a request."""
    if visit.words in OUTCOMES:
        return visit.words
    named = {429: "busy", 503: "unavailable", 0: "gone"}
    return named.get(status) or ("answered" if status < 400 else "refused" if status < 500 else "failed")


class Metered:
    """A speaker whose requests are counted, and end when their HTTP request does.

    All else is the speaker's own.
    """

    def __init__(self, speaker: Speaker, metrics: Metrics):
        self.speaker, self.metrics = speaker, metrics

    def submit(self, work: Work) -> Future[tuple[list[Completion], list[Top]]]:
        """As Speaker.submit."""
        if (visit := VISIT.get()) is not None:
            gone = work.gone
            work.gone = lambda: visit.gone or gone()
        self.metrics.counted(work)
        try:
            return self.speaker.submit(work)
        except BaseException:
            self.metrics.refused()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.speaker, name)
