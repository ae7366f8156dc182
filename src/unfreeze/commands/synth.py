"""unfreeze synth: data made by a model behind an OpenAI-compatible server, to a budget.

    unfreeze synth plan seeds.jsonl --recipe r.toml --endpoint URL    the worst price first; nothing is sent
    unfreeze synth run PLAN                                           send, keep every answer, write rows

A plan whose worst case is above --budget-usd (0 by default) is refused. No request is sent without a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, UserError, nearest
from unfreeze.core.units import plural
from unfreeze.job.opening.device import say

if TYPE_CHECKING:
    from unfreeze.synth.run import Open

PLAN = """unfreeze synth plan SEEDS --recipe r.toml --endpoint URL: say the worst price; send nothing.

A plan whose worst case is above --budget-usd, 0 by default, is refused. A server outside your network needs
its prices. Planned again with the same --out, a folder keeps its answers.
"""
RUN = """unfreeze synth run PLAN: send what a plan asks and has no answer yet, and write the rows.

Each attempt is booked at its worst price before it is sent, and none is sent above the plan's ceiling. The
same command continues after Ctrl-C, a kill or a failure.
"""
MOST_REASONS = 8  # lines on what was left out


class PlanConfig(Frozen):
    seeds: Annotated[Folder, Positional, arg(metavar="SEEDS")] = Field(
        description="data file, a seed a row, with the fields that the recipe names"
    )
    recipe: Folder = Field(description="recipe, a TOML file; examples/synth has eight")
    endpoint: str = Field(default="", description="address of the server; empty: the recipe's")
    model: str = Field(default="", description="the model's name on the server; empty: the recipe's")
    budget_usd: float | None = Field(default=None, ge=0, description="the ceiling, USD; else the recipe's, 0")
    price_read: float | None = Field(default=None, ge=0, description="USD per million tokens read")
    price_written: float | None = Field(default=None, ge=0, description="USD per million tokens written")
    out: Folder = Field(default="", description="folder of the plan; empty: named after the recipe")


class RunConfig(Frozen):
    folder: Annotated[Folder, Positional, arg(metavar="PLAN")] = Field(description="folder of a plan")
    out: Folder = Field(default="", description="file for the rows; empty: rows.jsonl in the plan's folder")
    batch: Folder = Field(default="", description="write and book batch files into this folder instead")
    batch_results: Folder = Field(default="", description="read a batch's file of results")
    again: bool = Field(
        default=False, description="ask again what was written into batch files; books it again"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Plan, or run a plan.

    plan -> plan, requests, read, written, worst_usd, budget_usd. run -> rows, left_out, booked_usd, …
    """
    name, *rest = arguments or [""]
    if name in ("-h", "--help", "--help-all"):
        with suppress(SystemExit):
            _plan_config([name])
        print()
        _run_config([name])
    if name not in ("plan", "run"):
        other = f"{name!r}{nearest(name, ('plan', 'run'))}" if name else "nothing"
        raise ConfigError(
            f"synth takes the subcommand plan or run, got {other}",
            next="unfreeze synth plan seeds.jsonl --recipe r.toml --endpoint URL",
        )
    return plan(_plan_config(rest), common) if name == "plan" else run(_run_config(rest), common)


def _plan_config(words: list[str]) -> PlanConfig:
    return parse(PlanConfig, words, command="synth plan", description=PLAN, positional=True)


def _run_config(words: list[str]) -> RunConfig:
    return parse(RunConfig, words, command="synth run", description=RUN, positional=True)


def plan(config: PlanConfig, common: Common) -> dict[str, Any]:
    """Price a plan and write its folder."""
    from unfreeze.synth.plan import make_plan, write_plan

    fields = {name: getattr(config, name) for name in ("budget_usd", "price_read", "price_written")}
    changed = {name: value for name, value in fields.items() if value is not None}
    changed |= {name: getattr(config, name) for name in ("endpoint", "model") if getattr(config, name)}
    show = say(common)
    priced, folder = make_plan(Path(config.seeds), config.recipe, changed, config.out, show)
    with writing(folder, "out"):
        write_plan(priced, folder)
    if not common.json:
        print(f"{folder}: planned. next: unfreeze synth run {folder}")
    names = ("requests", "read", "written", "worst_usd", "budget_usd")
    return {"plan": str(folder), **{name: getattr(priced, name) for name in names}}


def run(config: RunConfig, common: Common) -> dict[str, Any]:
    """Send what is missing, or write or read batch files; then write the rows."""
    from unfreeze.synth.plan import read_plan
    from unfreeze.synth.run import connect, only_here, open_plan, summary

    folder, show = Path(config.folder), say(common)
    online = not (config.batch or config.batch_results)
    read_plan(folder)  # refuse before a folder is made and locked
    with ExitStack() as ends:
        ends.enter_context(only_here(folder))
        at = open_plan(folder, show, connect if online else None)
        ends.callback(at.close)
        out = Path(config.out) if config.out else None
        try:
            fault, more = _online(at, config) if online else _batched(at, config, show)
        except KeyboardInterrupt:
            at.rows(out)
            words = f"{plural(len(at.kept.known), 'answer')} kept; the same command continues"
            raise KeyboardInterrupt(words) from None
        with writing(out.parent if out else folder, "out"):
            written = at.rows(out)
        result = {**summary(at, written), **more}
    for reason, count in written.left_out.most_common(MOST_REASONS):
        show(f"left out: {count:,}: {reason}")
    if written.usage_refused:
        answers = plural(written.usage_refused, "answer")
        show(f"warning: the usage of {answers} was refused: {written.usage_fault}")
    if fault is not None:
        raise fault
    if not common.json:
        print(f"{written.path}: {plural(written.rows, 'row')}. next: {_next(at, written.path)}")
    return result


def _online(at: Open, config: RunConfig) -> tuple[UserError | None, dict[str, Any]]:
    from unfreeze.synth.batch import refuse_waiting

    if not config.again:
        refuse_waiting(at.folder)
    return at.ask(), {}


def _batched(
    at: Open, config: RunConfig, show: Callable[[str], None]
) -> tuple[UserError | None, dict[str, Any]]:
    """Read a batch's results, then write what is still missing into files, each if it is asked for."""
    from unfreeze.synth.batch import read_results, write_batches

    result: dict[str, Any] = {}
    if config.batch_results:
        result["results"] = counts = read_results(at, Path(config.batch_results))
        show(f"{config.batch_results}: {', '.join(f'{count:,} {name}' for name, count in counts.items())}")
    if config.batch:
        with writing(config.batch, "batch"):
            files = write_batches(at, Path(config.batch), again=config.again)
        result["files"] = list(map(str, files))
        show(f"{plural(len(files), 'file')} in {config.batch}; {at.money}")
    return at.over(), result


def _next(at: Open, path: Path) -> str:
    """Return the command that trains on the rows, or that asks what is missing."""
    if at.missing():
        return f"unfreeze synth run {at.folder}"
    if at.recipe.kind == "messages":
        return f"unfreeze sft --model M --data {path}"
    loss = " --preference.loss kto" if at.recipe.kind == "labels" else ""
    return f"unfreeze prefer --model M --data {path}{loss}"
