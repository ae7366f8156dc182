"""One safetensors file written piece by piece, in any order, with names, dtypes and shapes known beforehand.

A file of any size is written with the memory of its largest piece. It has a temporary name until complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from unfreeze.checkpoint.manifest import TensorInfo
from unfreeze.checkpoint.save import sync_folder
from unfreeze.checkpoint.tensors import NAME, stored_tensor
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import FULL, CheckpointError
from unfreeze.core.units import format_bytes
from unfreeze.quant.codec import Part

CHUNK = 16 * 2**20  # bytes that are copied or hashed at once


def header_of(parts: Mapping[str, Part]) -> tuple[bytes, dict[str, int]]:
    """(the header with its length before it, name -> first byte in the file).

    Order and padding are the safetensors library's: wide dtypes first, then by name, so that every tensor
    starts at a multiple of its item size.
    """
    order = sorted(parts, key=lambda name: (-ITEMSIZE[parts[name][0]], name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name in order:
        dtype, shape = parts[name]
        begins[name], end = end, end + ITEMSIZE[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begins[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: begin + len(header) for name, begin in begins.items()}


def file_bytes(parts: Mapping[str, Part]) -> int:
    """The size of the file that holds these tensors."""
    return len(header_of(parts)[0]) + sum(ITEMSIZE[dtype] * prod(shape) for dtype, shape in parts.values())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


class Shard:
    """with Shard(path, {name: (dtype, shape)}) as shard: put and copy every tensor, then close().

    If it is left without close(), by an error or Ctrl-C, the file is removed. If the process is killed, a
    file named ".<name>.unfinished-…" remains.
    """

    def __init__(self, path: Path, parts: Mapping[str, Part]):
        self.path, self._parts = path, parts
        self._missing = {name: ITEMSIZE[dtype] * prod(shape) for name, (dtype, shape) in parts.items()}
        self._temporary = path.with_name(f".{path.name}.unfinished-{os.getpid()}")

    def __enter__(self) -> Shard:
        header, self._begins = header_of(self._parts)
        self._file = self._temporary.open("wb")
        self._write(header, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def put(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Write `tensor` into the tensor `name`, starting at its element `first`."""
        dtype = self._parts[name][0]
        if NAME.get(tensor.dtype) != dtype:
            raise CheckpointError(f"{name} is {tensor.dtype}, but was planned as {dtype}")
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            self._put(name, flat.view(torch.uint8).numpy().data, first * ITEMSIZE[dtype])

    def copy(self, name: str, source: TensorInfo) -> None:
        """Copy a tensor's bytes from another file, unchanged; one that is not on disk is made first."""
        if source.packed_from is not None:
            self.put(name, stored_tensor(source))
            return
        with source.file.open("rb") as file:
            file.seek(source.offset)
            for done in range(0, source.nbytes, CHUNK):
                piece = file.read(min(CHUNK, source.nbytes - done))
                if not piece:
                    raise CheckpointError(f"{source.file} ends inside {source.name}; it was longer before")
                self._put(name, piece, done)

    def close(self) -> tuple[int, str]:
        """Flush to the disk and take the final name. -> (bytes, SHA-256)."""
        lacking = [name for name, nbytes in self._missing.items() if nbytes]
        if lacking:
            raise CheckpointError(
                f"{len(lacking)} tensors of {self.path.name} were not written: {lacking[0]}"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        written = self._temporary.stat().st_size, sha256_of(self._temporary)
        os.replace(self._temporary, self.path)
        sync_folder(self.path.parent)
        return written

    def _put(self, name: str, raw: memoryview | bytes, at: int) -> None:
        self._missing[name] -= len(raw)
        self._write(raw, self._begins[name] + at)

    def _write(self, raw: memoryview | bytes, at: int) -> None:
        try:
            self._file.seek(at)
            self._file.write(raw)
        except OSError as error:
            if error.errno not in FULL:
                raise
            free = format_bytes(shutil.disk_usage(self.path.parent).free)
            needed = format_bytes(file_bytes(self._parts))
            words = f"{error.strerror}: {needed} needed, {free} free"
            raise OSError(error.errno, words, str(self.path)) from error
