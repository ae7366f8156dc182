"""What `unfreeze prefer` minimises and compares with: its fields as an objective and a second model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from unfreeze.config.prefer import Config
from unfreeze.objectives.preference import WITHOUT_REFERENCE, preference
from unfreeze.teach.reference import AsBegun, Kind
from unfreeze.teach.second import Second

if TYPE_CHECKING:
    from unfreeze.config.prefer import Preference
    from unfreeze.core.batch import Loss
    from unfreeze.data.rows.row import Answers
    from unfreeze.objectives.preference import Objective, Reference


def reference_model(config: Config) -> Second | None:
    """The model as it began, asked in each step or once before the first; None where nothing is compared."""
    asked = config.preference
    alone = minimised(asked)

    def against(reference: Reference) -> Objective:
        return partial(alone, reference=reference)

    if asked.loss in WITHOUT_REFERENCE:
        return None
    if asked.reference == "live":
        return AsBegun(reference_of(config), against, loss=compared_loss(asked))
    from unfreeze.teach.kept import Kept  # it needs numpy

    return Kept(reference_of(config), against, loss=compared_loss(asked))


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


def compared_loss(asked: Preference) -> str:
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
