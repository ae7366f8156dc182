"""The tensors of a save: one file, or one per process if each holds some rows; read by rows.

tensors.safetensors                   one process, or all hold the same
tensors-00001-of-00004.safetensors    of each process: the rows that it holds, and its share of replicated
                                      tensors. The header lists the rows; state.json lists the files

So a run saved by 2 processes resumes with 1 or 4: each reads its rows from whichever files have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unfreeze.checkpoint.save import write_safetensors
from unfreeze.core.errors import CheckpointError
from unfreeze.core.rows import Rows
from unfreeze.train.moments import BLOCK, NARROW, Part, Uncut

TENSORS = "tensors.safetensors"
OLD_MOMENTS = (
    "int8 moments of an earlier version have another layout: start a new run from its output"
    " (--adapter or --model, and another --out)"
)
_ROWS = "rows"  # in a header's metadata: name -> [first, last, of], and [.., 1] for what cannot be divided


def file_name(index: int, processes: int) -> str:
    """Return the file name of process `index`."""
    return f"tensors-{index + 1:05d}-of-{processes:05d}.safetensors"


def write_part(path: Path, tensors: Mapping[str, Tensor], parts: Mapping[str, Part]) -> int:
    """Write and sync one process's file; return its bytes. parts: for tensors that are not whole."""
    rows: dict[str, list[int]] = {}
    for name, part in parts.items():
        held = part.rows if isinstance(part, Uncut) else part
        if name in tensors:
            rows[name] = [held.first, held.last, held.of, *([1] if isinstance(part, Uncut) else [])]
    write_safetensors(path, tensors, {_ROWS: json.dumps(rows)})
    return path.stat().st_size


def dealt(sizes: Mapping[str, int], processes: int) -> dict[str, int]:
    """Return name -> the process that writes it, balanced by size, the largest first."""
    load, by = [0] * processes, dict[str, int]()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        by[name] = load.index(min(load))
        load[by[name]] += sizes[name]
    return by


@dataclass(frozen=True)
class _Stored:
    """The part of a tensor in one file. rows: None for a single number."""

    file: Any
    rows: Rows | None
    uncut: bool = False

    @property
    def whole(self) -> bool:
        return self.rows is None or len(self.rows) == self.rows.of


class SavedShards:
    """The tensors of one save, read by name and rows.

    path  its one file, or its folder if it has several.
    Raises CheckpointError, naming the file, if one is missing, damaged, or of another size than the save
    says.
    """

    def __init__(self, folder: Path, files: Mapping[str, int] | None = None):
        """files: name -> bytes, from state.json; None: the one file of a save by one process."""
        self.folder, self._stored = folder, dict[str, list[_Stored]]()
        self.path = folder if files else folder / TENSORS
        for file in files or (TENSORS,):
            opened = self._open(folder / file, files[file] if files else None)
            parts = self._parts(folder / file, opened) if files else {}
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                shape = opened.get_slice(name).get_shape()
                whole = _Stored(opened, Rows(0, shape[0], shape[0]) if shape else None)
                self._stored.setdefault(name, []).append(parts.get(name, whole))

    @property
    def names(self) -> set[str]:
        """Names of all its tensors."""
        return set(self._stored)

    def whole(self, name: str) -> Tensor:
        """Return a tensor that every process holds whole."""
        return self._stored[name][0].file.get_tensor(name)

    def read(self, name: str, like: Tensor, part: Part | None = None) -> Tensor:
        """Return the tensor, or a part of it. It must have the shape and dtype of `like`.

        Raises CheckpointError if it has others, holds NaN, lacks rows, or cannot be divided that way.
        """
        stored, of = self._stored[name], part.of if isinstance(part, Rows) else None
        if isinstance(part, Uncut) or any(each.uncut for each in stored):
            value = self._uncut(name, part.rows if isinstance(part, Uncut) else None)
        elif stored[0].rows is None:
            value = self.whole(name)
        else:
            of = stored[0].rows.of
            value = self._rows(name, part if isinstance(part, Rows) else Rows(0, of, of))
        same_rows = not isinstance(part, Rows) or part.of == of
        if value.shape != like.shape or value.dtype != like.dtype or not same_rows:
            has, wants = list(value.shape), list(like.shape)
            if isinstance(part, Rows):  # compare shapes of the whole tensor
                has[:1], wants[:1] = [of or 0], [part.of]
            raise CheckpointError(
                f"{self.path}: {name} is {value.dtype} {has}, this model has {like.dtype} {wants}",
                next=OLD_MOMENTS if ".exp_avg" in name else "",
            )
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{self.path}: {name} holds NaN or infinity; the file is damaged", next=self._next
            )
        return value

    def _rows(self, name: str, wanted: Rows) -> Tensor:
        """Return rows of a tensor, from every file that has some of them."""
        stored = sorted(
            ((each.rows, each.file.get_slice(name)) for each in self._stored[name] if each.rows is not None),
            key=lambda pair: (pair[0].first, pair[0].last),
        )
        pieces, at = [stored[0][1][0:0]], wanted.first
        for rows, values in stored:
            last = min(rows.last, wanted.last)
            if rows.first <= at < last:
                pieces.append(values[at - rows.first : last - rows.first])
                at = last
        if at < min(wanted.last, stored[0][0].of):
            raise CheckpointError(
                f"{self.folder}: rows {at} to {wanted.last - 1} of {name} are in no file", next=self._next
            )
        return pieces[1] if len(pieces) == 2 else torch.cat(pieces)

    def _uncut(self, name: str, rows: Rows | None) -> Tensor:
        """Return the data that belongs to exactly these rows (None: to all)."""
        stored, every = self._stored[name], rows is None or len(rows) == rows.of
        for each in stored:
            if (each.whole and every) or (each.uncut and each.rows == rows):
                return each.file.get_tensor(name)
        parts = f"{len(stored)} process" + ("es" if len(stored) > 1 else "")
        raise CheckpointError(
            f"{self.path}: {name} has a scale for every {BLOCK} numbers, across rows of fewer than {NARROW}:"
            f" moments in int8, saved by {parts}, cannot be divided differently",
            next=f"resume with {parts}, as it was saved, or start again with --optimizer.moments float32",
        )

    def _open(self, path: Path, nbytes: int | None) -> Any:
        try:
            if nbytes is not None and path.stat().st_size != nbytes:
                raise SafetensorError(f"it has {path.stat().st_size:,} bytes, the save says {nbytes:,}")
            return safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", next=self._next) from error

    def _parts(self, path: Path, file: Any) -> dict[str, _Stored]:
        """Parse the header's entries for tensors that are not whole."""
        try:
            metadata: dict[str, str] = file.metadata() or {}
            rows_by_name: dict[str, list[int]] = json.loads(metadata.get(_ROWS, "{}"))
            return {
                name: _Stored(file, Rows(first, last, of), bool(uncut))
                for name, (first, last, of, *uncut) in rows_by_name.items()
            }
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: its rows: {error}", next=self._next) from error

    @property
    def _next(self) -> str:
        return f"remove {self.folder} to resume from the previous save"
