"""unfreeze doctor MODEL [--data F] [--config run.toml]: check your files and machine before training.

`unfreeze doctor run.toml` also takes the model from the file. Trains nothing, writes nothing.

One line per check: ok, warn (it works, but look at it), fault (with the remedy) or skip (with the reason).
Exit code 2 if there is a fault that you can fix.
The checks are the guards of a run; `unfreeze dev drill` shows what they catch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.commands.recipe import recipe_of
from unfreeze.config.columns import Columns
from unfreeze.config.parse import Folder, Frozen, ModelName, parse, read_toml
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import UserError
from unfreeze.core.field import about
from unfreeze.job.doctor.checks import Finding, examine
from unfreeze.job.parts import Parts
from unfreeze.recipes import prefer, sft


class Config(Frozen):
    """Options of doctor."""

    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(
        description="checkpoint folder, or Hugging Face id org/name"
    )
    data: Folder = Field(default="", description="data file to check; default: that of --config, or none")
    columns: Columns = Field(
        default=(),
        description="column names in --data, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )
    config: Folder = Field(
        default="",
        description=(
            "TOML file of a run (sft, distill, prefer); default: the defaults of sft, or of prefer if"
            " the data are pairs or labels"
        ),
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> findings (check, level, line, remedy), faults, warnings, exit_code."""
    if arguments and arguments[0].endswith(".toml") and "--config" not in arguments:
        file = Path(arguments[0]).expanduser()
        name, recipe = recipe_of(file)
        model = (
            read_toml(file).get("model")
            or parse(recipe.Config, [str(file)], command=name, description="").model
        )
        arguments = [str(model), "--config", str(file), *arguments[1:]]
    config = parse(Config, arguments, command="doctor", description=__doc__ or "", positional=True)
    findings = []
    for finding in findings_of(config, quiet=common.quiet):
        findings.append(finding)
        if not common.quiet:
            print(as_text(finding), file=sys.stderr if common.json else sys.stdout, flush=True)
    count = {level: sum(finding.level == level for finding in findings) for level in ("fault", "warn")}
    if not common.quiet:
        summary = (
            f"{counted(count['fault'], 'fault')}, {counted(count['warn'], 'warning')} in"
            f" {counted(len(findings), 'check')}"
        )
        print(summary, file=sys.stderr if common.json else sys.stdout)
    return {
        "findings": [asdict(finding) for finding in findings],
        "faults": count["fault"],
        "warnings": count["warn"],
        "exit_code": 2 if count["fault"] else 0,
    }


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def as_text(finding: Finding) -> str:
    """Format a finding as `ok     checkpoint  …`, with the remedy on a second line."""
    line = f"{finding.level:<5}  {finding.check:<10}  {' '.join(finding.line.split())}"
    return line + (
        f"\n{'':<19}remedy: {finding.remedy}" if finding.remedy and finding.level in ("warn", "fault") else ""
    )


def findings_of(config: Config, *, quiet: bool = True) -> Iterator[Finding]:
    """Yield the findings. If the config cannot be read, that is the only one."""
    try:
        examined, parts = run_config(config)
    except UserError as error:
        yield Finding("config", "fault", error.message, error.next)
        return
    has_data = bool(config.data or config.config)
    yield from examine(examined, parts, has_data=has_data, quiet=quiet)


def run_config(config: Config) -> tuple[TrainingConfig, Parts]:
    """Build the run to check: --config with MODEL and --data on top, or sft's defaults without a file."""
    on_top = ["--model", config.model, *(["--data", config.data] if config.data else [])]
    on_top += ["--columns", *config.columns] if config.columns else []
    needed = [] if config.data or config.config else ["--data", "none"]
    if config.config:
        name, recipe = recipe_of(config.config)
    else:
        name, recipe, loss = recipe_for(config)
        on_top += loss
    file = [config.config] if config.config else []
    run = parse(recipe.Config, [*file, *on_top, *needed], command=name, description="")
    return run, recipe.parts(run)


def recipe_for(config: Config) -> tuple[str, Any, list[str]]:
    """Return (name, recipe, its flags) for the data: prefer if most of the first rows are pairs or labels."""
    from unfreeze.data.rows.kind import answers_in
    from unfreeze.data.rows.sources import files_of

    try:
        answers = answers_in(list(files_of(config.data)), config.columns) if config.data else "taught"
    except UserError:  # a check reports it, with the remedy
        answers = "taught"
    if answers == "taught":
        return "sft", sft, []
    return "prefer", prefer, ["--loss", "kto"] if answers == "labels" else []
