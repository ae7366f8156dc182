"""trackio: its own database (TRACKIO_DIR, else in the Hugging Face cache), project "unfreeze".

Show it with `trackio show`. Data stay on this machine unless trackio's own variables TRACKIO_SPACE_ID or
TRACKIO_SERVER_URL name a server.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from unfreeze.core.schema import Event
from unfreeze.tracking import scalars, texts


class Sink:
    """Scalars and texts of each event at its step, under the run folder's name.

    A resumed run keeps its name. trackio has one current run per process. It prints to stdout, which belongs
    to --json, so its output is dropped.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        import trackio

        self._trackio, self._name, self._config = trackio, run_dir.resolve().name, config

    def open(self, step: int) -> None:
        with redirect_stdout(io.StringIO()):
            self._run = self._trackio.init(
                project="unfreeze",
                name=self._name,
                config=dict(self._config),
                resume="allow" if step else "never",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, event: Event) -> None:
        values = {**scalars(event), **texts(event)}
        if values:
            self._run.log(values, step=event["step"])

    def close(self, done: bool) -> None:
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()
