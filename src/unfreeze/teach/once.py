"""Answers of a chat server, each asked for once: a file beside a run holds those that came.

A request is known by a hash of what decides its answer: model, messages, sampling. An error is not kept, so
it is asked about again.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.core.whole_lines import appending, whole_lines
from unfreeze.data.rows.row import Conversation
from unfreeze.teach.answers import Answer
from unfreeze.untrusted.json_object import parse_object

LISTEN = 0.2  # seconds between two questions to `leave`

Come = Answer | Exception
Leave = Callable[[Come | None], bool]
"""Called with each answer or error that comes, and with None now and then; True ends the asking."""


class Once:
    """A server, and the answers that it gave.

    ask      one row -> its answer, or an exception (teach/chat.py: ChatEndpoint.ask)
    path     the file
    about    model and sampling: a part of each request's hash
    at_once  requests at the same time

    Raises CheckpointError for a file that something else wrote.
    """

    def __init__(
        self, ask: Callable[[Conversation], Answer], path: Path, about: Mapping[str, Any], *, at_once: int
    ):
        self._ask, self._about, self.at_once = ask, about, at_once
        self._known = dict(_record(path, number, line) for number, line in enumerate(whole_lines(path), 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._lock = appending(path), threading.Lock()

    def close(self) -> None:
        """Close the file. What comes later from a request that was left is dropped."""
        with self._lock:
            self._file.close()

    def __call__(self, rows: Sequence[Conversation], leave: Leave) -> list[Come | None]:
        """Return the answer or the error of each row; None for those that `leave` left.

        Threads do not keep the program alive, so after Ctrl-C it ends at once.
        """
        keys = [self._key(row) for row in rows]
        missing = {key: row for key, row in zip(keys, rows, strict=True) if key not in self._known}
        errors: dict[str, Exception] = {}
        left = threading.Event()
        waiting: queue.SimpleQueue[tuple[str, Conversation]] = queue.SimpleQueue()
        come: queue.SimpleQueue[tuple[str, Come]] = queue.SimpleQueue()
        for item in missing.items():
            waiting.put(item)

        def work() -> None:
            while not left.is_set():
                try:
                    key, row = waiting.get_nowait()
                except queue.Empty:
                    return
                come.put((key, self._one(key, row)))

        for _ in range(min(self.at_once, len(missing))):
            threading.Thread(target=work, name="unfreeze-judge", daemon=True).start()
        try:
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
        finally:
            left.set()
        return [self._known.get(key) or errors.get(key) for key in keys]

    def _one(self, key: str, row: Conversation) -> Come:
        """Ask, and keep the answer."""
        try:
            answer = self._ask(row)
            with self._lock:
                if not self._file.closed:
                    self._known[key] = answer
                    line = {"key": key, "text": answer.text, "ended": answer.ended}
                    self._file.write(json.dumps(line) + "\n")
                    self._file.flush()
        except Exception as error:
            return error
        return answer

    def _key(self, row: Conversation) -> str:
        whole = json.dumps([self._about, row.messages], sort_keys=True)
        return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _record(path: Path, number: int, line: bytes) -> tuple[str, Answer]:
    where = f"{path}, line {number}"
    record = parse_object(line, where, CheckpointError)
    key, text, ended = (record.get(name) for name in ("key", "text", "ended"))
    if isinstance(key, str) and isinstance(text, str) and isinstance(ended, str):
        return key, Answer(text, ended)
    raise CheckpointError(f"{where} holds no verdict", next="remove the file; all is asked again")
