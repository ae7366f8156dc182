"""Who teaches, and what is minimised: the fields of `unfreeze distill` as a second model and an objective."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.distill import BASE, Config
from unfreeze.core.errors import ConfigError
from unfreeze.teach.inside import Inside
from unfreeze.teach.teacher import Asked, BaseAsked

if TYPE_CHECKING:
    from unfreeze.objectives.divergence import Teacher
    from unfreeze.teach.second import Objective
    from unfreeze.teach.store import Stored


def teacher_of(config: Config) -> Asked | Stored:
    """Who is asked, or what was said."""
    from unfreeze.teach.store import Stored, is_store  # it needs numpy

    asked = config.distillation
    minimise = partial(_divergence, config)
    options: dict[str, Any] = {"temperature": asked.temperature, "beta": asked.mixture, "loss": asked.words}
    if is_store(config.teacher):
        if asked.relations or asked.hidden:
            raise ConfigError(
                f"{config.teacher} is what a teacher said: --distillation.relations and --distillation.hidden"
                " compare layers",
                next="--teacher with the teacher itself, or leave them out",
            )
        needs = "on_policy" if asked.on_policy else "gamma" if asked.gamma is not None else ""
        if needs:
            raise ConfigError(
                f"{config.teacher} is what a teacher said of the data, and {needs} asks about more words",
                next="--teacher with the teacher itself, or leave it out",
            )
        return Stored(config.teacher, minimise, **options)
    if asked.relations or asked.hidden:
        given = asked.relations, asked.hidden, "mse", asked.pairs, asked.relation_heads, config.seed
        options["inside"] = Inside(*given)
    if config.teacher == BASE:
        return BaseAsked(minimise, **options)
    return Asked(config.teacher, minimise, shares=config.lora is not None, **options)


def _divergence(config: Config, teacher: Teacher, words: int) -> Objective:
    from unfreeze.objectives.divergence import divergence

    asked = config.distillation
    if asked.gamma is not None:
        from unfreeze.teach.inside import corrector

        return partial(corrector, teacher=teacher, vocab=words, gamma=asked.gamma)
    options: dict[str, Any] = {"beta": asked.mixture, "temperature": asked.temperature, "alpha": asked.alpha}
    return partial(divergence, teacher=teacher, vocab=words, **options)
