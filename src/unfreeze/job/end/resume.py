"""What may differ when a run goes on: the fields of --save.allow-changed.

Some fields can't differ, whatever is allowed (docs/why/trust.md R2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from unfreeze import __version__
from unfreeze.config.names import fields, name_of, of_today, spellings
from unfreeze.config.training import DATA_FILES, TrainingConfig
from unfreeze.core.errors import ConfigError, nearest
from unfreeze.core.events import RESOLVED
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.train.run import Run

_PLACE = "the saved place in the data would be another place"
_TRAINED = "it says which tensors are trained"
_SHAPE = "it is the shape of the trained tensors"
FIXED = {
    "model": "what was trained belongs to these weights",
    "train": _TRAINED,
    "lora.rank": _SHAPE,
    "lora.experts_rank": _SHAPE,
    "lora.targets": _TRAINED,
    "seed": _PLACE,
    "training.tokens_per_step": _PLACE,
    "memory.micro_batches": _PLACE,
    "training.packing": _PLACE,
    "data.weights": _PLACE,
}
"""Field -> the reason it never changes within a run. A data file may move; other content is refused by the
cursor's fingerprint."""

_STEPS = ("schedule.steps", "schedule.warmup_steps", "schedule.decay_steps")
DERIVED = {
    "optimizer.learning_rate": ("schedule.peak",),
    "training.steps": _STEPS,
    "training.epochs": _STEPS,
    "optimizer.warmup": ("schedule.warmup_steps",),
    "optimizer.decay": ("schedule.decay_steps",),
    "optimizer.schedule": ("schedule.kind", "schedule.decay_steps"),
}
"""Field of the config -> fields of the saved schedule that follow from it; those of the saved optimizer have
the config's own names."""


def allowed(config: TrainingConfig) -> list[str]:
    """The fields of --save.allow-changed by their dotted names, and what follows from them.

    Raises ConfigError for one that is fixed, or that the config doesn't have.
    """
    known = {*fields(type(config)), *type(config).model_fields, DATA_FILES}
    names = [name_of(type(config), written) for written in config.save.allow_changed]
    for written, name in zip(config.save.allow_changed, names, strict=True):
        if name in FIXED:
            raise ConfigError(
                f"save.allow_changed names {written}, which can never change within a run: {FIXED[name]}",
                next="another folder with --out",
            )
        if name not in known:
            raise ConfigError(
                f"save.allow_changed names {written!r}, which is no field of a run's"
                f" configuration{nearest(written, spellings(type(config)))}"
            )
    return [*names, *(derived for name in names for derived in DERIVED.get(name, ()))]


def refuse_other_version(config: TrainingConfig) -> None:
    """Raise ConfigError where the folder's run has fields that this version doesn't know."""
    from unfreeze.train.run import latest, read_record

    kind, folder = type(config), config.run_dir
    known = {*fields(kind), *kind.model_fields, DATA_FILES}
    if (save := latest(folder)) is None:
        return
    saved = of_today(kind, read_record(save)["config"])
    strange = [name for name in saved if name not in known]
    if strange:
        path = folder / RESOLVED
        began: dict[str, Any] = {} if not path.is_file() else read_object(path, ConfigError)
        effective = cast(dict[str, dict[str, str]], began.get("effective") or {})
        made = effective.get("versions", {}).get("unfreeze", "")
        maker = f"unfreeze {made}" if made else "another version"
        raise ConfigError(
            f"{folder} cannot be resumed by unfreeze {__version__}: it is a run of {maker} with"
            f" {', '.join(strange)}, which this version does not have",
            next="another folder with --out" + (f", or unfreeze {made}, which began it" if made else ""),
        )


def refuse_other_base(run: Run, model: str, digest: str) -> None:
    """Refuse to go on where `model` is a name of other weights than those the run began with.

    A save of an earlier version doesn't say which.
    """
    before = (run.saved or {}).get("base")
    if before and before != digest:
        raise ConfigError(
            f"cannot resume: {model} holds other weights than those that this run began with (digest was"
            f" {before!r}, is {digest!r})",
            next="restore that model, or start a new run with another --out",
        )
