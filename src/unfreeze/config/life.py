"""Fields of `unfreeze life`: stages, one after the other, and the scores that each model gets.

# life.toml
out = "build/life"

[[stages]]
name = "tokenizer"
run = "tokenizer train texts.jsonl --vocab 1024"

[[stages]]
name = "pretrain"
run = "pretrain run.toml --tokenizer {tokenizer}"

[[scores]]
name = "right answers"
data = "questions.jsonl"
reward = "right.py"

{NAME} in a later stage is an earlier stage's result: its model folder, or its folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from unfreeze.config.parse import Folder, Frozen, read_toml
from unfreeze.core.errors import ConfigError, nearest

NAME = r"[A-Za-z][A-Za-z0-9_-]*"
_USED = re.compile(rf"\{{({NAME})\}}")
EXAMPLE = "see examples/lives/small.toml"


class Stage(Frozen):
    """One stage. It has `run`, a command of unfreeze, or `python`, a script that makes files."""

    name: str = Field(pattern=rf"^{NAME}$", description="name, and its folder in `out`")
    run: str = Field(default="", description="command without `unfreeze` and --out; {NAME}: another's result")
    python: str = Field(default="", description="script, run as `python SCRIPT FOLDER`")
    about: str = Field(default="", description="a sentence for the page")

    @property
    def words(self) -> list[str]:
        """Words of the command, with {NAME} in them."""
        try:
            return shlex.split(self.run or self.python)
        except ValueError as error:
            raise ConfigError(f"stage {self.name!r}: {error} in {self.run!r}", next=EXAMPLE) from None

    @property
    def uses(self) -> list[str]:
        """Names of the stages that this one reads, in the order of its words."""
        return list(dict.fromkeys(_USED.findall(self.run + " " + self.python)))

    @property
    def begins_at(self) -> str:
        """Name of the stage whose weights this one trains further; "" if there is none."""
        model, words = "", self.words
        for flag, value in pairwise(words):
            name, *_ = [*_USED.findall(value), ""]
            if flag == "--adapter" and name:
                return name
            model = name if flag == "--model" else model
        return model


class Score(Frozen):
    """One measure of every model: a mean reward of greedy answers, or bits per byte of a text."""

    name: str = Field(min_length=1, description="heading of its column")
    data: str = Field(default="", description="rows with questions")
    reward: str = Field(default="", description="Python file with a function reward, as for grpo")
    text: str = Field(default="", description="rows with texts: bits per byte, lower is better")
    rows: int = Field(default=200, ge=2, description="most rows")
    max_new_tokens: int = Field(default=48, ge=1, description="most tokens of an answer")


class Life(Frozen):
    """All stages and scores."""

    out: Folder = Field(description="folder with one folder for each stage, life.json and life.html")
    title: str = Field(default="", description="heading of the page")
    stages: tuple[Stage, ...] = Field(min_length=1, description="in the order in which they run")
    scores: tuple[Score, ...] = Field(default=(), description="measured after every stage that makes a model")


TABLES: dict[str, type[Frozen]] = {"stages": Stage, "scores": Score}


def read_life(path: Path, out: str = "") -> Life:
    """Read a life's file and check that it can run. out: in place of the file's.

    Raises ConfigError that names the stage and the field.
    """
    values: dict[str, Any] = {**read_toml(path), **({"out": out} if out else {})}
    try:
        life = Life.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error, values, TABLES, Life)}", next=EXAMPLE) from None
    _check(life)
    return life


def filled(text: str, results: Mapping[str, Path]) -> str:
    """Replace each {NAME} by that stage's result."""
    return _USED.sub(lambda match: str(results[match[1]]), text)


def first_fault(
    error: ValidationError, values: Mapping[str, Any], tables: Mapping[str, type[Frozen]], whole: type[Frozen]
) -> str:
    """Words for the first of pydantic's errors. tables: name of a list of tables -> their fields."""
    one = error.errors()[0]
    place = ".".join(str(part + 1) if isinstance(part, int) else part for part in one["loc"])
    if one["type"] == "extra_forbidden":
        table = tables.get(str(one["loc"][0]), whole)
        return f"there is no field {place}{nearest(str(one['loc'][-1]), table.model_fields)}"
    if one["type"] == "missing":
        return f"{place} is missing"
    return f"{place}: {one['msg']}"


def _check(life: Life) -> None:
    """Refuse stages that cannot run, before the first one does."""
    earlier: list[str] = []
    for stage in life.stages:
        if stage.name in earlier:
            raise ConfigError(f"two stages are called {stage.name!r}", next="rename one of them")
        if bool(stage.run) == bool(stage.python):
            raise ConfigError(
                f"stage {stage.name!r} needs either run or python", next='run = "sft --model M --data F"'
            )
        _refuse_unknown(stage.name, stage.uses, earlier)
        if any(word == "--out" or word.startswith("--out=") for word in stage.words):
            raise ConfigError(
                f"stage {stage.name!r} has --out; its folder is {life.out}/{stage.name}", next="drop --out"
            )
        earlier.append(stage.name)
    names = [score.name for score in life.scores]
    for score in life.scores:
        if names.count(score.name) > 1:
            raise ConfigError(f"two scores are called {score.name!r}", next="rename one of them")
        if bool(score.text) == bool(score.data) or bool(score.data) != bool(score.reward):
            raise ConfigError(
                f"score {score.name!r} needs text, or data and reward",
                next='data = "questions.jsonl" and reward = "my.py"',
            )
        used = _USED.findall(" ".join((score.text, score.data, score.reward)))
        _refuse_unknown(score.name, used, earlier)


def _refuse_unknown(who: str, used: list[str], earlier: list[str]) -> None:
    for name in used:
        if name not in earlier:
            known = f"; earlier stages: {', '.join(earlier)}" if earlier else "; no stage is before it"
            raise ConfigError(
                f"{who!r} reads {{{name}}}, which no earlier stage makes{nearest(name, earlier) or known}",
                next="name an earlier stage",
            )
