"""unfreeze distill --model M --teacher T --data F: train a model on another's next-token probabilities.

The teacher is frozen: a checkpoint, a run, an adapter's folder, or "base", the model with its adapters off;
or a folder that --prepare wrote, with what a teacher said.
Both have the same tokenizer. At each supervised token the student's distribution is drawn to the teacher's;
everything else is as in sft: adapters or every weight, packed experts, conversations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.distill import BASE, Config
from unfreeze.config.parse import parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.job import job
from unfreeze.job.device import say
from unfreeze.job.folder import typed
from unfreeze.recipes import sft
from unfreeze.teach.client import is_url
from unfreeze.teach.inside import Inside
from unfreeze.teach.teacher import Asked, BaseAsked

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.objectives.divergence import Teacher
    from unfreeze.teach.store import Stored
    from unfreeze.train.step import Objective


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report. -> what sft gives."""
    config = parse(Config, arguments, command="distill", description=__doc__ or "")
    if config.prepare:
        from unfreeze.recipes.prepare import prepare  # it needs numpy

        return prepare(config, parts(config), common)
    return train(config, common, typed("distill", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """A run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> job.Parts:
    """The Parts of sft, with a teacher whose probabilities are the loss; a server is for --prepare alone."""
    same = sft.parts(config)
    if is_url(config.teacher):
        if not config.prepare:
            raise ConfigError(
                f"{config.teacher} is a server, which is asked once and not while training",
                next="add --prepare FOLDER; then train with --teacher FOLDER",
            )
        return replace(same, recipe="distill")
    teacher = teacher_of(config)

    def start(model: str, common: Common) -> Manifest:
        manifest = same.start(model, common)
        teacher.open(say(common))
        return manifest

    return replace(same, recipe="distill", start=start, second=teacher)


def teacher_of(config: Config) -> Asked | Stored:
    """Who is asked, or what was said."""
    from unfreeze.teach.store import Stored, is_store  # it needs numpy

    asked = config.distillation
    minimise = partial(_divergence, config)
    options: dict[str, Any] = {"temperature": asked.temperature, "beta": asked.mixture}
    if is_store(config.teacher):
        if asked.relations or asked.hidden:
            raise ConfigError(
                f"{config.teacher} is what a teacher said: --relations and --hidden compare layers",
                next="--teacher with the teacher itself, or leave them out",
            )
        return Stored(config.teacher, minimise, **options)
    if asked.relations or asked.hidden:
        given = asked.relations, asked.hidden, "mse", asked.pairs, asked.relation_heads, config.seed
        options["inside"] = Inside(*given)
    if config.teacher == BASE:
        return BaseAsked(minimise, **options)
    return Asked(config.teacher, minimise, **options)


def _divergence(config: Config, teacher: Teacher, words: int) -> Objective:
    from unfreeze.objectives.divergence import divergence

    asked = config.distillation
    options: dict[str, Any] = {"beta": asked.mixture, "temperature": asked.temperature, "alpha": asked.alpha}
    return partial(divergence, teacher=teacher, vocab=words, **options)
