"""unfreeze report RUN: write report.html for a run folder and print its summary.

--watch follows a run while it trains.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.writer import writer
from unfreeze.report.html import RELOAD, summary_lines, write_report
from unfreeze.report.run import read_run


class Config(Frozen):
    run: Annotated[Folder, Positional, arg(metavar="RUN")] = Field(
        description="run folder, for example runs/yoda"
    )
    watch: bool = Field(
        default=False,
        description="rewrite the page every 4 seconds until the run ends or Ctrl-C; an open page"
        " reloads itself",
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Write the page and print the summary. -> report (path), summary (lines)."""
    config = parse(Config, arguments, command="report", description=__doc__ or "", positional=True)
    shown = not (common.quiet or common.json)
    with writing(config.run, "run", positional=True):
        if config.watch:
            watch(Path(config.run), quiet=not shown)
        # print the summary first: it needs no disk space
        lines = summary_lines(config.run)
        if shown:
            print("\n".join(lines), flush=True)
        page = write_report(config.run)
    if shown:
        print(f"report: {page}")
    return {"report": str(page), "summary": lines}


def watch(folder: Path, *, quiet: bool = False, seconds: float = RELOAD) -> None:
    """Rewrite the page whenever there are new events.

    Stop when the run has ended, when no process writes to it any more, or on Ctrl-C.
    The caller writes the last page, which does not reload itself.
    """
    events, known = folder / "events.jsonl", -1
    try:
        while True:
            size = events.stat().st_size if events.is_file() else -1
            # check only a silent run: the check itself holds the lock for a moment
            if size == known and not writer(folder):
                say_line(f"no process writes to {folder} any more", quiet)
                return
            if size != known:
                page = write_report(folder, watched=True)
                run = read_run(folder)
                if run.state != "unfinished":
                    return
                if known < 0:
                    say_line(f"watching {folder}; open {page}; Ctrl-C stops watching, not the run", quiet)
                known = size
            time.sleep(seconds)
    except KeyboardInterrupt:
        say_line("stopped watching; the run continues", quiet)


def say_line(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr)
