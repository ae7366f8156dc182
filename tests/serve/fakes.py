"""Stand-ins for the engine's thread and for the router, so that thousands of requests take seconds."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace

from unfreeze.generate.answer import Piece, completed
from unfreeze.serve.request import Refused
from unfreeze.serve.running import Endpoint
from unfreeze.serve.service import Service


class FakeSpeaker:
    """Answers `reply(work)`, some ids, one for each row and step; the rest is as the real one has it.

    spell     id -> text
    rows      answers at once
    max_wait  requests that may wait
    pace      seconds of a step
    """

    def __init__(self, reply, spell, *, rows=64, max_wait=1024, pace=0.0):
        self.reply, self.spell, self.rows, self.max_wait, self.pace = reply, spell, rows, max_wait, pace
        model = SimpleNamespace(shape=SimpleNamespace(max_positions=4096))
        self.engine = SimpleNamespace(num_ids=4096, model=model)
        self.waiting, self.running = deque(), {}
        self.freed = 0
        """Rows that were given back before their answer was whole."""
        self.most_running = 0
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work):
        with self._changed:
            if self._closed:
                raise Refused(503, "the endpoint is closed")
            if len(self.waiting) >= self.max_wait:
                raise Refused(429, f"{self.max_wait} waiting; try again later")
            self.waiting.append(work)
            self._changed.notify()
        return work.done

    def close(self):
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self):
        while True:
            with self._changed:
                while not (self.waiting or self.running or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                while self.waiting and len(self.running) < self.rows:
                    work = self.waiting.popleft()
                    if work.gone() or not work.done.set_running_or_notify_cancel():
                        work.done.cancel()
                        continue
                    self.running[work] = (self.reply(work), [])
            self.most_running = max(self.most_running, len(self.running))
            for work, (ids, pieces) in list(self.running.items()):
                if work.gone():
                    del self.running[work]
                    self.freed += 1
                    work.done.set_exception(Refused(410, "nobody waits"))
                    continue
                place = len(pieces)
                stop = "end" if place == len(ids) - 1 else None
                pieces.append(Piece(0, ids[place], self.spell(ids[place]), stop, -0.5, -0.5))
                work.heard(pieces[-1])
                if stop:
                    del self.running[work]
                    work.done.set_result(([completed(pieces)], []))
            if self.pace or not self.running:
                time.sleep(self.pace or 0.01)


def served(app, rules=None, patience=None, speaker=None):
    """An Endpoint with any ASGI application behind the gate. Close it."""
    service = Service(rules)
    endpoint = Endpoint(patience=patience).open(service)
    service.ready(SimpleNamespace(app=app, speaker=speaker or SimpleNamespace(close=lambda: None)))
    return endpoint


def until(condition, seconds=10.0):
    """Wait for a condition; True if it came."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(condition())
