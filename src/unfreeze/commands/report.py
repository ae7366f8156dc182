"""unfreeze report RUN: write report.html of a run folder and print its summary."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.report.html import summary_lines, write_report


class Config(Frozen):
    run: Annotated[Folder, Positional, arg(metavar="RUN")] = Field(description="run folder, for example runs/yoda")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Write the page; returns its path."""
    config = parse(Config, arguments, command="report", description=__doc__ or "", positional=True)
    with writing(config.run, "run"):
        page = write_report(config.run)
    lines = summary_lines(config.run)
    if not (common.quiet or common.json):
        print("\n".join([*lines, f"report: {page}"]))
    return {"report": str(page), "summary": lines}
