"""Many commands, one after the other, for `unfreeze life` and `unfreeze lab`: processes, record, hashes.

The record is one JSON file that is written whole after every change, so that a kill at any moment leaves one
that is complete, and the same command goes on.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError

STOP = "stop"
"""Key of a result: the stage is done, but Ctrl-C came meanwhile."""

Launch = Callable[[Sequence[str], bool], tuple[int, dict[str, Any]]]
"""(words of a command, quiet) -> exit code, result."""


class Stopped(KeyboardInterrupt):
    """A stage was interrupted, and is saved."""


def launch(words: Sequence[str], quiet: bool) -> tuple[int, dict[str, Any]]:
    """Run a command of unfreeze, or a script, in a process of its own.

    Ctrl-C reaches the child too, which saves while this waits. A second Ctrl-C kills it.
    """
    own = words[0] != "python"
    command = [sys.executable, *(["-m", "unfreeze", *words, "--json"] if own else words[1:])]
    child = subprocess.Popen(
        [*command, *(["--quiet"] if quiet and own else [])],
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",  # a script may print any bytes
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    interrupted = False
    while True:
        try:
            printed, _ = child.communicate()
            break
        except KeyboardInterrupt:
            if interrupted:
                child.kill()
                raise
            interrupted = True
    if interrupted and child.returncode:
        raise Stopped
    lines = printed.strip().splitlines()
    result = json.loads(lines[-1]) if own and lines and not child.returncode else {}
    return child.returncode, {**result, STOP: True} if interrupted else result


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its parent is killed: else it would write into the next start."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def by_script(
    words: Sequence[str], folder: Path, launch: Launch, quiet: bool, flag: str = ""
) -> tuple[int, dict[str, Any]]:
    """Run a script that makes a folder. -> exit code, result.

    It writes beside the folder, which appears when the script ends well. flag: before the folder's name.
    """
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    code, result = launch([*words, *([flag] if flag else []), str(part)], quiet)
    if not code:
        os.replace(part, folder)
    return code, result


@contextmanager
def alone(out: Path) -> Generator[None]:
    """Hold the folder, so that no other process writes into it meanwhile. Raises ConfigError if one does."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"another process works in {out}", next="wait for it, or give another --out"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


def told(common: Common, line: str) -> None:
    """Print a line of progress."""
    if not common.quiet:
        print(line, file=sys.stderr, flush=True)


def has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def is_file(word: str) -> bool:
    """True if a word of a command is a file. Path.is_file raises for words that are too long for a name."""
    return os.path.isfile(word)


def digest(texts: Sequence[str], files: Sequence[str]) -> str:
    """Hash of texts, and of the content of those files that exist."""
    hashed = hashlib.blake2b(digest_size=16)
    for text in texts:
        hashed.update(text.encode() + b"\0")
    for file in files:
        if is_file(file):
            hashed.update(Path(file).read_bytes())
    return hashed.hexdigest()


def keep(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record atomically."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
    os.replace(temporary, path)
