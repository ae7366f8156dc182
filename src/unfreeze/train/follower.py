"""The run folder of every process except the first.

It reads saves from the real folder; its own output is discarded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unfreeze.parallel.processes.collectives import Group
from unfreeze.train.run import Run


class Follower(Run):
    """A Run in a temporary folder, removed at the end, whose state/ links to the real one.

    Recipes and hooks write here as process 0 does in its folder, so none needs to know its process. Only
    saves
    differ: fit() lets only process 0 make them.
    """

    def __init__(self, path: Path | str, config: Any, **options: Any):
        self._temporary = tempfile.TemporaryDirectory(prefix="unfreeze-follower-")
        folder = Path(self._temporary.name)
        (folder / "state").symlink_to(Path(path).resolve() / "state")
        super().__init__(folder, config, **options)
        self.shown = Path(path)

    def close(self) -> None:
        super().close()
        self._temporary.cleanup()


def open_run(group: Group, on_rank0: Callable[[], Run], elsewhere: Callable[[], Run]) -> Run:
    """Open the run folder in process 0 first, then in the others.

    Process 0 removes what a killed run left there.
    Raises what `on_rank0` raises on process 0, UserError on the others.
    """
    run = group.on_rank0(on_rank0)
    try:
        return group.meet(lambda: elsewhere() if run is None else run)
    except BaseException as error:
        if run is not None:  # another process failed to open its folder: remove what was just created
            run.__exit__(type(error), error, error.__traceback__)
        raise
