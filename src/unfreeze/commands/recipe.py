"""Infer the recipe of a run's TOML file from its keys; the file does not name it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import BaseModel

from unfreeze.config.names import earlier, spellings
from unfreeze.config.parse import read_toml
from unfreeze.config.recipes import CONFIGS
from unfreeze.config.training import TrainingConfig
from unfreeze.job.parts import Parts

RECIPES = ("sft", "prefer", "distill", "grpo", "pretrain")


class Recipe(Protocol):
    """A module of recipes/. All but pretrain have the fields of sft and their own."""

    Config: type[TrainingConfig]

    def parts(self, config: Any) -> Parts: ...


def recipe_of(file: str | Path) -> tuple[str, Recipe]:
    """Return the recipe that knows most of the file's keys; on a tie, the first of RECIPES.

    So a file with `teacher` is for distill, one with `loss` for prefer, and one with `reward` for grpo. A
    prefer or pretrain file without a key of its own is taken for sft.
    """
    table = read_toml(Path(file).expanduser())
    name = max(RECIPES, key=lambda recipe: _known(CONFIGS[recipe], table))
    return name, cast(Recipe, import_module(f"unfreeze.recipes.{name}"))


def _known(config: type[BaseModel], table: Mapping[str, Any]) -> int:
    """Number of the keys that this config has, in any spelling."""
    known = {*spellings(config), *earlier(config)}
    written = (
        f"{key}.{inner}" if isinstance(value, Mapping) else key
        for key, value in table.items()
        for inner in (cast(Mapping[str, Any], value) if isinstance(value, Mapping) else [key])
    )
    return sum(name.replace("-", "_") in known for name in written)
