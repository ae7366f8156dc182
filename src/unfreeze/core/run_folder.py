"""Names of run folders: refuse a folder that holds the user's own files, and propose a free name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED

OURS = ("lock", "events.jsonl", RESOLVED, "state")
"""A run's folder has at least one of these. The lock is taken before anything else is written."""
BEFORE = re.compile(r"rows-[0-9a-f]{8}\.jsonl|\w+-[0-9a-f]{8}\.py")
"""Rows and functions from Python, which api.py writes into the folder before the run starts."""
NAMED = 2  # files named in the message


def refuse_other_files(folder: Path) -> None:
    """Raise ConfigError if the folder holds files but is not a run: training would overwrite them.

    Hidden and empty files do not count: a log may be open there.
    """
    if not folder.is_dir() or any((folder / name).exists() for name in OURS):
        return
    if (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds a model, and a run needs a folder of its own",
            next=f"give another folder with --out, such as {free_folder(folder / 'run')}",
        )
    others = sorted(path.name for path in folder.iterdir() if _counts(path))
    if others:
        more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
        raise ConfigError(
            f"{folder} holds other files ({', '.join(others[:NAMED])}{more}) and is not a run",
            next=f"--out {free_folder(folder / 'run')}, or another name",
        )


def free_name(folder: Path) -> Path:
    """`folder` if nothing is there, else the first free name of folder-2, folder-3, …"""
    number, free = 2, folder
    while free.exists():
        free = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return free


def free_folder(folder: Path) -> str:
    """free_name() as a word of a command."""
    return shlex.quote(str(free_name(folder)))


def _counts(path: Path) -> bool:
    if path.name.startswith(".") or BEFORE.fullmatch(path.name):
        return False
    return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0
