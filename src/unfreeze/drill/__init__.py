"""unfreeze dev drill: plant known faults in a sandbox, and show the message that reports each.

35 rows (L loading, N numbers, M mixtures of experts, R runs, G rewards), most with several faults. Each fault
is really planted, in a temporary folder; your files are not touched. The exit code is 1 if a fault is not
reported.
--clean does the opposite: ten clean runs of different families must raise no alarm under the same guards.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from unfreeze.config.parse import Frozen, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from unfreeze.drill.fault import Fault
    from unfreeze.drill.sandbox import Sandbox


class Config(Frozen):
    """Options of drill."""

    only: tuple[str, ...] = Field(default=(), description="rows to plant, such as L7 N1; default: all 35")
    clean: bool = Field(
        default=False, description="plant nothing: ten clean runs of different families must raise no alarm"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Run the drill. -> faults, rows, rows_named, unnamed, seconds, exit_code.

    With --clean: runs, alarms. Each of faults: row, title, named, caught_by, line, next, seconds.
    """
    config = parse(Config, arguments, command="drill", description=__doc__ or "")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="unfreeze-drill-") as folder:
        from unfreeze.drill.sandbox import Sandbox

        result = (
            clean(Sandbox(Path(folder)), common)
            if config.clean
            else drill(config.only, Sandbox(Path(folder)), common)
        )
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


def faults() -> list[Fault]:
    """All faults, in order of their rows."""
    from unfreeze.drill import bills, experts, loading, numbers, rewards, runs
    from unfreeze.drill.fault import ROWS

    known = [*loading.FAULTS, *numbers.FAULTS, *experts.FAULTS, *runs.FAULTS, *bills.FAULTS, *rewards.FAULTS]
    # the sort is stable: faults of a row keep their order
    return sorted(known, key=lambda fault: ROWS.index(fault.row))


def drill(only: Sequence[str], sandbox: Sandbox, common: Common) -> dict[str, Any]:
    """Plant the faults of the rows `only` (empty: all), print each, then the table."""
    from unfreeze.drill.fault import ROWS

    wanted = [row.upper() for row in only] or list(ROWS)
    unknown = [row for row in wanted if row not in ROWS]
    if unknown:
        raise ConfigError(
            f"only = {unknown[0]!r} is not a row of the drill{nearest(unknown[0], ROWS)}",
            next=f"one or more of {' '.join(ROWS)}",
        )
    chosen = [fault for fault in faults() if fault.row in wanted]
    planted = []
    for number, fault in enumerate(chosen, start=1):
        planted.append(plant(fault, sandbox))
        if not common.quiet:
            state = "named" if planted[-1]["named"] else "UNNAMED"
            print(
                f"{number:>3}/{len(chosen)}  {fault.row}  {state:<7}  {fault.title} "
                f" ({planted[-1]['seconds']:.1f} s)",
                file=sys.stderr,
                flush=True,
            )
    absent = [row for row in wanted if row not in {fault.row for fault in chosen}]
    unnamed = sorted({entry["row"] for entry in planted if not entry["named"]} | set(absent), key=ROWS.index)
    result = {
        "faults": planted,
        "rows": len(set(wanted)),
        "rows_named": len(set(wanted)) - len(unnamed),
        "unnamed": unnamed,
        "exit_code": 1 if unnamed else 0,
    }
    if not (common.quiet or common.json):
        show_faults(result)
    return result


def plant(fault: Fault, sandbox: Sandbox) -> dict[str, Any]:
    """Plant one fault.

    Anything but an Outcome means that no guard reported it: silence, a wrong message, or a traceback.
    """
    from unfreeze.drill.fault import Unnamed

    started = time.perf_counter()
    entry: dict[str, Any] = {
        "row": fault.row,
        "title": fault.title,
        "named": False,
        "caught_by": "",
        "line": "",
        "next": "",
    }
    try:
        outcome = fault.plant(sandbox)
        entry |= {
            "named": True,
            "caught_by": outcome.caught_by,
            "line": one_line(outcome.line),
            "next": outcome.next,
        }
    except Unnamed as error:
        entry["line"] = one_line(str(error))
    # a planted fault can break anything; any other exception counts as unnamed and is never swallowed
    except Exception as error:
        entry["line"] = one_line(f"a user would see a traceback: {type(error).__name__}: {error}")
    return {**entry, "seconds": round(time.perf_counter() - started, 2)}


def one_line(text: str) -> str:
    """Join lines, and remove the sandbox's meaningless folder names."""
    import re

    return re.sub(r"/\S*unfreeze-drill-[^/\s]+/", "", " ".join(text.split()))


def show_faults(result: dict[str, Any]) -> None:
    """Print the table: fault, caught by, line."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, expand=True)
    for name, ratio in (("row", None), ("fault", 3), ("caught by", 3), ("line", 8)):
        table.add_column(name, ratio=ratio, overflow="fold")
    for entry in result["faults"]:
        caught = entry["caught_by"] if entry["named"] else "[bold red]nobody[/]"
        table.add_row(entry["row"], entry["title"], caught, entry["line"].replace("[", r"\["))
    Console().print(table)
    verdict = f"{result['rows_named']}/{result['rows']} rows named, {len(result['faults'])} faults planted"
    print(verdict + (f"; unnamed: {' '.join(result['unnamed'])}" if result["unnamed"] else ""))


def clean(sandbox: Sandbox, common: Common) -> dict[str, Any]:
    """Run ten clean runs under the same guards. -> runs, alarms. Exit code 1 for any alarm."""
    from unfreeze.drill.clean_runs import RUNS, alarms_of

    runs, alarms = [], []
    for number, run in enumerate(RUNS, start=1):
        raised = alarms_of(run, sandbox)
        runs.append(run.title)
        alarms += [f"{run.title}: {one_line(alarm)}" for alarm in raised]
        if not common.quiet:
            print(f"{number:>3}/{len(RUNS)}  {run.title}: {len(raised)} alarms", file=sys.stderr, flush=True)
    if not (common.quiet or common.json):
        print("\n".join([*alarms, f"{len(alarms)} false alarms in {len(runs)} clean runs"]))
    return {"runs": runs, "alarms": alarms, "exit_code": 1 if alarms else 0}
