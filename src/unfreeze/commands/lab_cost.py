"""FLOPs, parameters and steps of an arm, counted from its command on "meta", before anything runs.

FLOP of training one token of a document of L tokens (parallel/plan/counts.py):

    f = 2 · a + p(L)          forward: a weights that the token is multiplied with, head included, each
                              routed expert that it goes through; p attention's scores and sums
    3 f                       every weight trains: backward multiplies twice as much as forward
    2 f                       adapters train: only the gradients of activations

Not counted: norms, activations, softmax, the optimizer, adapters, and held-out rows. L is sequence_length, so
shorter documents cost less attention than is counted, in every arm alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from unfreeze.config.parse import parse
from unfreeze.config.recipes import CONFIGS
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from unfreeze.commands.recipe import Recipe

COUNTED = ("pretrain", "sft")
"""Commands whose FLOPs are counted; the others also use a second model, or answers of their own."""
WITHIN = 0.05
"""Largest difference of what is held equal, as a share of the first arm's."""


@dataclass(frozen=True)
class Cost:
    """Cost of an arm's command.

    per_token        FLOP of training on a token; None: not counted
    active, total    parameters of one token, and all; None: not counted
    tokens_per_step  tokens of an optimizer step
    steps            of the command; None if it counts epochs
    """

    per_token: float | None
    active: int | None
    total: int | None
    tokens_per_step: int
    steps: int | None

    @property
    def tokens(self) -> int | None:
        """Tokens of a run; None if it counts epochs."""
        return None if self.steps is None else self.tokens_per_step * self.steps

    @property
    def per_step(self) -> float | None:
        return None if self.per_token is None else self.per_token * self.tokens_per_step


def cost_of(words: list[str], arm: str) -> Cost:
    """Count the command `words` of an arm. Raises ConfigError for a command that trains nothing."""
    from unfreeze.commands.opened import open_for_plan
    from unfreeze.commands.plan import Config as PlanConfig

    recipe = words[0]
    if recipe not in CONFIGS:
        raise ConfigError(
            f"arm {arm!r}: {recipe!r} is no command of a study{nearest(recipe, CONFIGS)}",
            next=f"one of {', '.join(CONFIGS)}, or python = a script",
        )
    config = parse(CONFIGS[recipe], words[1:], command=recipe, description="", say=lambda renamed: None)
    steps, tokens = config.training.steps, config.training.tokens_per_step
    if recipe not in COUNTED:
        return Cost(None, None, None, tokens, steps)
    parts = cast("Recipe", import_module(f"unfreeze.recipes.{recipe}")).parts(config)
    new = parts.start(config.model, Common(quiet=True)) if parts.new else None
    opened = open_for_plan(PlanConfig(model=config.model, rope=config.rope), new)
    model, counts = opened.model(_float32(), None, "cpu")
    counted = opened.parameters
    length = min(config.data.sequence_length, model.shape.max_positions)
    forward = 2 * counts.active + counts.pairs(length)
    passes = 3 if getattr(config, "train", "all") == "all" else 2
    return Cost(passes * forward, counted.active, counted.total, tokens, steps)


def _float32() -> Any:
    import torch

    return torch.float32


def equal_steps(costs: dict[str, Cost], steps: int) -> dict[str, int]:
    """Steps of each arm that cost as many FLOPs as the first arm's `steps`, to the nearest step."""
    budget = steps * _counted(next(iter(costs.values())), next(iter(costs)))
    return {name: max(1, round(budget / _counted(cost, name))) for name, cost in costs.items()}


def _counted(cost: Cost, arm: str) -> float:
    if cost.per_step is None:
        raise ConfigError(
            f"arm {arm!r}: FLOPs are counted for {' and '.join(COUNTED)} only", next='equal = "none"'
        )
    return cost.per_step


def refuse_unequal(what: str, values: dict[str, float | None]) -> None:
    """Raise ConfigError that names the first arm whose value is not that of the first one, within 5 %."""
    first, *others = values
    for arm in (first, *others):
        value, of_first = values[arm], values[first]
        if value is None or of_first is None:
            raise ConfigError(f"arm {arm!r}: its {what} are not counted", next='equal = "none"')
        if abs(value - of_first) > WITHIN * of_first:
            raise ConfigError(
                f"arm {arm!r} has {value:,.0f} {what}, {first!r} {of_first:,.0f}: more than"
                f" {WITHIN:.0%} apart",
                next='change its sizes, or equal = "none"',
            )
