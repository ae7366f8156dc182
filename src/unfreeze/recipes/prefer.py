"""unfreeze prefer --model M --data pairs.jsonl --loss dpo: train a model to prefer one answer to another.

Rows hold two answers to one prompt (chosen, rejected), or an answer and a label (kto: prompt, completion,
label). Each answer is encoded and checked as in sft. It is compared with the starting model (free with
adapters: they are switched off). Losses: dpo, ipo, kto, simpo, orpo.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from unfreeze.config.parse import parse
from unfreeze.config.prefer import Config
from unfreeze.core.command import Common
from unfreeze.core.metrics import OF_ANSWERS
from unfreeze.job import job
from unfreeze.job.end.folder import typed
from unfreeze.job.parts import Parts
from unfreeze.job.watch.signs import Signs
from unfreeze.objectives.preference import WITHOUT_REFERENCE
from unfreeze.recipes import sft
from unfreeze.teach.compares import answers_of, compared_loss, minimised, reference_model

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.evaluate.compared import Compared
    from unfreeze.models import Decoder
    from unfreeze.objectives.preference import Objective
    from unfreeze.parallel.processes.collectives import Group


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report; return the same as sft."""
    config = parse(Config, arguments, command="prefer", description=__doc__ or "")
    return train(config, common, typed("prefer", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """Run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """Return sft's Parts with a preference loss, and the starting model as the reference."""
    settings, same = config.preference, sft.parts(config)
    second = reference_model(config)
    encoding = same.encoding.copy()
    encoding["answers"] = answers_of(settings)
    return replace(
        same,
        recipe="prefer",
        objective=cast("Objective", minimised(settings)),
        encoding=encoding,
        metrics=OF_ANSWERS,
        second=second,
        start_lines=[] if second else [f"compares: {compared_loss(settings)}, without a reference"],
        heldout=_heldout,
        on_step=(*same.on_step, Signs(0.0 if settings.loss in WITHOUT_REFERENCE else settings.beta)),
    )


def _heldout(model: Decoder, batches: Iterable[Batch], group: Group, *, objective: Objective) -> Compared:
    """Return loss, accuracy and margins of held-out pairs."""
    from unfreeze.evaluate.compared import compared

    return compared(model, batches, group, objective=objective)
