"""unfreeze init MODEL DATA: write a run.toml for this model, data and machine, with reasons.

It runs the checks of `unfreeze doctor` and trains nothing. `unfreeze sft run.toml` trains with it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.checkpoint import hub
from unfreeze.config import sft as sft_config
from unfreeze.config.columns import Columns
from unfreeze.config.parse import Files, Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about
from unfreeze.job.doctor.checks import examine
from unfreeze.job.planning.proposal import Proposal, ProposedField
from unfreeze.recipes import sft


class Config(Frozen):
    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(
        description="checkpoint folder, or Hugging Face id org/name"
    )
    data: Annotated[Files, Positional, arg(metavar="DATA")] = Field(
        min_length=1, description="data files, folders, patterns or hf:org/name, as in sft"
    )
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )
    file: Folder = Field(default="run.toml", description="file to write; an existing file is not overwritten")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Write the file. -> file, fields (key -> value), findings (the doctor's warnings), next."""
    arguments = [
        re.sub(r"^--out(?==|$)", "--file", word) for word in arguments
    ]  # the name of this flag in other commands
    config = parse(Config, arguments, command="init", description=__doc__ or "", positional=True)
    refuse_swapped(config, arguments)
    path = Path(config.file)
    if path.exists():
        raise ConfigError(
            f"{path} exists and is not overwritten", next="give another name: --file other.toml"
        )
    say = partial(print, file=sys.stderr) if not common.quiet else lambda line: None
    choices = proposal_of(config, common, say).choices()
    text = written(config, choices)
    with writing(path.parent, "file"):
        partly = path.with_name(f".{path.name}.unfinished")
        partly.write_text(text, encoding="utf-8")
        try:
            doctor_warnings = findings(str(partly))
            if path.exists():  # it has appeared in the meantime
                raise ConfigError(f"{path} exists and is not overwritten", next="--file other.toml")
            partly.replace(path)
        finally:
            partly.unlink(missing_ok=True)
    again = f"unfreeze sft {shlex.quote(str(path))}"
    if not common.quiet:
        out = sys.stderr if common.json else sys.stdout
        print(text, end="", file=out)
        for line in doctor_warnings:
            say(line)
        print(f"\nwritten: {path}\nnext: {again}", file=out)
    values = {choice.place: choice.value for choice in choices}
    return {"file": str(path), "fields": values, "findings": doctor_warnings, "next": again}


def refuse_swapped(config: Config, arguments: Sequence[str]) -> None:
    """If DATA comes before MODEL, raise ConfigError with the corrected command."""
    model = next(
        (name for name in config.data if (Path(name) / "config.json").is_file() or hub.is_id(name)), ""
    )
    if model and Path(config.model).is_file():
        rest = [word for word in arguments if word != model]
        raise ConfigError(
            f"{config.model} is a file, not a model: MODEL comes first, then DATA",
            next=shlex.join(["unfreeze", "init", model, *rest]),
        )


def proposal_of(config: Config, common: Common, say: Callable[[str], None]) -> Proposal:
    """Build the proposal from model and data, before any row is read. Missing data is refused first."""
    from unfreeze.commands.inspect import inspect
    from unfreeze.data.rows.kind import answers_in
    from unfreeze.job.end.folder import with_files
    from unfreeze.job.job import open_weights

    fields = {"model": config.model, "data": {"files": config.data, "columns": config.columns}}
    data = with_files(sft_config.Config.model_validate(fields), say).data
    manifest = open_weights(config.model, common)
    if answers_in([Path(file) for file in data.files], data.columns) == "asked":
        raise ConfigError(
            f"{config.data[0]} has prompts without answers, as unfreeze grpo takes them; init writes files"
            " for sft",
            next=f"unfreeze reward show my.py --model {config.model} --data {config.data[0]}, then unfreeze"
            " grpo; for sft name the answers: --columns completion=NAME",
        )
    parameters = inspect(str(manifest.path))["parameters"]
    return Proposal(config.model, config.data, config.columns, manifest, parameters)


def findings(file: str) -> list[str]:
    """Return the doctor's warnings for a run with this file. Raises ConfigError for a fault.

    A run folder that is already taken is only a warning: --out can name another.
    """
    examined = parse(sft_config.Config, [file], command="sft", description="")
    lines: list[str] = []
    for finding in examine(examined, sft.parts(examined), has_data=True):
        if finding.level == "fault" and finding.check != "run":
            raise ConfigError(f"{finding.check}: {finding.line}", next=finding.remedy)
        if finding.level in ("warn", "fault"):
            lines.append(f"warning: {finding.check}: {finding.line}: {finding.remedy}")
    return lines


def written(config: Config, choices: Sequence[ProposedField]) -> str:
    """Text of the file: tables of keys, each with its reason as a comment."""
    files: Any = config.data[0] if len(config.data) == 1 else list(config.data)
    renames = dict(column.split("=", 1) for column in config.columns)
    tables: dict[str, list[str]] = {"data": [f"files = {_toml(files)}"]}
    if renames:
        tables["data"].append(f"columns = {_toml(renames)}")
    for choice in choices:
        table, _, name = choice.place.rpartition(".")
        line = f"{name} = {_toml(choice.value)}"
        tables.setdefault(table, []).append(f"{line:<28}# {choice.reason}")
    lines = [
        f"# unfreeze sft {_shown(config.file)}  (made by unfreeze init; every key: unfreeze sft --help-all)",
        "# Paths are relative to the directory where you run the command.",
        f"model = {_toml(config.model)}",
    ]
    for table, keys in tables.items():
        lines += ["", f"[{table}]", *keys]
    return "\n".join(lines) + "\n"


def _shown(name: str) -> str:
    """Escape a file name so that it stays on one line of a comment."""
    return name if name.isprintable() else json.dumps(name)


def _toml(value: object) -> str:
    """Format a value as TOML. JSON's strings, numbers and lists are valid TOML, except for U+007F.

    Raises ConfigError for a name that is not UTF-8, which TOML cannot hold.
    """
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"the name {value!a} is not UTF-8: a TOML file cannot hold it", next="rename it")
    return text
