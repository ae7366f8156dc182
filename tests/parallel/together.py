"""`unfreeze` as torchrun starts it in a test, with faults to plant and things to count. Run as a script.

MARKS     a folder: a file in it for each download and each encoding, named after the process
WINDOWS   1: files of more than 60 rows are read in windows of 600 tokens
KILLED    RANK:STEP: this process is killed at that step, unless torchrun has started it again
"""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

from unfreeze import cli
from unfreeze.checkpoint import hub
from unfreeze.commands.demo import TINY_K2
from unfreeze.data.store import encoded


def mark(what: str) -> None:
    if folder := os.environ.get("MARKS"):
        (Path(folder) / f"{what}-{os.environ.get('RANK', 0)}-{uuid.uuid4().hex}").touch()


def download(repo_id: str, *arguments: Any, **options: Any) -> Path:
    mark("download")
    return TINY_K2


def plant() -> None:
    hub.download = download
    encode = encoded.encode_files

    def encode_files(*arguments: Any, **options: Any) -> Any:
        mark("encoding")
        return encode(*arguments, **options)

    encoded.encode_files = encode_files
    if os.environ.get("WINDOWS"):
        from unfreeze.data.store import streamed
        from unfreeze.job import data as job_data

        job_data.MANY_ROWS, streamed.HEAD, streamed.WINDOW, streamed.FULL = 60, 10, 600, 1
    victim, _, step = os.environ.get("KILLED", "").partition(":")
    if victim == os.environ.get("RANK") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        from unfreeze.train import fit

        train_step, steps = fit.train_step, [0]

        def killed(*arguments: Any, **options: Any) -> Any:
            steps[0] += 1
            if steps[0] == int(step):
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step(*arguments, **options)

        fit.train_step = killed


if __name__ == "__main__":
    plant()
    sys.exit(cli.main())
