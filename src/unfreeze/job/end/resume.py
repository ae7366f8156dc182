"""What may differ when a run goes on: the fields of --allow-changed.

Some fields can't differ, whatever is allowed (docs/trust.md R2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

from unfreeze.config.training import ADDED
from unfreeze.core.errors import ConfigError, nearest

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
    "tokens_per_step": _PLACE,
    "micro_batches": _PLACE,
    "packing": _PLACE,
    "data_weights": _PLACE,
}
"""Field -> the reason it never changes within a run. A data file may move; other content is refused by the
cursor's fingerprint."""

_STEPS = ("schedule.steps", "schedule.warmup_steps", "schedule.decay_steps")
DERIVED = {
    "learning_rate": ("schedule.peak",),
    "steps": _STEPS,
    "epochs": _STEPS,
    "warmup": ("schedule.warmup_steps",),
    "decay": ("schedule.decay_steps",),
    "schedule": ("schedule.kind", "schedule.decay_steps"),
    "weight_decay": ("optimizer.weight_decay",),
}
"""Field of the config -> fields of the saved schedule and optimizer that follow from it."""


def allowed(fields: tuple[str, ...], record: Mapping[str, object]) -> list[str]:
    """The fields of --allow-changed and what follows from them.

    Raises ConfigError for one that is fixed, or that the config doesn't have.
    """
    known = set(_names(record)) | ADDED  # these are left out of a record at their default
    for field in fields:
        if field in FIXED:
            raise ConfigError(
                f"allow_changed names {field}, which can never change within a run: {FIXED[field]}",
                next="another folder with --out",
            )
        if field not in known:
            raise ConfigError(
                f"allow_changed names {field!r}, which is no field of a run's"
                f" configuration{nearest(field, known)}"
            )
    return [*fields, *(derived for field in fields for derived in DERIVED.get(field, ()))]


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


def _names(table: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if _is_table(value):
            yield from _names(value, f"{prefix}{key}.")


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, Mapping)
