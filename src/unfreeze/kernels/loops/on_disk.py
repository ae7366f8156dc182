"""Compiled loops on disk: the folder where numba keeps them, and a hash of their version. Without torch."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from llvmlite import binding as llvm
from numba.core import config
from numba.core.caching import FunctionCache

ROOM = Path(__file__).parents[1]


@functools.cache
def sources(room: Path) -> str:
    """A hash of all files of kernels/ that mention numba.

    A compiled kernel on disk has inlined code from any of them, but numba itself compares only the
    modification time of the kernel's own file.
    """
    digest = hashlib.sha256()
    for text in (path.read_bytes() for path in sorted(room.rglob("*.py"))):
        if b"numba" in text:
            digest.update(text)
    return digest.hexdigest()


def cache_folder() -> Path | None:
    """Folder of numba's compiled loops of kernels/; None if it has no writable folder."""
    try:
        return Path(FunctionCache(cache_folder).cache_path)
    except RuntimeError:  # numba: "cannot cache function: no locator available"
        return None


def stamp(dtype: str, what: str = "compiled") -> Path | None:
    """The file that marks "all loops of a run in `dtype` are compiled", or another fact about such runs.

    None if numba has no cache folder.
    """
    folder = cache_folder()
    # numba's files are specific to a CPU too, and to its target settings (core/cpu.py)
    cpu = config.CPU_NAME or llvm.get_host_cpu_name()  # type: ignore[attr-defined]
    name = f"{what}-{dtype}-{cpu}-{sources(ROOM)[:16]}"
    return None if folder is None else folder / name
