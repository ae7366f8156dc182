"""unfreeze advise --params 26e6 --tokens 1e9: learning rate, batch and time for pretraining.

By published laws (train/step_law.py): Step Law for the learning rate and the tokens per step, Chinchilla for
the number of tokens. The sizes can also come from a run's TOML file or a model's folder: unfreeze advise
run.toml. Outside the range in which Step Law was fitted, it says so.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import Field

from unfreeze.config.parse import Folder, Frozen, ModelName, is_model, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about
from unfreeze.core.units import format_count, format_seconds
from unfreeze.tracking.console import PipeConsole

if TYPE_CHECKING:
    from unfreeze.commands.opened import Opened
    from unfreeze.commands.plan import Config as PlanConfig
    from unfreeze.models.from_shape import Parameters
    from unfreeze.train.step_law import Advice

SHARE = 0.4
"""Share of a GPU's peak matrix rate that a whole training step reaches, if only --params is known. A model or
a run's file is planned instead."""


class Config(Frozen):
    """Options of advise."""

    model: ModelName = Field(
        default="",
        description="instead of params: a model's folder, id or config.json",
        json_schema_extra=about("Model and data", first=True),
    )
    params: float | None = Field(
        default=None,
        gt=0,
        description="parameters without embeddings, such as 26e6",
        json_schema_extra=about("Model and data", first=True),
    )
    tokens: float | None = Field(
        default=None,
        gt=0,
        description="training tokens, such as 1e9; default: those of the run's file, else 20 per parameter",
        json_schema_extra=about("Model and data", first=True),
    )
    hardware: tuple[str, ...] = Field(
        default=(),
        description="8xH200, 1xH100 …, one or several; default: this machine",
        json_schema_extra=about("Hardware", first=True),
    )
    machines: Folder = Field(
        default="", description="TOML table of devices of your own", json_schema_extra=about("Hardware")
    )
    usd_per_hour: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="price per hour of all the hardware; unset: no costs",
        json_schema_extra=about("Hardware", first=True),
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Return the fields of Advice, chinchilla_tokens, steps, and the time on each machine."""
    from unfreeze.train.step_law import PER_PARAMETER, advise

    file = arguments[0] if arguments and arguments[0].endswith(".toml") else ""
    if arguments and not file and not arguments[0].startswith("-"):
        if not (is_model(arguments[0]) or arguments[0].endswith(".json")):
            raise ConfigError(
                f"{arguments[0]} is neither a run's TOML file nor a model",
                next="unfreeze advise --params 26e6 --tokens 1e9",
            )
        arguments = ["--model", *arguments]
    config = parse(Config, arguments[bool(file) :], command="advise", description=__doc__ or "")
    if sum(map(bool, (file, config.model, config.params))) != 1:
        raise ConfigError(
            "advise needs the size of one model",
            next="unfreeze advise --params 26e6, or give a run's TOML file",
        )
    plan, opened, of_run = _planned(file, config, common) if not config.params else (None, None, None)
    counted = opened.parameters if opened else None
    parameters = float(counted.without_embeddings) if counted else float(config.params or 0)
    advice = advise(parameters, config.tokens or of_run or PER_PARAMETER * parameters)
    times = _times(config, plan, opened, advice, counted)
    if not common.quiet:
        console = PipeConsole(stderr=common.json, highlight=False, markup=False, emoji=False, soft_wrap=True)
        console.print("\n".join(_lines(config, advice, counted, times)))
    laws = {"chinchilla_tokens": advice.chinchilla, "steps": advice.steps, "times": times}
    return {**asdict(advice), "outside": list(advice.outside), **laws}


def _planned(file: str, config: Config, common: Common) -> tuple[PlanConfig, Opened, float | None]:
    """Return (config of a plan of every weight, the model, tokens of the run's file if it has steps)."""
    from unfreeze.commands.opened import open_for_plan
    from unfreeze.commands.plan import configured

    plan, parts = configured([file] if file else ["--model", config.model])
    new = parts.start(plan.model, common) if parts is not None and parts.new else None
    plan = plan.model_copy(update={"train": "all"})
    opened = open_for_plan(plan, new)
    if opened.start.is_packed():
        raise ConfigError(f"{plan.model} is packed; gradients cannot train it whole", next="give --params")
    steps = _steps_of(file) if file else None
    return plan, opened, steps * plan.tokens_per_step if steps and plan.tokens_per_step else None


def _steps_of(file: str) -> int | None:
    from unfreeze.commands.recipe import recipe_of
    from unfreeze.config.parse import from_keywords

    _, recipe = recipe_of(file)
    return from_keywords(recipe.Config, {}, function="advise", file=file).training.steps


def _times(
    config: Config, plan: PlanConfig | None, opened: Opened | None, advice: Advice, counted: Parameters | None
) -> list[dict[str, Any]]:
    """Time of all tokens on each machine: by the model's plan, else by 6 N D; None if neither is known."""
    from unfreeze.commands.plan import HERE, fleet_of, plan_on

    rows: list[dict[str, Any]] = []
    for words in config.hardware or (HERE,):
        fleet, rate, source = fleet_of(words, config.machines), None, ""
        if plan is not None and opened is not None:
            planned = plan_on(plan, fleet, opened)
            rate, source = planned.choice.tokens_per_second if planned.fits else None, "planned"
        elif fleet.device is not None:
            rate = SHARE * fleet.count * fleet.device.matrix * 1e12 / (6 * advice.parameters)
            source = f"6 N D at {SHARE:.0%} of the data sheet's rate"
        seconds = advice.tokens / rate if rate else None
        price = config.usd_per_hour
        usd = seconds / 3600 * price if seconds and price else None
        rows.append({"hardware": fleet.name, "seconds": seconds, "source": source, "usd": usd})
    return rows


def _lines(
    config: Config, advice: Advice, counted: Parameters | None, times: list[dict[str, Any]]
) -> list[str]:
    """Lines for the terminal."""
    what = counted.words() if counted else f"{format_count(advice.parameters)} parameters without embeddings"
    per = advice.tokens / advice.parameters
    rows = [
        f"{what}, {format_count(advice.tokens)} tokens",
        f"  learning rate   {advice.learning_rate:.3g}",
        f"  tokens per step {advice.tokens_per_step:,.0f} (about {format_count(advice.tokens_per_step)});"
        f" {advice.steps:,} steps",
        "  both by Step Law, arXiv:2503.04715: AdamW, cosine",
        *(
            f"  {sentence}: an extrapolation; try a third and three times of it"
            for sentence in advice.outside
        ),
        f"  {per:,.3g} tokens per parameter; Chinchilla's 20 would be {format_count(advice.chinchilla)}",
    ]
    for row in times:
        if row["seconds"] is None:
            rows.append(f"  time on {row['hardware']}: unknown; a run forecasts it after 50 steps")
        else:
            usd = f", {row['usd']:,.2f} USD" if row["usd"] is not None else ""
            rows.append(
                f"  time on {row['hardware']}: {format_seconds(row['seconds'])}{usd} ({row['source']})"
            )
    flags = f"--learning-rate {advice.learning_rate:.2g} --tokens-per-step {round(advice.tokens_per_step)}"
    return [*rows, f"  as flags: {flags} --steps {advice.steps}"]
