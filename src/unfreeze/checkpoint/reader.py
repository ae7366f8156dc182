"""Reader: parts of a checkpoint that are read again and again, into memory that is used again.

    reader = Reader()
    part = reader.part(placements, tensors)     # once
    part.read()                                 # as often as it is needed

Files stay open, and what to read is worked out once. No file is mapped: how much of a mapped file is resident
is the kernel's choice. What was read stays in the page cache, which the kernel takes back where memory is
short; `forget` gives it back at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from unfreeze.checkpoint.resolve import Placement
from unfreeze.checkpoint.stream import THREADS, ByteRun, Files, Loader, runs_of


class TensorReader:
    """Files that stay open, and the threads that read them.

    forget  whether the page cache drops what was read: for weights that do not fit into it, which would push
            everything else out of it and be gone before they are read again.
    """

    def __init__(self, *, forget: bool = False):
        self.forget = forget
        self.files = Files()
        self.buffers = threading.local()
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read")

    def part(self, placements: Sequence[Placement], tensors: Mapping[str, Tensor]) -> ReaderPart:
        """What is read together. tensors: name of a parameter -> the memory it is read into, contiguous."""
        return ReaderPart(self, list(runs_of(placements)), Loader(tensors, self.buffers))

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.files.close()


class ReaderPart:
    """Placements of a Reader and the memory that they fill. `nbytes`: on disk."""

    def __init__(self, reader: TensorReader, runs: list[ByteRun], loader: Loader):
        self._reader, self._runs, self._loader = reader, runs, loader
        self._files = sorted({run.file for run in runs})
        self.nbytes = sum(run.nbytes for run in runs)
        for file in self._files:
            reader.files.descriptor(file)

    def read(self) -> None:
        """Fill the tensors.

        Raises CheckpointError where a file cannot be read, ends early, or was written to since it was opened.
        The tensors' contents are then undefined.
        """
        files = self._reader.files
        for _ in self._loader.load(self._runs, files, self._reader.pool):
            pass
        self._loader.rounding = False  # known after the first time
        for file in self._files:
            files.check(file)
        if self._reader.forget and hasattr(os, "posix_fadvise"):
            for run in self._runs:
                os.posix_fadvise(files.descriptor(run.file), run.offset, run.nbytes, os.POSIX_FADV_DONTNEED)
