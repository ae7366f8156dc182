"""Check a life's stages before the first one runs, and hash what each of them reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path

from pydantic import BaseModel

from unfreeze.commands.reads import files_of
from unfreeze.commands.staged import digest
from unfreeze.config.life import USED, Life, Stage, filled
from unfreeze.config.parse import check_flags, parse
from unfreeze.config.recipes import CONFIGS
from unfreeze.core.errors import ConfigError, nearest

SCORED = ("pretrain", "sft", "distill", "prefer", "grpo", "upcycle", "merge")
"""Commands that leave a model."""
COMMANDS = ("tokenizer", "data", *SCORED)
SUBCOMMANDS = {"tokenizer": "train", "data": "clean"}
"""Word after a command of several, of which a life takes the one that makes a folder."""
OTHERS = {
    "tokenizer": "unfreeze.commands.tokenizer",
    "data": "unfreeze.commands.data_clean",
    "upcycle": "unfreeze.commands.upcycle",
    "merge": "unfreeze.commands.merge",
}
"""Commands whose first words are not a TOML file -> module with their Config."""
PROGRAM = {"--json", "--quiet", "--traceback", "--plan"}
"""Flags of every command, which the program reads before the command does."""


def check_stages(life: Life, results: Mapping[str, Path]) -> None:
    """Refuse a stage that cannot run, before the first runs: its command, files, flags and their values.

    results: model or folder that each stage leaves. Raises ConfigError that names the stage.
    """
    for stage in life.stages:
        words = stage.words
        if stage.python and not Path(words[0]).is_file():
            raise ConfigError(f"stage {stage.name!r}: there is no file {words[0]}", next="correct python")
        if stage.run:
            _check_command(stage)
            _check_flags(stage, Path(life.out) / stage.name, results)
    for score in life.scores:
        for file in (score.text, score.data, score.reward.partition(":")[0]):
            if file and "{" not in file and not Path(file).is_file():
                raise ConfigError(f"score {score.name!r}: there is no file {file}", next="correct the path")


def _check_command(stage: Stage) -> None:
    command, *rest = stage.words
    if command not in COMMANDS:
        raise ConfigError(
            f"stage {stage.name!r}: {command!r} is no command of a life{nearest(command, COMMANDS)}",
            next=f"one of {', '.join(COMMANDS)}",
        )
    second = SUBCOMMANDS.get(command)
    if second and rest[:1] != [second]:
        raise ConfigError(
            f"stage {stage.name!r}: {' '.join([command, *rest[:1]])} makes no folder",
            next=f'run = "{command} {second} …"',
        )


def _check_flags(stage: Stage, folder: Path, results: Mapping[str, Path]) -> None:
    """Read the stage's words by its command's own parser, as the command will."""
    config, start, positional = _config_of(stage.words)
    words = [word for word in with_out(stage.words, folder)[start:] if word not in PROGRAM]
    if {"-h", "--help", "--help-all"} & set(words):
        raise ConfigError(f"stage {stage.name!r} asks for help", next="drop --help")
    if any(word.partition("=")[0] == "--sweep" for word in words):
        return  # several runs, read by another parser when the stage begins
    command, with_paths = " ".join(stage.words[:start]), [filled(word, results) for word in words]
    try:
        if not positional and _reads_a_result(words):
            flags = with_paths if words[0].startswith("-") else with_paths[1:]
            check_flags(config, flags, command)
        else:
            parse(config, with_paths, command=command, description="", positional=positional, say=_nothing)
    except ConfigError as error:
        raise ConfigError(f"stage {stage.name!r}: {error.message}", next=error.next) from None


def _config_of(words: Sequence[str]) -> tuple[type[BaseModel], int, bool]:
    """Return Config of a command, the number of its own words, and whether other words than flags follow."""
    if words[0] in CONFIGS:
        return CONFIGS[words[0]], 1, False
    module = import_module(OTHERS[words[0]])
    return module.Config, 1 + (words[0] in SUBCOMMANDS), True


def _nothing(renamed: Sequence[str]) -> None:
    """Names of earlier versions are noted when the stage runs."""


def _reads_a_result(words: Sequence[str]) -> bool:
    """True if parsing would open what an earlier stage makes: a TOML file, an adapter's settings."""
    files = () if words[0].startswith("-") else words[:1]
    adapters = [word for word in words if word.startswith("--adapter=")]
    adapters += [value for flag, value in pairwise(words) if flag == "--adapter"]
    return any(USED.search(word) for word in (*files, *adapters))


def with_out(words: Sequence[str], folder: Path) -> list[str]:
    """Add a stage's folder to its command: --out FOLDER; of data clean, the last name before the flags."""
    if words[0] != "data":
        return [*words, "--out", str(folder)]
    names = list(takewhile(lambda word: not word.startswith("--"), words))
    return [*names, str(folder), *words[len(names) :]]


def keys_of(life: Life) -> dict[str, str]:
    """Hash of each stage's command, of the files that it reads, and of the stages that it reads."""
    keys: dict[str, str] = {}
    for stage in life.stages:
        texts = (stage.run, stage.python, *(keys[name] for name in stage.uses))
        keys[stage.name] = digest(texts, [str(file) for file in files_of(stage.words)])
    return keys
