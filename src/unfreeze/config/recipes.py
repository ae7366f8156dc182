"""Config of each training command; read a run's record of any version with current field names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from unfreeze.config import distill, grpo, prefer, pretrain, sft
from unfreeze.config.names import name_of, of_today
from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import UserError
from unfreeze.core.events import RESOLVED
from unfreeze.untrusted.json_object import read_object

CONFIGS: dict[str, type[TrainingConfig]] = {
    "sft": sft.Config,
    "distill": distill.Config,
    "prefer": prefer.Config,
    "grpo": grpo.Config,
    "pretrain": pretrain.Config,
}


def resolved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert resolved_config.json of any version to current dotted names."""
    config = CONFIGS.get(str(fields.get("recipe")), sft.Config)
    renamed = of_today(config, fields)
    effective: Any = renamed.get("effective")
    set_fields: Any = cast(dict[str, Any], effective).get("given") if isinstance(effective, dict) else None
    if isinstance(set_fields, list):
        names = [name_of(config, str(name)) for name in cast(list[Any], set_fields)]
        renamed["effective"] = {**effective, "given": names}
    return renamed


def read_resolved(folder: Path, kind: type[UserError]) -> dict[str, Any]:
    """Read and convert resolved_config.json of a run's folder. Raises `kind` if it is invalid."""
    return resolved(read_object(folder / RESOLVED, kind))
