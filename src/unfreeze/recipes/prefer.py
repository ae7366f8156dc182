"""unfreeze prefer --model M --data pairs.jsonl --loss dpo: train a model to prefer one answer to another.

Rows hold two answers to one prompt (chosen, rejected), or an answer and a label (kto: prompt, completion,
label). Each answer is encoded and checked as in sft. It is compared with the starting model (free with
adapters: they are switched off). Losses: dpo, ipo, kto, simpo, orpo.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from unfreeze.config.parse import parse
from unfreeze.config.prefer import Config
from unfreeze.core.command import Common
from unfreeze.core.metrics import OF_ANSWERS
from unfreeze.job import job
from unfreeze.job.end.folder import typed
from unfreeze.job.parts import Parts
from unfreeze.job.watch.signs import Signs
from unfreeze.objectives.preference import WITHOUT_REFERENCE, preference
from unfreeze.recipes import sft
from unfreeze.teach.reference import AsBegun, Kind

if TYPE_CHECKING:
    from unfreeze.config.prefer import Preference
    from unfreeze.core.batch import Batch, Loss
    from unfreeze.data.rows.row import Answers
    from unfreeze.evaluate.compared import Compared
    from unfreeze.models import Decoder
    from unfreeze.objectives.preference import Objective, Reference
    from unfreeze.parallel.processes.collectives import Group


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report. -> what sft gives."""
    config = parse(Config, arguments, command="prefer", description=__doc__ or "")
    return train(config, common, typed("prefer", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """A run in the config's folder; see job.run."""
    return job.run(config, parts(config), common, command)


def parts(config: Config) -> Parts:
    """The Parts of sft with a loss over answers, and the model as it began as the reference."""
    asked, same = config.preference, sft.parts(config)
    alone = minimised(asked)

    def against(reference: Reference) -> Objective:
        return partial(alone, reference=reference)

    if asked.loss in WITHOUT_REFERENCE:
        second = None
    elif asked.reference == "live":
        second = AsBegun(reference_of(config), against, loss=loss_of(asked))
    else:
        from unfreeze.teach.kept import Kept  # it needs numpy

        second = Kept(reference_of(config), against, loss=loss_of(asked))
    encoding = same.encoding.copy()
    encoding["answers"] = answers_of(asked)
    return replace(
        same,
        recipe="prefer",
        objective=cast("Objective", alone),
        encoding=encoding,
        metrics=OF_ANSWERS,
        second=second,
        said=[] if second else [f"compares: {loss_of(asked)}, without a reference"],
        heldout=_heldout,
        on_step=(Signs(0.0 if asked.loss in WITHOUT_REFERENCE else asked.beta),),
    )


def _heldout(model: Decoder, batches: Iterable[Batch], group: Group, *, objective: Objective) -> Compared:
    """Loss, accuracy and margins of held-out pairs."""
    from unfreeze.evaluate.compared import compared

    return compared(model, batches, group, objective=objective)


def minimised(asked: Preference) -> partial[Loss]:
    """The loss with its settings; a reference is still to be given where it needs one."""
    return partial(
        preference,
        kind=asked.loss,
        beta=asked.beta,
        gamma=asked.gamma,
        label_smoothing=asked.label_smoothing,
        nll=asked.nll,
        desirable_weight=asked.desirable_weight,
        undesirable_weight=asked.undesirable_weight,
    )


def answers_of(asked: Preference) -> Answers:
    """How rows are read: as pairs, of kto as answers with a label."""
    return "labels" if asked.loss == "kto" else "pairs"


def loss_of(asked: Preference) -> str:
    """What is minimised, in words: 'dpo, beta 0.1, nll 0.2'."""
    words = [asked.loss, f"beta {asked.beta:g}"]
    words += [f"gamma {asked.gamma:g}"] * (asked.loss == "simpo")
    words += [f"label smoothing {asked.label_smoothing:g}"] * bool(asked.label_smoothing)
    return ", ".join([*words, *[f"nll {asked.nll:g}"] * bool(asked.nll)])


def reference_of(config: Config) -> Kind:
    """The model as it began: also where adapters go on from others, of which a copy is kept."""
    if config.lora is None:
        return "copy"
    return "adapters" if config.adapter else "base"
