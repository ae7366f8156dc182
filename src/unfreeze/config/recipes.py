"""The Config of each training command, and a run's record of any version read by its names of today."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from unfreeze.config import distill, prefer, pretrain, sft
from unfreeze.config.names import name_of, of_today
from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import UserError
from unfreeze.core.events import RESOLVED
from unfreeze.untrusted.json_object import read_object

CONFIGS: dict[str, type[TrainingConfig]] = {
    "sft": sft.Config,
    "distill": distill.Config,
    "prefer": prefer.Config,
    "pretrain": pretrain.Config,
}


def resolved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """resolved_config.json of any version -> by the dotted names of today."""
    config = CONFIGS.get(str(fields.get("recipe")), sft.Config)
    made = of_today(config, fields)
    effective: Any = made.get("effective")
    given: Any = cast(dict[str, Any], effective).get("given") if isinstance(effective, dict) else None
    if isinstance(given, list):
        names = [name_of(config, str(name)) for name in cast(list[Any], given)]
        made["effective"] = {**effective, "given": names}
    return made


def read_resolved(folder: Path, kind: type[UserError]) -> dict[str, Any]:
    """`resolved` of a run's folder. Raises `kind` where the file is none."""
    return resolved(read_object(folder / RESOLVED, kind))
