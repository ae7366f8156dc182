"""Windows of large files (streamed.py) that one process encodes and hands to the others as it opens them.

The others hold no file and encode nothing: they take a window's documents, 8 bytes a token and 72 a document,
at the place in the order where process 0 opens it. A row that is bad there is bad for all.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable

import numpy as np

from unfreeze.core.errors import DataError
from unfreeze.data.packing.windows import InWindows
from unfreeze.data.store.account import Stats
from unfreeze.data.store.documents import Documents
from unfreeze.data.store.encoding import stats_of
from unfreeze.data.store.examples import Columns, Examples

FORMAT = 4
"""Of marshal: that of every Python that may take part."""


def opening(stream: InWindows) -> bytes:
    """What the others know of a stream before its first window."""
    fields = (stream.seed, stream.size, stream.count, stream.num_rows, stream.digest)
    held_out = None if stream.validation is None else packed(stream.validation)
    return marshal.dumps((fields, stream.stats().as_dict(), packed(stream.head), held_out), FORMAT)


def packed(examples: Examples) -> tuple[bytes, ...]:
    """Documents as bytes: their columns, int32 tokens, float32 weights."""
    each = [(example.tokens, example.weights) for example in examples]
    tokens = b"".join(np.asarray(tokens, dtype=np.int32).tobytes() for tokens, _ in each)
    weights = b"".join(np.asarray(weights, dtype=np.float32).tobytes() for _, weights in each)
    return *examples.columns().values(), tokens, weights


def unpacked(parts: tuple[bytes, ...]) -> Examples:
    """The documents that `packed` made the bytes of."""
    *numbers, tokens, weights = parts
    columns = Columns.of(*numbers)
    return Examples(Documents(columns, tokens, weights).fetch, columns)


def handed(found: Examples | DataError) -> bytes:
    """A window, or why there is none."""
    error = (found.message, found.next) if isinstance(found, DataError) else None
    documents = packed(found) if isinstance(found, Examples) else None
    return marshal.dumps((error, documents), FORMAT)


class Taken(InWindows):
    """The windows of a Stream in the other processes. `take_window`: waits for what process 0 hands next.

    Process 0 keeps the account, and says which rows are suspect.
    """

    def __init__(self, opened: bytes, take_window: Callable[[], bytes]):
        fields, self._stats, head, held_out = marshal.loads(opened)
        super().__init__(*fields)
        self._take_window = take_window
        self.head = unpacked(head)
        self.validation = None if held_out is None else unpacked(held_out)

    def examples(self, epoch: int, number: int) -> Examples:
        error, documents = marshal.loads(self._take_window())
        if error is not None:
            raise DataError(error[0], next=error[1])
        return unpacked(documents)

    def stats(self) -> Stats:
        """The account as it was when process 0 opened the files."""
        return stats_of(self._stats)
