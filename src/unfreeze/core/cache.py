"""The folders of this package's caches."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Folder of the cache `name`: $XDG_CACHE_HOME/unfreeze/NAME, else in ~/.cache. It may not exist yet.

    A user may have no home folder (a container with a user id that is in no passwd, and no $HOME). Then the
    path is inside a file: making it raises OSError, as in any cache that cannot be written.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # Path.home: "could not determine home directory"
        caches = Path(os.devnull)
    return caches / "unfreeze" / name
