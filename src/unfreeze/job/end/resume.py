"""Fields that may change when a run is resumed (--save.allow-changed).

Some fields can never change (docs/why/trust.md R2).
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

_PLACE = "the saved position in the data would be wrong"
_TRAINED = "it decides which tensors are trained"
_SHAPE = "it decides the shape of the trained tensors"
FIXED = {
    "model": "the trained adapter or weights belong to this model",
    "train": _TRAINED,
    "quantize": "the trained adapter belongs to the base as it is packed",
    "quantize_modules": "the trained adapter belongs to the base as it is packed",
    "lora.rank": _SHAPE,
    "lora.experts_rank": _SHAPE,
    "lora.targets": _TRAINED,
    "lora.dora": _TRAINED,
    "lora.start": "the adapters are measured from their start",
    "seed": _PLACE,
    "training.tokens_per_step": _PLACE,
    "memory.micro_batches": _PLACE,
    "training.packing": _PLACE,
    "data.weights": _PLACE,
    "data.validation_fraction": "rows that it trained on would be held out",
    "reward": "rewards of another function cannot be compared with those before",
    "rollout.updates": "the loss and the number of steps depend on it",
    "rollout.curriculum": "the saved records of prompts are another curriculum's",
    "agent": "rewards of another agent cannot be compared with those before",
    "env": "rewards of another environment cannot be compared with those before",
    "rollout.prompts_per_step": _PLACE,
    "rollout.answers": _PLACE,
    "rollout.max_new_tokens": _PLACE,
}
"""Field -> reason why it never changes within a run. A data file may move; the cursor's fingerprint refuses
other contents."""

_STEPS = ("schedule.steps", "schedule.warmup_steps", "schedule.decay_steps")
DERIVED = {
    "optimizer.learning_rate": ("schedule.peak",),
    "training.steps": _STEPS,
    "training.epochs": _STEPS,
    "optimizer.warmup": ("schedule.warmup_steps",),
    "optimizer.decay": ("schedule.decay_steps",),
    "optimizer.schedule": ("schedule.kind", "schedule.decay_steps", "schedule.final", "schedule.start"),
    "muon.momentum": ("optimizer.momentum",),
    "muon.update_scale": ("optimizer.update_scale",),
    "muon.adamw_rate": ("optimizer.adamw_rate",),
    "optimizer.start": ("schedule.start",),
    "optimizer.final": ("schedule.final",),
}
"""Config field -> fields of the saved schedule derived from it. The saved optimizer uses config names."""


def allowed(config: TrainingConfig) -> list[str]:
    """Return the fields of --save.allow-changed by their dotted names, and fields derived from them.

    Raises ConfigError for a fixed or an unknown field.
    """
    known = {*fields(type(config)), *type(config).model_fields, DATA_FILES}
    names = [name_of(type(config), written) for written in config.save.allow_changed]
    for written, name in zip(config.save.allow_changed, names, strict=True):
        if name in FIXED:
            raise ConfigError(
                f"save.allow_changed names {written}, which can never change within a run: {FIXED[name]}",
                next="give another folder with --out",
            )
        if name not in known:
            raise ConfigError(
                f"save.allow_changed names {written!r}, which is not a field of a run's"
                f" configuration{nearest(written, spellings(type(config)))}"
            )
    return [*names, *(derived for name in names for derived in DERIVED.get(name, ()))]


def refuse_other_version(config: TrainingConfig) -> None:
    """Raise ConfigError if the folder's run has fields that this version doesn't know."""
    from unfreeze.train.run import latest, read_record

    kind, folder = type(config), config.run_dir
    known = {*fields(kind), *kind.model_fields, DATA_FILES}
    if (save := latest(folder)) is None:
        return
    saved = of_today(kind, read_record(save)["config"])
    unknown = [name for name in saved if name not in known]
    if unknown:
        path = folder / RESOLVED
        began: dict[str, Any] = {} if not path.is_file() else read_object(path, ConfigError)
        effective = cast(dict[str, dict[str, str]], began.get("effective") or {})
        their_version = effective.get("versions", {}).get("unfreeze", "")
        writer = f"unfreeze {their_version}" if their_version else "another version"
        raise ConfigError(
            f"{folder} cannot be resumed by unfreeze {__version__}: {writer} started it with"
            f" {', '.join(unknown)}, which this version does not have",
            next="give another folder with --out"
            + (f", or use unfreeze {their_version}" if their_version else ""),
        )


def refuse_other_base(run: Run, model: str, digest: str) -> None:
    """Raise ConfigError if `model` now has other weights than when the run started.

    Saves of earlier versions have no digest and are not checked.
    """
    before = (run.saved or {}).get("base")
    if before and before != digest:
        raise ConfigError(
            f"cannot resume: {model} has other weights than when this run started (digest was"
            f" {before!r}, is {digest!r})",
            next="restore that model, or start a new run with another --out",
        )
