"""Answers of a chat server, each asked for once: a file beside a run holds those that came.

A request is known by a key. That of a conversation is a hash of what decides its answer: model, messages,
sampling. An error is not kept, so it is asked about again.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from unfreeze.core.errors import CheckpointError
from unfreeze.core.whole_lines import appending, whole_lines
from unfreeze.data.rows.row import Conversation
from unfreeze.teach.answers import Answer
from unfreeze.untrusted.json_object import is_object, parse_object

LISTEN = 0.2  # seconds between two questions to `leave`
STARTS = 1.0  # seconds after which a worker that has not begun was never started

Come = Answer | Exception
Leave = Callable[[Come | None], bool]
"""Called with each answer or error that comes, and with None now and then; True ends the asking."""
T = TypeVar("T")


def in_a_thread(work: Callable[[], None]) -> threading.Thread:
    """Start `work` in a thread that does not keep the program alive, so after Ctrl-C it ends at once."""
    thread = threading.Thread(target=work, name="unfreeze-asking", daemon=True)
    thread.start()
    return thread


class Kept(Generic[T]):
    """Answers in a file: each request is sent once.

    ask      one request -> its answer, or an exception
    key      one request -> its name
    path     the file
    at_once  requests at the same time
    start    starts a worker, which sends one request

    Raises CheckpointError for a file that something else wrote.
    """

    noun = "answer"

    def __init__(
        self,
        ask: Callable[[T], Answer],
        key: Callable[[T], str],
        path: Path,
        *,
        at_once: int,
        start: Callable[[Callable[[], None]], threading.Thread | None] = in_a_thread,
    ):
        self._ask, self._key, self.at_once, self._start = ask, key, at_once, start
        self._known = read_kept(path, self.noun)
        self._working: list[tuple[threading.Event, threading.Event]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._lock = appending(path), threading.Lock()

    def close(self) -> None:
        """Close the file. What comes later from a request that was left is dropped."""
        with self._lock:
            self._file.close()

    @property
    def known(self) -> Mapping[str, Answer]:
        """The answers that came, by key."""
        return self._known

    def wait(self) -> None:
        """Wait for the requests that are under way; their answers are kept."""
        for begun, ended in self._working:
            if begun.wait(STARTS):
                ended.wait()

    def __call__(self, rows: Sequence[T], leave: Leave) -> list[Come | None]:
        """Return the answer or the error of each request; None for those that `leave` left."""
        keys = [self._key(row) for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._known}
        errors: dict[str, Exception] = {}
        left = threading.Event()
        waiting: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()
        come: queue.SimpleQueue[tuple[str, Come]] = queue.SimpleQueue()
        for item in missing.items():
            waiting.put(item)

        def work() -> None:
            if not left.is_set():
                key, row = waiting.get_nowait()
                come.put((key, self._one(key, row)))

        # One request a worker, the next worker when `leave` has seen a result: what is asked may cost money.
        try:
            for _ in range(min(self.at_once, len(missing))):
                self._begin(work)
            pending = len(missing)
            while pending and not leave(None):
                try:
                    key, each = come.get(timeout=LISTEN)
                except queue.Empty:
                    continue
                pending -= 1
                if isinstance(each, Exception):
                    errors[key] = each
                if leave(each):
                    break
                if pending >= self.at_once:
                    self._begin(work)
        finally:
            left.set()
        return [self._known.get(key) or errors.get(key) for key in keys]

    def _begin(self, work: Callable[[], None]) -> None:
        """Start a worker, listed before it runs: after Ctrl-C at any moment `wait` knows of it."""
        begun, ended = threading.Event(), threading.Event()
        self._working = [each for each in self._working if not each[1].is_set()]
        self._working.append((begun, ended))

        def noted() -> None:
            begun.set()
            try:
                work()
            finally:
                ended.set()

        self._start(noted)

    def _one(self, key: str, row: T) -> Come:
        """Ask, and keep the answer."""
        try:
            answer = self._ask(row)
            self.keep(key, answer)
        except Exception as error:
            return error
        return answer

    def keep(self, key: str, answer: Answer, *, sync: bool = True) -> None:
        """Write an answer that came; it was paid for, so it is on disk before anything else happens.

        sync: False for one that is in another file, too
        """
        with self._lock:
            if self._file.closed:
                return
            line = {"key": key, "text": answer.text, "ended": answer.ended}
            line |= {"reasoning": answer.reasoning} if answer.reasoning else {}
            line |= {"about": answer.about} if answer.about else {}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
            if sync:
                os.fsync(self._file.fileno())
            self._known[key] = answer


class Once(Kept[Conversation]):
    """A server that answers conversations, and the answers that it gave.

    ask      one row -> its answer, or an exception (teach/chat.py: ChatEndpoint.ask)
    about    model and sampling: a part of each request's key
    """

    noun = "verdict"

    def __init__(
        self, ask: Callable[[Conversation], Answer], path: Path, about: Mapping[str, Any], *, at_once: int
    ):
        super().__init__(ask, self._hash, path, at_once=at_once)
        self._about = about

    def _hash(self, row: Conversation) -> str:
        whole = json.dumps([self._about, row.messages], sort_keys=True)
        return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def read_kept(path: Path, noun: str = "answer") -> dict[str, Answer]:
    """Return key -> answer of a file's complete lines; none without the file. Raises CheckpointError."""
    return dict(_record(path, number, line, noun) for number, line in enumerate(whole_lines(path), 1))


def _record(path: Path, number: int, line: bytes, noun: str) -> tuple[str, Answer]:
    where = f"{path}, line {number}"
    record = parse_object(line, where, CheckpointError)
    key, text, ended = (record.get(name) for name in ("key", "text", "ended"))
    thought, about = record.get("reasoning", ""), record.get("about", {})
    if all(isinstance(each, str) for each in (key, text, ended, thought)) and is_object(about):
        return str(key), Answer(str(text), str(ended), str(thought), about=about)
    raise CheckpointError(f"{where} holds no {noun}", next="remove the file; all is asked again")
