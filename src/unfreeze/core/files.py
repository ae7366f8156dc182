"""Write a file or a new folder so that it is complete or absent, whenever the process is killed.

A file is written under a temporary name, flushed to the disk and renamed. A folder is written under a
temporary name beside its final one, then renamed as a whole. No reader looks for the temporary names.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from unfreeze.core.errors import CheckpointError


def refuse_taken(folder: Path, kind: str = "a checkpoint") -> None:
    """Raise CheckpointError if `folder` exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists and is not empty; {kind} is written into a new folder",
            next="choose another folder",
        )


def begin(folder: Path, kind: str = "a checkpoint") -> Path:
    """The temporary folder of a new folder. Raises CheckpointError if `folder` exists and is not empty."""
    refuse_taken(folder, kind)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    return temporary


def write_folder(folder: Path, files: Mapping[str, bytes | str], kind: str) -> None:
    """Write a new folder of small files (name -> content) atomically. Errors as for `begin`."""
    temporary = begin(folder, kind)
    try:
        for name, content in files.items():
            write_file(temporary / name, content)
        os.replace(temporary, folder)  # the target does not exist, or is empty
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder.parent)


def write_file(path: Path, content: bytes | str) -> None:
    """Write one small file (text as UTF-8) atomically; an existing one is replaced."""
    temporary = path.with_name(f".{path.name}.unfinished-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut (or, given a file, its content)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
