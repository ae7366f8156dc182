"""<run>/written.json: result folder -> the step it was written at.

A result folder can be older than the last save: an interrupted run has an adapter, and a run extended with
more steps has the model of its former end.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from unfreeze.core.errors import CheckpointError
from unfreeze.untrusted.json_object import read_object

FILE = "written.json"


def is_noted(run: Path, folder: Path) -> bool:
    """True if the folder was written since the run last trained.

    Also True without written.json (old runs).
    """
    return not (run / FILE).is_file() or folder.name in read_object(run / FILE, CheckpointError)


def note(run: Path, folder: Path, step: int) -> None:
    """Record that the folder was written at this step."""
    from unfreeze.checkpoint.save import write_file

    there = read_object(run / FILE, CheckpointError) if (run / FILE).is_file() else {}
    write_file(run / FILE, json.dumps({**there, folder.name: step}) + "\n")


def forget_written(run: Path) -> None:
    """Clear the record: the run trains further, so its result folders become outdated."""
    from unfreeze.checkpoint.save import write_file

    write_file(run / FILE, "{}\n")


def set_aside(folder: Path) -> None:
    """Remove a folder atomically. If killed, it stays, or has a name that the run's next start removes."""
    if folder.is_dir():
        aside = folder.with_name(f".{folder.name}.unfinished-former")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside)
