"""unfreeze distill --model M --teacher T --data F: train a model on another's next-token probabilities.

The teacher is frozen: a checkpoint, a run, an adapter's folder, "base" (the model with its adapters off), or
a folder that --prepare wrote. Both have the same tokenizer. At each supervised token the student learns the
teacher's distribution; all else is as in sft.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from unfreeze.config.distill import Config
from unfreeze.config.parse import parse
from unfreeze.core.command import Common
from unfreeze.core.metrics import OF_TEACHER
from unfreeze.job import job
from unfreeze.job.end.folder import typed
from unfreeze.job.opening.device import say
from unfreeze.job.parts import Parts
from unfreeze.job.planning.residency import refuse_answers
from unfreeze.job.source import own_answers
from unfreeze.recipes import sft
from unfreeze.teach.address import is_url, refuse_while_training
from unfreeze.teach.chosen import teacher_of
from unfreeze.teach.on_policy import OnPolicy

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.evaluate.perplexity import HeldoutLoss
    from unfreeze.models import Decoder
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.step import Objective


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report. -> what sft gives."""
    config = parse(Config, arguments, command="distill", description=__doc__ or "")
    if config.prepare:
        from unfreeze.job.asking import ask_ahead  # it needs numpy

        return ask_ahead(config, parts(config), common)
    return train(config, common, typed("distill", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """A run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """The Parts of sft, with a teacher whose probabilities are the loss; a server is for --prepare alone."""
    same = sft.parts(config)
    if is_url(config.teacher):
        refuse_while_training(config.teacher, prepare=config.prepare)
        return replace(same, recipe="distill")
    teacher = teacher_of(config)

    def start(model: str, common: Common) -> Manifest:
        manifest = same.start(model, common)
        teacher.open(say(common))
        return manifest

    made = replace(same, recipe="distill", start=start, second=teacher, metrics=OF_TEACHER)
    asked = config.distillation
    if asked.on_policy:
        on_policy = OnPolicy(asked.on_policy, asked.answer_temperature, config.seed)
        made = replace(made, source=partial(own_answers, on_policy), plan_check=refuse_answers)
    return made if asked.gamma is None else replace(made, heldout=_of_both)


def _of_both(model: Decoder, batches: Iterable[Batch], group: Group, *, objective: Objective) -> HeldoutLoss:
    """Held-out loss of student and teacher together."""
    from unfreeze.evaluate.perplexity import heldout

    return heldout(model, batches, group=group, objective=objective)
