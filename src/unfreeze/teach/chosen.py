"""Convert the fields of `unfreeze distill` to a second model and an objective."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.distill import BASE, Config
from unfreeze.core.errors import ConfigError
from unfreeze.teach.inside import Inside
from unfreeze.teach.teacher import Asked, AsTrained, BaseAsked

if TYPE_CHECKING:
    from unfreeze.objectives.divergence import Teacher
    from unfreeze.teach.second import Objective
    from unfreeze.teach.store import Stored


def teacher_of(config: Config, as_trained: AsTrained | None = None) -> Asked | Stored:
    """Return the teacher: a model to query, or stored outputs. as_trained: see `Asked`."""
    from unfreeze.teach.store import Stored, is_store  # needs numpy

    settings = config.distillation
    minimise = partial(_divergence, config)
    options: dict[str, Any] = {
        "temperature": settings.temperature,
        "beta": settings.mixture,
        "loss": settings.words,
    }
    if is_store(config.teacher):
        if settings.relations or settings.hidden:
            raise ConfigError(
                f"{config.teacher} holds a teacher's outputs, but --distillation.relations and"
                " --distillation.hidden compare layers",
                next="--teacher with the teacher itself, or remove them",
            )
        needs = "on_policy" if settings.on_policy else "gamma" if settings.gamma is not None else ""
        if needs:
            raise ConfigError(
                f"{config.teacher} holds a teacher's outputs for the data, but {needs} needs other tokens",
                next="--teacher with the teacher itself, or remove it",
            )
        return Stored(config.teacher, minimise, **options)
    if settings.relations or settings.hidden:
        inside_options = (
            settings.relations,
            settings.hidden,
            "mse",
            settings.pairs,
            settings.relation_heads,
            config.seed,
        )
        options["inside"] = Inside(*inside_options)
    if config.teacher == BASE:
        return BaseAsked(minimise, **options)
    return Asked(config.teacher, minimise, shares=config.lora is not None, as_trained=as_trained, **options)


def _divergence(config: Config, teacher: Teacher, words: int) -> Objective:
    from unfreeze.objectives.divergence import divergence

    settings = config.distillation
    if settings.gamma is not None:
        from unfreeze.teach.inside import corrector

        return partial(corrector, teacher=teacher, vocab=words, gamma=settings.gamma)
    options: dict[str, Any] = {
        "beta": settings.mixture,
        "temperature": settings.temperature,
        "alpha": settings.alpha,
    }
    return partial(divergence, teacher=teacher, vocab=words, **options)
