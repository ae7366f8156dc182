"""Small files that are complete or absent, whenever the process is killed (docs/why/trust.md R1)."""

from __future__ import annotations

import os
from pathlib import Path


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
