"""What a run has left behind of its last step: <run>/written.json, name of the folder -> the step it is of.

An interrupted run has an adapter too, and a run that goes on for longer a model: a folder that is there need
not be of the step that was saved last.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from unfreeze.core.errors import CheckpointError
from unfreeze.untrusted.json_object import read_object

FILE = "written.json"


def is_noted(run: Path, folder: Path) -> bool:
    """Whether the folder was written since the run last trained. Runs of before have no such file: True."""
    return not (run / FILE).is_file() or folder.name in read_object(run / FILE, CheckpointError)


def note(run: Path, folder: Path, step: int) -> None:
    """The folder is written, and is of this step."""
    from unfreeze.checkpoint.save import write_file

    there = read_object(run / FILE, CheckpointError) if (run / FILE).is_file() else {}
    write_file(run / FILE, json.dumps({**there, folder.name: step}) + "\n")


def forget_written(run: Path) -> None:
    """The run trains on: what is there will not be of its last step."""
    from unfreeze.checkpoint.save import write_file

    write_file(run / FILE, "{}\n")


def set_aside(folder: Path) -> None:
    """Remove a folder at once: a kill leaves it, or under a name that the run's next start removes."""
    if folder.is_dir():
        aside = folder.with_name(f".{folder.name}.unfinished-former")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        shutil.rmtree(aside)
