"""Fields of `unfreeze lab`: a question, arms that differ in flags, seeds, and what is held equal.

# lab.toml
question = "Does a wider model learn more at equal FLOPs?"
out = "runs/lab/wide"
run = "pretrain base.toml"

[[arms]]
name = "narrow"
flags = "--shape.hidden-size 64"

[[arms]]
name = "wide"
flags = "--shape.hidden-size 128"
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from unfreeze.config.life import NAME, first_fault
from unfreeze.config.parse import Folder, Frozen, read_toml
from unfreeze.core.errors import ConfigError

LEAST_SEEDS = 3
"""With two seeds Student's t is 12.7 standard errors: such an interval says nothing."""
EXAMPLE = "see examples/lab/coe.toml"
OWN = ("--out", "--seed")
"""Flags that the laboratory gives itself."""
STEPS, RATE = ("--steps", "--training.steps"), ("--learning-rate", "--optimizer.learning-rate")
UNITS = {"loss": "nats", "lowest_loss": "nats", "train_loss": "nats", "bits_per_byte": "bits per byte"}

Texts = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


class Arm(Frozen):
    """One of the things that are compared."""

    name: str = Field(pattern=rf"^{NAME}$", description="name, and its folder in `out`")
    flags: str = Field(default="", description="words after those of `run` or `python`")
    run: str = Field(default="", description="a command of its own, in place of the study's")
    about: str = Field(default="", description="a sentence for the page")


class Lab(Frozen):
    """A study: every arm with every seed."""

    question: str = Field(min_length=1, description="heading of the page")
    expected: str = Field(default="", description="the answer expected beforehand; shown beside the answer")
    out: Folder = Field(description="folder with a folder for each run, lab.json and lab.html")
    seeds: int = Field(
        default=LEAST_SEEDS,
        ge=LEAST_SEEDS,
        le=1000,
        strict=True,
        description="seeds 0, 1, 2 … of every arm; 3 or more",
    )
    prepare: Texts = Field(
        default=(), description="commands that make data, once: python SCRIPT …, or a command"
    )
    makes: Texts = Field(default=(), description="what they make; if all is there, they do not run")
    run: str = Field(default="", description="a training command without --seed and --out")
    python: str = Field(default="", description="script, run as python SCRIPT … --seed S --out FOLDER")
    value: str = Field(default="loss", description="measure of the last validation; of a script: its name")
    curve: str = Field(default="", description="measure of the curves, if it is not the value")
    across: str = Field(default="", description="x of the curves, if it is not the step")
    unit: str = Field(default="", description="unit of the value; of a loss: nats")
    better: Literal["lower", "higher"] = Field(default="lower", description="the better value")
    equal: Literal["flops", "active", "none"] = Field(
        default="flops", description="flops: steps are set so; active: arms are checked to have equal ones"
    )
    learning_rates: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(), description="tried for each arm on a seed of its own; the best is used"
    )
    tuning_steps: int | None = Field(
        default=None, ge=1, description="steps of the first arm while rates are tried; default: all"
    )
    arms: tuple[Arm, ...] = Field(min_length=2, description="the others are compared with the first")

    def words(self, arm: Arm) -> list[str]:
        """Words of an arm's command, without `unfreeze`: "pretrain …", or "python SCRIPT …"."""
        base = arm.run or self.run
        whose = f"arm {arm.name!r}"
        return _split(base or f"python {self.python}", whose) + _split(arm.flags, whose)

    @property
    def measured_in(self) -> str:
        return self.unit or UNITS.get(self.value, "")


def read_lab(path: Path, out: str = "") -> Lab:
    """Read a study's file and check that it can run. out: in place of the file's.

    Raises ConfigError that names the arm and the field.
    """
    values: dict[str, Any] = {**read_toml(path), **({"out": out} if out else {})}
    if isinstance(values.get("seeds"), int) and values["seeds"] < LEAST_SEEDS:
        raise ConfigError(
            f"seeds is {values['seeds']}: fewer than {LEAST_SEEDS} runs of an arm give no interval",
            next=f"seeds = {LEAST_SEEDS}",
        )
    try:
        lab = Lab.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_fault(error, values, {'arms': Arm}, Lab)}", next=EXAMPLE) from None
    _check(lab)
    return lab


def _split(text: str, whose: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{whose}: {error} in {text!r}", next=EXAMPLE) from None


def has(words: list[str], names: tuple[str, ...]) -> str:
    """Return the first of the words that is one of these flags, or ""."""
    return next((word for word in words if word.partition("=")[0].replace("_", "-") in names), "")


def _check(lab: Lab) -> None:
    """Refuse arms that cannot be compared, before the first run."""
    if bool(lab.run) == bool(lab.python):
        raise ConfigError("a study needs either run or python", next='run = "pretrain base.toml"')
    words: dict[str, list[str]] = {}
    for number, arm in enumerate(lab.arms):
        if arm.name in words:
            raise ConfigError(f"two arms are called {arm.name!r}", next="rename one of them")
        own = lab.words(arm)
        if len(own) < 2:
            raise ConfigError(f"arm {arm.name!r} has no command: {shlex.join(own)!r}", next=EXAMPLE)
        if flag := has(own, OWN):
            raise ConfigError(f"arm {arm.name!r} has {flag}, which the study gives", next=f"drop {flag}")
        if number and lab.equal == "flops" and lab.run and (flag := has(shlex.split(arm.flags), STEPS)):
            raise ConfigError(
                f"arm {arm.name!r} has {flag}, but equal = flops sets its steps",
                next=f'drop {flag}, or equal = "none"',
            )
        if lab.learning_rates and (flag := has(own, RATE)):
            raise ConfigError(
                f"arm {arm.name!r} has {flag}, and learning_rates are tried", next="drop one of them"
            )
        if twin := next((name for name, of in words.items() if of == own), None):
            raise ConfigError(f"arms {twin!r} and {arm.name!r} do not differ", next="give one of them flags")
        words[arm.name] = own
    rates = lab.learning_rates
    different = {f"{rate:g}" for rate in rates}  # as flags and names of runs have them
    if len(rates) == 1 or len(different) < len(rates) or not all(map(math.isfinite, rates)):
        raise ConfigError(
            f"learning_rates has {len(different)} different rates of {len(rates)}; two or more are tried",
            next="learning_rates = [1e-3, 2e-3, 4e-3]",
        )
    if lab.tuning_steps is not None and (lab.python or not rates):
        raise ConfigError(
            "tuning_steps has no effect without run and learning_rates", next="leave tuning_steps out"
        )
    for command in lab.prepare:
        if not _split(command, "prepare"):
            raise ConfigError("prepare has a command without words", next=EXAMPLE)
    if bool(lab.prepare) != bool(lab.makes):
        raise ConfigError("prepare and makes go together", next='makes = "build/lab/texts"')
