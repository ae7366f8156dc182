"""unfreeze compare runs/a runs/b …: results best first, config differences, curves in one picture.

Prints tables and writes one HTML page. Runs are ranked by lowest validation loss if all have one, else by
their last training loss. Runs on different data are ranked only if they share a validation file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import plural
from unfreeze.report import compare
from unfreeze.report.page import write_page
from unfreeze.report.run import RunFolder
from unfreeze.tracking.console import PipeConsole


class Config(Frozen):
    runs: Annotated[tuple[Folder, ...], Positional, arg(metavar="RUN")] = Field(
        description="run folders, two to twelve, for example runs/a runs/b"
    )
    html: Folder = Field(
        default="", description="HTML page to write; default compare-<names>.html beside the first run"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Compare runs. -> runs, ranked_by, differences, caution, html.

    runs: one row of results each, best first; differences: field -> values; html: path of the page.
    """
    config = parse(Config, arguments, command="compare", description=__doc__ or "", positional=True)
    folders = [
        name for name in config.runs if not name.endswith(".html")
    ]  # runs/* can also match an earlier page
    refuse_folder_of_runs(folders or config.runs)
    runs = compare.ranked(compare.read_runs(folders or config.runs))
    names = [name.replace("/", "-") for name in compare.run_names(runs)]
    target = (
        Path(config.html)
        if config.html
        else runs[0].path.resolve().parent / f"compare-{'-'.join(names)[:100]}.html"
    )
    with writing(target, "html"):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_page(target, compare.comparison_page(runs))
    if not (common.quiet or common.json):
        show_runs(runs, PipeConsole())
        print(f"curves: {target}")
    return {**compare.as_dict(runs), "html": str(target)}


def refuse_folder_of_runs(runs: Sequence[str]) -> None:
    """If the argument is one folder of runs, raise ConfigError with the command that compares them."""
    folder = Path(runs[0]) if len(runs) == 1 else None
    if folder is None or (folder / "events.jsonl").exists():
        return
    if inside := sorted(folder.glob("*/events.jsonl")):
        raise ConfigError(f"{folder} holds {plural(len(inside), 'run')}", next=f"unfreeze compare {folder}/*")


def show_runs(runs: list[RunFolder], console: Console) -> None:
    """Print both tables, one column per run so that two to four fit a terminal, then the cautions."""
    names = compare.run_names(runs)
    results = [compare.result(run, name).cells() for run, name in zip(runs, names, strict=True)]
    rows = [(head, *(cells[i] for cells in results)) for i, head in enumerate(compare.RESULT_HEAD) if i]
    differences = [(field, *values) for field, values in compare.differences(runs).items()]
    for title, lines in ((f"results, {compare.ranking(runs).words}", rows), ("configuration", differences)):
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
        for head in ("", *names):
            table.add_column(Text(head), overflow="fold")
        for line in lines:
            table.add_row(*(Text(cell) for cell in line))
        if lines:
            console.print(table)
    if not differences:
        console.print("the configurations are the same")
    if caution := compare.caution(runs):
        console.print(Text(caution))
