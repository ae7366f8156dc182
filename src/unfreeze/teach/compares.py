"""Convert the fields of `unfreeze prefer` to an objective and a reference model."""

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
    """Return the reference model, queried live or once before the first step; None if the loss needs none."""
    settings = config.preference
    alone = minimised(settings)

    def against(reference: Reference) -> Objective:
        return partial(alone, reference=reference)

    if settings.loss in WITHOUT_REFERENCE:
        return None
    if settings.reference == "live":
        return AsBegun(reference_of(config), against, loss=compared_loss(settings))
    from unfreeze.teach.kept import Kept  # needs numpy

    return Kept(reference_of(config), against, loss=compared_loss(settings))


def minimised(settings: Preference) -> partial[Loss]:
    """Return the loss with its settings; a reference must still be supplied if it needs one."""
    return partial(
        preference,
        kind=settings.loss,
        beta=settings.beta,
        gamma=settings.gamma,
        label_smoothing=settings.label_smoothing,
        nll=settings.nll,
        desirable_weight=settings.desirable_weight,
        undesirable_weight=settings.undesirable_weight,
    )


def answers_of(settings: Preference) -> Answers:
    """Return how rows are read: as pairs, or as labelled answers for kto."""
    return "labels" if settings.loss == "kto" else "pairs"


def compared_loss(settings: Preference) -> str:
    """Describe the loss: 'dpo, beta 0.1, nll 0.2'."""
    words = [settings.loss, f"beta {settings.beta:g}"]
    words += [f"gamma {settings.gamma:g}"] * (settings.loss == "simpo")
    words += [f"label smoothing {settings.label_smoothing:g}"] * bool(settings.label_smoothing)
    return ", ".join([*words, *[f"nll {settings.nll:g}"] * bool(settings.nll)])


def reference_of(config: Config) -> Kind:
    """Return the kind of reference; if adapters continue from others, a copy of these is kept."""
    if config.lora is None:
        return "copy"
    return "adapters" if config.adapter else "base"
