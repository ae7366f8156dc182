"""Windows of large files (streamed.py) that one process encodes and sends to the others.

The others hold no file and encode nothing. They receive a window's documents, at 8 bytes per token and 72
per document, in the order in which process 0 opens windows. A row that is bad there is bad for all.
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
"""Format version of marshal that all supported Pythons can read."""


def opening(stream: InWindows) -> bytes:
    """Serialise what other processes need before the first window."""
    fields = (stream.seed, stream.size, stream.count, stream.num_rows, stream.digest)
    held_out = None if stream.validation is None else packed(stream.validation)
    return marshal.dumps((fields, stream.stats().as_dict(), packed(stream.head), held_out), FORMAT)


def packed(examples: Examples) -> tuple[bytes, ...]:
    """Serialise documents: their columns, int32 tokens, float32 weights."""
    each = [(example.tokens, example.weights) for example in examples]
    tokens = b"".join(np.asarray(tokens, dtype=np.int32).tobytes() for tokens, _ in each)
    weights = b"".join(np.asarray(weights, dtype=np.float32).tobytes() for _, weights in each)
    return *examples.columns().values(), tokens, weights


def unpacked(parts: tuple[bytes, ...]) -> Examples:
    """Restore the documents that `packed` serialised."""
    *numbers, tokens, weights = parts
    columns = Columns.of(*numbers)
    return Examples(Documents(columns, tokens, weights).fetch, columns)


def handed(window: Examples | DataError) -> bytes:
    """Serialise a window, or the error that replaces it."""
    error = (window.message, window.next) if isinstance(window, DataError) else None
    documents = packed(window) if isinstance(window, Examples) else None
    return marshal.dumps((error, documents), FORMAT)


class Taken(InWindows):
    """The windows of a Stream in the other processes.

    `take_window` waits for the next message from process 0, which also keeps the statistics and reports
    suspect rows.
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
        """Return the statistics at the time process 0 opened the files."""
        return stats_of(self._stats)
