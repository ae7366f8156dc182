"""unfreeze doctor MODEL [--data F] [--config run.toml]: check your files and machine before training.

`unfreeze doctor run.toml` also takes the model from the file. Trains nothing, writes nothing.

`unfreeze doctor --gpu` checks the GPU: driver, memory, and every kernel against float64, with its speed. It
takes a minute, or up to ten while kernels compile. A kernel that is wrong or slower does not run there from
then on. `--ops` makes the same table for the CPU. `--bundle` writes one file to send along with a question.

One line per check: ok, warn (it works, but look at it), fault (with the remedy) or skip (with the reason).
Exit code 2 if there is a fault that you can fix.
The checks are the guards of a run; `unfreeze dev drill` shows what they catch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.commands.data_show import PROMPTS
from unfreeze.commands.recipe import recipe_of
from unfreeze.config.columns import Columns
from unfreeze.config.grpo import Rollout
from unfreeze.config.parse import USERS_OWN, Folder, Frozen, ModelName, parse, read_toml
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.events import RESOLVED
from unfreeze.core.field import about
from unfreeze.core.units import plural
from unfreeze.job.doctor.checks import Finding, examine
from unfreeze.job.parts import Parts
from unfreeze.recipes import grpo, prefer, sft

if TYPE_CHECKING:
    from unfreeze.data.rows.row import Answers
    from unfreeze.kernels.choice.times import Row

FILE = "unfreeze-bundle.txt"
WITH_REWARD = (
    'check a run\'s file with reward = "my.py", and try unfreeze reward show my.py --data {data};'
    " for sft name the answers: --columns completion=NAME"
)


class Config(Frozen):
    """Options of doctor."""

    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(
        default="",
        description="checkpoint folder, or Hugging Face id org/name; with --bundle also a run's folder",
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
            "TOML file of a run (sft, distill, prefer, grpo); default: the defaults of sft, or of prefer"
            " if the data are pairs or labels"
        ),
    )
    gpu: bool = Field(default=False, description="check the GPU and every kernel on it; needs no MODEL")
    ops: bool = Field(default=False, description="check every kernel of this CPU; needs no MODEL")
    op: tuple[str, ...] = Field(
        default=(), description="of --gpu and --ops: only these ops, such as rms_norm attention"
    )
    bundle: bool = Field(
        default=False,
        description=f"write {FILE}: versions, checks, and events of a run, without secrets and paths",
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> findings (check, level, line, remedy), faults, warnings, exit_code.

    With --gpu or --ops also device, rows (kernels/choice/times.py) and left, the cells not reached in time.
    """
    if arguments and arguments[0].endswith(".toml") and "--config" not in arguments:
        file = Path(arguments[0]).expanduser()
        name, recipe = recipe_of(file)
        model = (
            read_toml(file).get("model")
            or parse(recipe.Config, [str(file)], command=name, description="").model
        )
        arguments = [str(model), "--config", str(file), *arguments[1:]]
    config = parse(Config, arguments, command="doctor", description=__doc__ or "", positional=True)
    if config.bundle:
        return bundled(config, common)
    if config.gpu or config.ops:
        return examine_ops(config, common)
    if not config.model:
        raise ConfigError(
            "doctor needs a MODEL, or one of --gpu, --ops and --bundle",
            next="unfreeze doctor MODEL --data FILE",
        )
    findings = []
    for finding in findings_of(config, quiet=common.quiet):
        findings.append(finding)
        if not common.quiet:
            print(as_text(finding), file=sys.stderr if common.json else sys.stdout, flush=True)
    count = {level: sum(finding.level == level for finding in findings) for level in ("fault", "warn")}
    if not common.quiet:
        summary = (
            f"{plural(count['fault'], 'fault')}, {plural(count['warn'], 'warning')} in"
            f" {plural(len(findings), 'check')}"
        )
        print(summary, file=sys.stderr if common.json else sys.stdout)
    return {
        "findings": [asdict(finding) for finding in findings],
        "faults": count["fault"],
        "warnings": count["warn"],
        "exit_code": 2 if count["fault"] else 0,
    }


def examine_ops(config: Config, common: Common) -> dict[str, Any]:
    """Check the card, then every kernel on it (or on this CPU).

    Exit code 2 without a GPU, 1 if a kernel is wrong.
    """
    import torch

    from unfreeze.job.doctor import gpu
    from unfreeze.kernels.choice import checked
    from unfreeze.kernels.choice.record import device_key

    def say(line: str) -> None:
        if not common.quiet:
            print(line, file=sys.stderr if common.json else sys.stdout, flush=True)

    findings = list(gpu.gpu_findings()) if config.gpu else []
    for finding in findings:
        say(as_text(finding))
    faults = sum(finding.level == "fault" for finding in findings)
    result = {"findings": [asdict(finding) for finding in findings], "faults": faults}
    if faults:
        return result | {"warnings": 0, "exit_code": 2}
    device = torch.device("cuda" if config.gpu else "cpu")
    cells = checked.cells_of(gpu.chosen(config.op), device)
    rows: list[Row] = []
    say(f"{device_key(device)}, torch {torch.__version__}: {len(cells)} kinds of inputs, against float64")
    say(gpu.heading())
    try:
        for row in gpu.table(cells, device):
            rows.append(row)
            say(gpu.as_line(row))
    except KeyboardInterrupt:
        say("interrupted: what was checked is kept")
    left = len(cells) - len(rows)
    say(gpu.summary(rows, left, device))
    wrong = sum(bool(row["wrong"]) for row in rows)
    if wrong:
        say("report the wrong ones with the file of: unfreeze doctor --bundle")
    return result | {
        "warnings": sum(finding.level == "warn" for finding in findings),
        "device": device_key(device),
        "rows": rows,
        "left": left,
        "exit_code": 1 if wrong or (rows and all(row["untimed"] for row in rows)) else 0,
    }


def bundled(config: Config, common: Common) -> dict[str, Any]:
    """Write the bundle into the current folder. -> file."""
    from unfreeze.checkpoint.save import write_file
    from unfreeze.job.doctor.bundle import bundle
    from unfreeze.job.doctor.gpu import gpu_findings
    from unfreeze.kernels.choice.record import user_folder

    run = Path(config.model) if config.model else None
    if run is not None and not (run / RESOLVED).is_file():
        raise ConfigError(f"{run} is no folder of a run", next="unfreeze doctor --bundle runs/NAME")
    checks = sorted([*user_folder().glob("timed-*.json"), *user_folder().glob("checked-*.json")])
    file = Path(FILE)
    text = bundle(gpu_findings(), run, checks)
    try:
        write_file(file, text)
    except OSError as error:
        if error.errno not in USERS_OWN:
            raise
        raise ConfigError(
            f"{file} cannot be written into {file.resolve().parent}: {error.strerror}",
            next="call it in a folder that can be written",
        ) from error
    if not common.quiet:
        print(f"{file}: read it before you send it", file=sys.stderr if common.json else sys.stdout)
    return {"file": str(file)}


def as_text(finding: Finding) -> str:
    """Format a finding as `ok     checkpoint  …`, with the remedy on a second line."""
    line = f"{finding.level:<5}  {finding.check:<10}  {' '.join(finding.line.split())}"
    return line + (
        f"\n{'':<19}remedy: {finding.remedy}" if finding.remedy and finding.level in ("warn", "fault") else ""
    )


def findings_of(config: Config, *, quiet: bool = True) -> Iterator[Finding]:
    """Yield the findings. If the config cannot be read, that is the only one."""
    prompts = not config.config and _kind(config) == "asked"
    try:
        examined, parts = run_config(config)
    except UserError as error:
        yield Finding("config", "fault", error.message, error.next)
        return
    if prompts:
        parts = replace(parts, encoding=grpo.of_prompts(parts.encoding, Rollout().max_new_tokens))
        yield Finding("config", "warn", f"{config.data}: {PROMPTS}", WITH_REWARD.format(data=config.data))
    has_data = bool(config.data or config.config)
    yield from examine(examined, parts, has_data=has_data, quiet=quiet)


def run_config(config: Config) -> tuple[TrainingConfig, Parts]:
    """Build the run to check: --config with MODEL and --data on top, or sft's defaults without a file."""
    on_top = ["--model", config.model, *(["--data", config.data] if config.data else [])]
    on_top += ["--columns", *config.columns] if config.columns else []
    needed = [] if config.data or config.config else ["--data", "none"]
    if config.config:
        name, recipe = recipe_of(config.config)
    elif (kind := _kind(config)) in ("pairs", "labels"):
        name, recipe = "prefer", prefer
        on_top += ["--loss", "kto"] if kind == "labels" else []
    else:
        name, recipe = "sft", sft
    file = [config.config] if config.config else []
    run = parse(recipe.Config, [*file, *on_top, *needed], command=name, description="")
    return run, recipe.parts(run)


def _kind(config: Config) -> Answers:
    """Return the kind of most of the data's first rows; "taught" without data."""
    from unfreeze.data.rows.kind import answers_in
    from unfreeze.data.rows.sources import files_of

    try:
        return answers_in(list(files_of(config.data)), config.columns) if config.data else "taught"
    except UserError:  # a check reports it, with the remedy
        return "taught"
