"""The run folder of a process that isn't the first: it reads the saves of the real one, and nothing else that it writes is kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unfreeze.parallel.collectives import Group
from unfreeze.train.run import Run


class Follower(Run):
    """A Run in a temporary folder whose state/ is a link to the real one. Recipes and hooks write here as process 0 does there; it goes at the end.

    So that no recipe, hook or report needs to ask which process it is in. Saves are the exception: fit() lets only process 0 make them.
    """

    def __init__(self, path: Path | str, config: Any, **options: Any):
        self._temporary = tempfile.TemporaryDirectory(prefix="unfreeze-follower-")
        folder = Path(self._temporary.name)
        (folder / "state").symlink_to(Path(path).resolve() / "state")
        super().__init__(folder, config, **options)

    def close(self) -> None:
        super().close()
        self._temporary.cleanup()


def open_run(group: Group, lead: Callable[[], Run], follow: Callable[[], Run]) -> Run:
    """Process 0 opens the run folder first (it clears what a killed run left there), then the others open theirs.

    Raises what `lead` raises on process 0, UserError on the others.
    """
    run = group.lead(lead)
    return follow() if run is None else run
