"""rich's Console, which outlives the reader of its output."""

from __future__ import annotations

import os

from rich.console import Console


class PipeConsole(Console):
    """A Console that falls silent where its reader has gone (`… | head`); rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # what others still print goes there too
        os.close(nowhere)
