"""A rich Console that survives a closed output pipe."""

from __future__ import annotations

import os

from rich.console import Console


class PipeConsole(Console):
    """A Console that goes quiet if its pipe is closed (`… | head`); rich's own exits the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # redirect further prints as well
        os.close(nowhere)
