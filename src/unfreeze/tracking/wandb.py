"""Weights & Biases: offline in runs/<name>/wandb/ unless WANDB_MODE=online, so no data leave unasked.

`wandb sync runs/<name>/wandb/offline-run-*` uploads later. WANDB_PROJECT and wandb's other variables work as
usual.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unfreeze.core.schema import Event
from unfreeze.tracking import scalars, texts


class Sink:
    """Scalars as metrics over the field "step", texts in the run's summary.

    Sessions of a resumed run share one id (runs/<name>/wandb-id).
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any]):
        self._mode: Any = os.environ.get("WANDB_MODE", "offline")
        if self._mode == "offline":
            # wandb reports its own crashes over the network otherwise
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb, self._run_dir, self._config = wandb, run_dir, config

    def open(self, step: int) -> None:
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "unfreeze"),
            name=self._run_dir.resolve().name,
            id=self._id(step),
            resume="allow",
            dir=str(self._run_dir),
            config=dict(self._config),
            mode=self._mode,
            reinit="create_new",  # do not take over a run opened by the calling program
            settings=self._wandb.Settings(
                console="off", silent=True
            ),  # stdout belongs to --json, the terminal to the live progress
        )
        self._run.define_metric("step")
        # use our own axis: wandb's internal one refuses steps repeated after a resume
        self._run.define_metric("*", step_metric="step")

    def log(self, event: Event) -> None:
        if values := scalars(event):
            self._run.log({"step": event["step"], **values})
        for name, words in texts(event).items():
            self._run.summary[name] = words

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)

    def _id(self, step: int) -> str:
        """Return a new id for a new run, the previous id for a resumed run."""
        file = self._run_dir / "wandb-id"
        if step and file.is_file():
            return file.read_text(encoding="utf-8").strip()
        fresh = uuid.uuid4().hex[:12]
        file.write_text(fresh + "\n", encoding="utf-8")
        return fresh
