"""stream: read placed tensors into the memory of the parameters, each byte once, in file order.

On CPU a tensor whose dtype the model keeps goes from the page cache directly into the parameter's memory
(os.preadv into a slice of it), without an intermediate copy. Another float dtype is converted through a
buffer of at most CHUNK bytes. For CUDA the buffer is pinned memory, which is then copied to the device. So
peak host memory is the parameters plus CHUNK bytes per thread, for shards of any size (docs/why/trust.md L1).

A matrix that is packed while it is loaded is read whole, and rounded by one thread (packing.py).

Reading from the page cache into new memory is bound by page faults, the first touch of each 4 KiB page: 1 to
2 GB/s here, against 5 to 12 into a buffer that was used before. So two threads are faster than one; os.preadv
releases the GIL. Huge pages for the destination were tried and dropped: 3 GB/s at best, 0.2 if a virtual
machine must first get the memory from its host.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from unfreeze.checkpoint.faults import Faults
from unfreeze.checkpoint.manifest import TensorInfo
from unfreeze.checkpoint.packing import bytes_read, fill
from unfreeze.checkpoint.resolve import Placement
from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.core.closing import Closing
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import CheckpointError

# bytes of one read: enough to make the cost of a system call negligible; the buffers (one per thread) stay
# small
CHUNK = 4 * 2**20
MAX_PIECES = 512  # buffers of one preadv; Linux allows at most 1024 (IOV_MAX)
THREADS = 2

Progress = Callable[[int, int], None]
"""(bytes done, bytes in total)"""


@dataclass(frozen=True)
class LoadStats:
    """Statistics of a load.

    expanded_bytes  bytes of the same weights if the packed ones were expanded to bf16.
    rounded         number of tensors that lost precision: a value on disk (F32 or F16) has no equal in the
                    model's dtype (bf16). If several processes read parts of one, each counts it.
    bytes_by_rank   bytes that each process read; () for one process.
    """

    bytes: int
    seconds: float
    expanded_bytes: int
    rounded: int = 0
    bytes_by_rank: tuple[int, ...] = ()


@dataclass(slots=True)
class _Piece:
    """Elements first:last of a placement's tensor."""

    placement: Placement
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * ITEMSIZE[self.placement.info.dtype]


@dataclass(slots=True)
class ByteRun:
    """Pieces that are consecutive in a file: one read."""

    file: Path
    offset: int
    pieces: list[_Piece] = field(default_factory=list)
    nbytes: int = 0


def stream(
    placements: Sequence[Placement], params: Mapping[str, Tensor], progress: Progress | None = None
) -> LoadStats:
    """Fill params (contiguous tensors on one device) from their files.

    Raises CheckpointError if a file ends early, a packed weight disagrees with the shape stored beside it, or
    a tied tensor differs. The contents of params are then undefined, and the caller drops them
    (parallel/placement/place.py never lets a model see them).
    """
    started = time.perf_counter()
    total = sum(map(bytes_read, placements))
    packed = [placement for placement in placements if placement.info.packed_from is not None]
    placements = [placement for placement in placements if placement.info.packed_from is None]
    loader = Loader(params)
    done = 0
    with Files() as files, ThreadPoolExecutor(THREADS, thread_name_prefix="load") as pool:
        # Aliases are compared with the loaded tensors, so they come last.
        for alias in (False, True):
            runs = runs_of([placement for placement in placements if placement.alias == alias])
            for nbytes in loader.load(runs, files, pool):
                done += nbytes
                if progress is not None:
                    progress(done, total)
        for nbytes in fill(packed, loader.flat, files.raw):
            done += nbytes
            if progress is not None:
                progress(min(done, total), total)
    expanded = sum(placement.expanded_bytes for placement in (*placements, *packed))
    return LoadStats(total, time.perf_counter() - started, expanded, len(loader.rounded))


class Files(Closing):
    """The files of a checkpoint, each opened once and read at any offset by any thread."""

    def __init__(self) -> None:
        self._open: dict[Path, tuple[int, tuple[int, int]]] = {}

    def descriptor(self, file: Path) -> int:
        """Open the file once and return its descriptor. Raises CheckpointError if it cannot be opened."""
        if file not in self._open:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(file, error) from error
            self._open[file] = descriptor, _identity(descriptor)
        return self._open[file][0]

    def raw(self, info: TensorInfo) -> Tensor:
        """A tensor's bytes, uint8 [n], in memory of its own. Raises CheckpointError if it cannot be read."""
        whole = torch.empty(info.nbytes, dtype=torch.uint8)
        count = info.nbytes // ITEMSIZE[info.dtype]
        piece = _Piece(Placement(info, "", (), 0, count, 0), 0, count)
        run = ByteRun(info.file, info.offset, [piece], info.nbytes)
        _read_fully(self.descriptor(info.file), run, [whole.numpy().data])
        return whole

    def check(self, file: Path) -> None:
        """Raise CheckpointError if the file was written to since it was opened."""
        descriptor, before = self._open[file]
        if _identity(descriptor) != before:
            raise CheckpointError(
                f"{file} was written to while it was in use: the weights read from it may mix two versions",
                next="let nothing write to it while a run reads it; the same command resumes the run",
            )

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1][0])

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for descriptor, _ in self._open.values():  # at the interpreter's end `os` may be gone
            close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    """Values that change when a file is written to: its size and its modification time."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{file} cannot be read: {error.strerror or error}",
        next="check the disk (dmesg, df), or get the file again; the same command resumes the run",
    )


def runs_of(placements: Iterable[Placement]) -> Iterator[ByteRun]:
    """File-ordered reads of at most CHUNK bytes and MAX_PIECES pieces."""
    run: ByteRun | None = None
    for piece in _pieces(placements):
        info = piece.placement.info
        offset = info.offset + piece.first * ITEMSIZE[info.dtype]
        follows = run is not None and run.file == info.file and run.offset + run.nbytes == offset
        if run is None or not follows or run.nbytes + piece.nbytes > CHUNK or len(run.pieces) == MAX_PIECES:
            if run is not None:
                yield run
            run = ByteRun(info.file, offset)
        run.pieces.append(piece)
        run.nbytes += piece.nbytes
    if run is not None:
        yield run


def _pieces(placements: Iterable[Placement]) -> Iterator[_Piece]:
    """Each tensor in file order, split if it is larger than CHUNK."""
    for placement in sorted(placements, key=lambda placement: (placement.info.file, placement.info.offset)):
        if placement.info.packed_from is not None:
            raise ValueError(f"{placement.info.name} is not on disk: it is packed while the model is loaded")
        itemsize = ITEMSIZE[placement.info.dtype]
        numel, step = placement.info.nbytes // itemsize, CHUNK // itemsize
        matrix = numel
        if placement.transposed:  # whole rows of one matrix
            *_, rows, columns = placement.info.shape
            matrix, step = rows * columns, max(1, step // columns) * columns
        for begin in range(0, numel, matrix):
            for first in range(begin, begin + matrix, step):
                yield _Piece(placement, first, min(first + step, begin + matrix))


class Loader:
    """Reads runs into params with a few threads.

    buffers   the threads' own, which several loaders may share (`threading.local`).
    rounding  True to check for values that lose precision.
    """

    def __init__(self, params: Mapping[str, Tensor], buffers: threading.local | None = None):
        self.flat = {name: tensor.detach().view(-1) for name, tensor in params.items()}
        # The parameter's memory as bytes: slicing a memoryview costs 0.1 µs, a tensor ten times that, and
        # Kimi-K2 has 207,000 tensors.
        self.memory = {name: _bytes_of(flat) for name, flat in self.flat.items() if flat.device.type == "cpu"}
        self.rounding, self.rounded = True, set[str]()
        self.wrong_shape: list[tuple[Placement, list[int]]] = []
        self.differs: set[str] = set()
        self._local = buffers or threading.local()

    def load(self, runs: Iterable[ByteRun], files: Files, pool: Executor) -> Iterator[int]:
        """Yield the bytes of each run once it is read; finally raise an error if a check failed."""
        runs = list(runs)
        descriptors = {run.file: files.descriptor(run.file) for run in runs}
        yield from pool.map(lambda run: self._read(run, descriptors[run.file]), runs)
        self._raise_if_wrong()

    def _read(self, run: ByteRun, descriptor: int) -> int:
        """Read one run, then convert, copy or compare the pieces that went through a buffer."""
        # target of each piece: directly the parameter, or a slice of the thread's buffer
        targets: list[memoryview] = []
        buffered: list[tuple[_Piece, Tensor]] = []
        staging = self._staging(run)
        used = 0
        for piece in run.pieces:
            direct = self._direct(piece)
            if direct is not None:
                targets.append(direct)
                continue
            buffer = staging[used : used + piece.nbytes]
            used += piece.nbytes
            targets.append(buffer.numpy().data)
            buffered.append((piece, buffer))
        _read_fully(descriptor, run, targets)
        for piece, buffer in buffered:
            self._finish(piece, buffer)
        return run.nbytes

    def _direct(self, piece: _Piece) -> memoryview | None:
        """The slice of the parameter's memory to read this piece into; None if it needs a buffer."""
        placement = piece.placement
        if placement.expected is not None or placement.alias or placement.transposed or placement.parse:
            return None
        if placement.param not in self.memory:
            return None
        if TORCH_DTYPE[placement.info.dtype] != self.flat[placement.param].dtype:
            return None
        itemsize = ITEMSIZE[placement.info.dtype]
        first, last = (placement.start + element for element in (piece.first, piece.last))
        return self.memory[placement.param][first * itemsize : last * itemsize]

    def _staging(self, run: ByteRun) -> Tensor:
        """A byte buffer of this thread, pinned if it feeds a GPU.

        It is reused: pinning and page faults cost more than the copy.
        """
        need = sum(piece.nbytes for piece in run.pieces if self._direct(piece) is None)
        buffer: Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.numel() < need:
            cuda = any(flat.is_cuda for flat in self.flat.values())
            buffer = torch.empty(CHUNK if cuda else need, dtype=torch.uint8, pin_memory=cuda)
            self._local.buffer = buffer
        return buffer

    def _finish(self, piece: _Piece, buffer: Tensor) -> None:
        """Convert a buffered piece into its place, or compare it."""
        placement = piece.placement
        # A view in a wider dtype must start at a multiple of its itemsize: other slices are cloned.
        itemsize = ITEMSIZE[placement.info.dtype]
        aligned = buffer if buffer.storage_offset() % itemsize == 0 else buffer.clone()
        source = aligned.view(TORCH_DTYPE[placement.info.dtype])

        # a codec's extras, or a tied tensor: compare
        if placement.expected is not None:
            if source.tolist() != list(placement.expected[piece.first : piece.last]):
                self.wrong_shape.append((placement, source.tolist()))
            return
        if placement.parse is not None:
            numbers = torch.tensor(placement.parse(bytes(source.tolist())))
            self.flat[placement.param][placement.start : placement.stop].copy_(numbers)
            return
        target = self.flat[placement.param][placement.start + piece.first : placement.start + piece.last]
        if placement.transposed:
            target, source = self._turned(piece, source)
        if placement.alias:
            if not torch.equal(source.to(target.device, target.dtype), target):
                self.differs.add(placement.info.name)
            return

        # a weight: convert, and check if that rounded
        target.copy_(source)  # for CUDA: returns when the pinned buffer may be reused
        bf16_and_f16 = {target.dtype, source.dtype} == {torch.float16, torch.bfloat16}
        may_round = self.rounding and (target.dtype.itemsize < itemsize or bf16_and_f16)
        if may_round and not torch.equal(target.to(source.device, source.dtype), source):
            self.rounded.add(placement.info.name)

    def _turned(self, piece: _Piece, source: Tensor) -> tuple[Tensor, Tensor]:
        """(place in the parameter of the rows on disk, those rows): columns of one of its matrices."""
        placement = piece.placement
        *_, rows, columns = placement.info.shape
        matrix, first = divmod(piece.first // columns, rows)
        whole = self.flat[placement.param][placement.start : placement.stop].view(-1, columns, rows)
        source = source.view(-1, columns)
        return whole[matrix, :, first : first + len(source)].t(), source

    def _raise_if_wrong(self) -> None:
        if self.wrong_shape:
            placement, value = self.wrong_shape[0]
            assert placement.expected is not None
            faults = Faults(placement.info.file.parent)
            for wrong, _ in self.wrong_shape:
                faults.add(
                    f"weights disagree with their {wrong.info.name.rpartition('.')[2]}",
                    f"{placement.info.name} says {_few(value)}, the packed tensor beside it holds"
                    f" {_few(list(placement.expected))}",
                    cause=f"{wrong.variants} under the same names ({wrong.info.file.name})",
                )
            faults.raise_if_any(
                next=(
                    "get the checkpoint again from its publisher, or convert it again with compressed-tensors"
                )
            )
        if self.differs:
            raise CheckpointError(
                f"{sorted(self.differs)[0]} differs from the tensor it is tied to by config.json",
                next=(
                    'set "tie_word_embeddings": false in config.json if the publisher says the head is'
                    " its own"
                ),
            )


def _few(numbers: Sequence[float]) -> str:
    """A list for a message: if long, its first numbers."""
    return (
        str(list(numbers)) if len(numbers) <= 8 else f"{list(numbers[:4])!s:.60} and {len(numbers) - 4} more"
    )


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat CPU tensor, without a copy."""
    return flat.view(torch.uint8).numpy().data


def _read_fully(descriptor: int, run: ByteRun, targets: list[memoryview]) -> None:
    """Fill `targets` one after another, starting at run.offset.

    A read may return less than requested; zero bytes mean the end of the file.
    """
    offset = run.offset
    while targets:
        try:
            count = os.preadv(descriptor, targets, offset)
        except OSError as error:
            raise _unreadable(run.file, error) from error
        if count == 0:
            raise CheckpointError(
                f"{run.file} ends at byte {offset:,} inside {run.pieces[-1].placement.info.name}; it was"
                " longer when it was opened",
                next=(
                    "wait until the download or conversion that writes this file has ended, then repeat the"
                    " command"
                ),
            )
        offset += count
        while targets and count >= len(targets[0]):
            count -= len(targets.pop(0))
        if count:
            targets[0] = targets[0][count:]
