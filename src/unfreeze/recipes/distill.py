"""unfreeze distill --model M --teacher T --data F: train a model on another's next-token probabilities.

The teacher is frozen: a checkpoint, a run, an adapter's folder, "base" (the model with its adapters
disabled), or a folder that --prepare wrote. Both need the same tokenizer. At each supervised token the
student learns the teacher's distribution; everything else is as in sft.
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
from unfreeze.job.merge_aware import bytes_as_trained, compute_as_trained
from unfreeze.job.opening.device import say
from unfreeze.job.opening.source import open_as_trained
from unfreeze.job.parts import Parts
from unfreeze.job.planning.residency import refuse_answers
from unfreeze.job.source import documents_answered, own_answers
from unfreeze.recipes import sft
from unfreeze.teach.address import is_url, refuse_while_training
from unfreeze.teach.chosen import teacher_of
from unfreeze.teach.on_policy import OnPolicy
from unfreeze.teach.teacher import AsTrained

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.evaluate.perplexity import HeldoutLoss
    from unfreeze.models import Decoder
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.step import Objective


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report; return the same as sft."""
    config = parse(Config, arguments, command="distill", description=__doc__ or "")
    if config.prepare:
        from unfreeze.job.asking import ask_ahead  # needs numpy

        return ask_ahead(config, parts(config), common)
    return train(config, common, typed("distill", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """Run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """Return sft's Parts with a teacher, whose probabilities are the loss; servers only with --prepare."""
    same = sft.parts(config)
    if is_url(config.teacher):
        refuse_while_training(config.teacher, prepare=config.prepare)
        return replace(same, recipe="distill")
    teacher = teacher_of(config, AsTrained(open_as_trained, compute_as_trained, bytes_as_trained))

    def start(model: str, common: Common) -> Manifest:
        manifest = same.start(model, common)
        teacher.open(say(common))
        return manifest

    result = replace(same, recipe="distill", start=start, second=teacher, metrics=OF_TEACHER)
    settings = config.distillation
    if settings.on_policy:
        on_policy = OnPolicy(settings.on_policy, settings.answer_temperature, config.seed)
        result = replace(
            result,
            source=partial(own_answers, on_policy),
            answers=documents_answered,
            plan_check=refuse_answers,
        )
    return result if settings.gamma is None else replace(result, heldout=_of_both)


def _of_both(model: Decoder, batches: Iterable[Batch], group: Group, *, objective: Objective) -> HeldoutLoss:
    """Return the held-out loss of student and teacher together."""
    from unfreeze.evaluate.perplexity import heldout

    return heldout(model, batches, group=group, objective=objective)
