"""Windows of large files (streamed.py) that one process encodes and hands to the others as it opens them.

The others hold no file and encode nothing: they take a window's documents, 8 bytes a token and 72 a document,
at the place in the order where process 0 opens it. A row that is bad there is bad for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from unfreeze.core.errors import DataError
from unfreeze.data.store.account import Stats
from unfreeze.data.store.documents import Documents
from unfreeze.data.store.encoding import stats_of
from unfreeze.data.store.examples import Columns, Examples
from unfreeze.data.store.streamed import Stream

DOCUMENTS, ERROR = b"D", b"E"


def opening(stream: Stream) -> bytes:
    """What the others know of a stream before its first window."""
    known = {
        "seed": stream.seed,
        "size": stream.size,
        "windows": stream.windows,
        "digest": stream.rows.digest,
        "rows": len(stream.rows),
        "stats": stream.stats().as_dict(),
        "held out": stream.validation is not None,
    }
    return _joined(json.dumps(known).encode(), packed(stream.head), packed(stream.validation or []))


def packed(examples: Examples | list[object]) -> bytes:
    """Documents as bytes: their columns, int32 tokens, float32 weights."""
    if not isinstance(examples, Examples) or not len(examples):
        return b""
    each = [(example.tokens, example.weights) for example in examples]
    tokens = b"".join(np.asarray(tokens, dtype=np.int32).tobytes() for tokens, _ in each)
    weights = b"".join(np.asarray(weights, dtype=np.float32).tobytes() for _, weights in each)
    return _joined(*examples.columns().values(), tokens, weights)


def unpacked(data: bytes) -> Examples:
    """The documents that `packed` made the bytes of."""
    if not data:
        return Examples.of([])
    numbers, digests, checksums, tokens, weights = _parted(data)
    columns = Columns.of(numbers, digests, checksums)
    return Examples(Documents(columns, tokens, weights).fetch, columns)


def handed(found: Examples | DataError) -> bytes:
    """A window, or why there is none."""
    if isinstance(found, DataError):
        return ERROR + json.dumps([found.message, found.next]).encode()
    return DOCUMENTS + packed(found)


@dataclass(frozen=True)
class Counted:
    """How many rows the files have, and a hash of them."""

    digest: str
    count: int

    def __len__(self) -> int:
        return self.count


class Taken:
    """A Stream as the other processes see it. `take_window`: waits for what process 0 hands next."""

    def __init__(self, opened: bytes, take_window: Callable[[], bytes]):
        known, head, validation = _parted(opened)
        fields = json.loads(known)
        self.seed, self.size, self.windows = fields["seed"], fields["size"], fields["windows"]
        self.rows = Counted(fields["digest"], fields["rows"])
        self._stats, self._take_window = fields["stats"], take_window
        self.head = unpacked(head)
        self.validation = unpacked(validation) if fields["held out"] else None
        self.whole: Examples | None = None
        self.error: DataError | None = None

    def window(self, epoch: int, number: int) -> Examples:
        """The documents of a window. Raises DataError where process 0 does."""
        data = self._take_window()
        if data[:1] == ERROR:
            message, next_command = json.loads(data[1:])
            raise DataError(message, next=next_command)
        return unpacked(data[1:])

    def take(self) -> None:
        """Nothing: process 0 takes what is encoded."""

    def so_far(self) -> Examples:
        """None: process 0 knows the documents, and says which rows are suspect."""
        return Examples.of([])

    def stats(self) -> Stats:
        """The account as it was when process 0 opened the files."""
        return stats_of(self._stats)


def _joined(*parts: bytes) -> bytes:
    lengths = json.dumps([len(part) for part in parts]).encode()
    return b"".join([len(lengths).to_bytes(4, "little"), lengths, *parts])


def _parted(data: bytes) -> list[bytes]:
    begin = 4 + int.from_bytes(data[:4], "little")
    parts: list[bytes] = []
    for length in json.loads(data[4:begin]):
        parts.append(data[begin : begin + length])
        begin += length
    return parts
