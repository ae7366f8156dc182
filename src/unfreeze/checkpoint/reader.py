"""Reader: parts of a checkpoint that are read repeatedly, into the same memory.

    reader = Reader()
    part = reader.part(placements, tensors)     # once
    part.read()                                 # as often as needed

Files stay open, and the reads are planned once. Files are not mapped: the kernel decides how much of a mapped
file is resident. Data stays in the page cache, which the kernel reclaims if memory is short; `forget` drops
it at once.
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

    forget  drop what was read from the page cache: for weights that do not fit into it. They would evict
            everything else, and be evicted themselves before they are read again.
    """

    def __init__(self, *, forget: bool = False):
        self.forget = forget
        self.files = Files()
        self.buffers = threading.local()
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read")

    def part(self, placements: Sequence[Placement], tensors: Mapping[str, Tensor]) -> ReaderPart:
        """Placements to read together. tensors: parameter name -> the contiguous memory to read into."""
        return ReaderPart(self, list(runs_of(placements)), Loader(tensors, self.buffers))

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.files.close()


class ReaderPart:
    """Placements of a Reader and their destination memory. `nbytes`: on disk."""

    def __init__(self, reader: TensorReader, runs: list[ByteRun], loader: Loader):
        self._reader, self._runs, self._loader = reader, runs, loader
        self._files = sorted({run.file for run in runs})
        self.nbytes = sum(run.nbytes for run in runs)
        for file in self._files:
            reader.files.descriptor(file)

    def read(self) -> None:
        """Fill the tensors.

        Raises CheckpointError if a file cannot be read, ends early, or was written to since it was opened.
        The tensors' contents are then undefined.
        """
        files = self._reader.files
        for _ in self._loader.load(self._runs, files, self._reader.pool):
            pass
        self._loader.rounding = False  # known after the first read
        for file in self._files:
            files.check(file)
        if self._reader.forget and hasattr(os, "posix_fadvise"):
            for run in self._runs:
                os.posix_fadvise(files.descriptor(run.file), run.offset, run.nbytes, os.POSIX_FADV_DONTNEED)
