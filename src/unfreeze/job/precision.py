"""The dtype a run is computed in, the same in all of its processes and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.config.training import TrainingConfig
from unfreeze.core.cpu import multiplies_bf16
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.kernels.precision import AUTO, precision, slow
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.parallel.collectives import Group
    from unfreeze.train.run import Run


def expected(config: TrainingConfig) -> str:
    """The dtype of a run on a CPU, as far as it is known before torch is imported."""
    asked = began(config) or config.memory.dtype
    return asked if asked != AUTO else "bfloat16" if multiplies_bf16() else "float32"


def began(config: TrainingConfig) -> str:
    """The dtype of the run that goes on in this folder; "" where none does, or another one is asked for."""
    path = config.run_dir / RESOLVED
    if config.memory.dtype != AUTO or not path.is_file():
        return ""
    before = read_object(path, ConfigError).get("dtype")
    return str(before) if before in ("bfloat16", "float32") else ""


def settled(
    config: TrainingConfig, start: Manifest | None, device: torch.device, group: Group
) -> TrainingConfig:
    """The config with dtype = "auto" replaced.

    A run that goes on keeps its dtype. A new one from random weights is computed in float32, any other in
    what the hardware multiplies; where one of several processes takes float32, all do.
    """
    if config.memory.dtype != AUTO:
        return config
    first = group.texts(began(config))[0]
    own = "float32" if start is not None and not start.tensors else precision(AUTO, device).name
    named = first or ("float32" if "float32" in group.texts(own) else own)
    return in_dtype(config, named)


def in_dtype(config: TrainingConfig, name: str) -> TrainingConfig:
    """The same config with that dtype."""
    return config.model_copy(update={"memory": config.memory.model_copy(update={"dtype": name})})


def computed_here(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """The config as a new run on this device alone would have it."""
    return in_dtype(config, precision(config.memory.dtype, device).name)


def dtype_line(name: str, device: torch.device) -> str:
    """What the start of a run says: the dtype, and whether the hardware multiplies bfloat16."""
    best = precision(AUTO, device)
    too = " too" if (name, best.name) == ("float32", "bfloat16") else ""
    return f"dtype: {name} ({best.why.replace(' it', f' bfloat16{too}')})"


def warn_slow(folder: Run, config: TrainingConfig, device: torch.device) -> None:
    """Emit a warning where the run's dtype is emulated on this device, with what to do."""
    if why := slow(config.memory.dtype, device):
        remedy = "--dtype float32" + (" --allow-changed dtype" if folder.step else "")
        folder.events.emit("warning", folder.step, message=f"{why}; faster: {remedy}")
