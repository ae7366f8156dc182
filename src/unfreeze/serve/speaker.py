"""One thread that owns the engine: requests join its rows and leave them at any step (generate/live.py).

Requests wait in a bounded queue, in the order of their arrival. One that comes while others are answered
joins them at the next step, however it is sampled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from unfreeze.core.errors import UserError
from unfreeze.core.units import plural
from unfreeze.generate.answer import Completion
from unfreeze.generate.engine import Engine
from unfreeze.generate.live import Ended, Live
from unfreeze.generate.request import Adapters, Load, Request, Top
from unfreeze.serve.request import Refused

__all__ = ["Load", "Speaker", "Top", "Work"]

CLOSED = "the endpoint is closed"


@dataclass(eq=False)
class Work(Request):
    """A Request to the engine's thread, and the promise of its answers.

    done   the answers, and for each of them the likeliest ids at its tokens ([] unless `top`). Cancelled if
           nobody waits any more; who cancels it frees its rows at the next step
    """

    done: Future[tuple[list[Completion], list[Top]]] = field(
        default_factory=Future[tuple[list[Completion], list[Top]]]
    )

    def left(self) -> bool:
        return self.done.cancelled() or self.gone()


class Speaker:
    """The thread of an engine, and its queue.

    max_rows  answers sampled at once; None: as many as memory allows
    max_wait  requests that may wait
    adapters  those that requests may name; None: there is the model only
    shares_prefixes   copy the positions of a prompt that begins like one in the cache. They differ in their
              last digits from those that are computed; False: every prompt is read whole

    Cache and recording are kept between requests. `drain` and `paused` release them: then the weights may
    change.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_rows: int | None = None,
        max_wait: int = 1024,
        adapters: Adapters | None = None,
        shares_prefixes: bool = True,
    ):
        self.engine, self.max_wait = engine, max_wait
        self._live = Live(engine, max_rows=max_rows, adapters=adapters, shares_prefixes=shares_prefixes)
        self._new: deque[Work] = deque()  # not seen by the thread yet
        self._changed = threading.Condition()
        self._resting = True  # the thread does nothing: `_live` may be touched
        self._pauses, self._refused = 0, 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="unfreeze-speaker", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> Future[tuple[list[Completion], list[Top]]]:
        """Queue a request. Raises Refused (429) if too many wait, (503) after `close`."""
        with self._changed:
            if self._closed:
                raise Refused(503, CLOSED)
            if len(self._new) + self._live.waiting >= self.max_wait:
                self._refused += 1
                raise Refused(429, f"{plural(self.max_wait, 'request')} waiting; try again later")
            self._new.append(work)
            self._resting = False
            self._changed.notify_all()
        return work.done

    def load(self) -> Load:
        """Return what the engine does now, and what it has done so far."""
        with self._changed:
            load = self._live.load
            waiting = self._live.waiting + len(self._new)
            return replace(load, waiting=waiting, refused=load.refused + self._refused)

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing runs and nothing waits, and release the cache: then the weights may change.

        -> False if that takes longer than `seconds`. Requests that come meanwhile are waited for too.
        """
        with self._changed:
            if not self._changed.wait_for(self._idle, seconds):
                return False
            self._live.release()
            return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context the weights may change: it begins when the requests that have begun are over.

        Others wait in the queue meanwhile, those that come too.
        """
        with self._changed:
            self._pauses += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._resting or not self._thread.is_alive())
            self._live.release()
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def close(self, *, now: bool = False) -> None:
        """End the thread. Who waits is refused; what has begun ends first, or fails: `now`."""
        with self._changed:
            self._closed = True
            self._now = now
            self._changed.notify_all()
        self._thread.join()

    _now = False

    def _idle(self) -> bool:
        return (self._resting and not self._new and not self._live.groups) or not self._thread.is_alive()

    def _run(self) -> None:
        while self._receive():
            _settle(self._live.turn())
        _settle(self._live.refuse(Refused(503, CLOSED)))
        _settle(self._live.fail(Refused(503, CLOSED)))
        with self._changed:
            self._live.release()
            self._resting = True
            self._changed.notify_all()

    def _receive(self) -> bool:
        """Take new requests; wait while there is nothing to do. -> False at the end."""
        with self._changed:
            while True:
                faults = list(filter(None, map(self._add, self._new)))
                self._new.clear()
                if faults:
                    _settle(faults)
                self._live.holds_new = self._pauses > 0
                if self._closed:
                    _settle(self._live.refuse(Refused(503, CLOSED)))
                    return self._live.busy and not self._now
                if self._live.busy:
                    self._resting = False
                    return True
                self._resting = True
                self._changed.notify_all()
                self._changed.wait()

    def _add(self, work: Work) -> Ended | None:
        try:
            self._live.add(work)
        except UserError as error:
            return Ended(work, error=error)
        return None


def _settle(ended: list[Ended]) -> None:
    """Keep the promises of requests that are over. One that somebody has cancelled stays so."""
    for each in ended:
        assert isinstance(each.request, Work)
        done = each.request.done
        try:
            if each.gone:
                done.cancel()
            elif each.error is not None:
                done.set_exception(each.error)
            else:
                done.set_result((each.answers, each.tops))
        except InvalidStateError:
            pass
