"""The compute dtype of a run, the same in all of its processes and sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.config.recipes import read_resolved
from unfreeze.config.training import TrainingConfig
from unfreeze.core.cpu import multiplies_bf16
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.kernels.precision import AUTO, NEW, Precision, precision, slow

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run

BEGUN = "as when the run started"


def expected(config: TrainingConfig) -> str:
    """Expected dtype of a run on a CPU, determined before torch is imported."""
    name = began(config) or config.memory.dtype
    return name if name != AUTO else "bfloat16" if multiplies_bf16() else "float32"


def began(config: TrainingConfig) -> str:
    """Recorded dtype of the run that this one resumes; "" if there is none, or if the config sets a dtype."""
    if config.memory.dtype != AUTO or not (config.run_dir / RESOLVED).is_file():
        return ""
    before = read_resolved(config.run_dir, ConfigError).get("memory.dtype")
    return str(before) if before in ("bfloat16", "float32") else ""


def alone(config: TrainingConfig, device: torch.device, *, new: bool = False) -> Precision:
    """The dtype that `settled` gives to a run of one process. new: it starts from random weights."""
    if first := began(config):
        return Precision(first, BEGUN)
    return NEW if new and config.memory.dtype == AUTO else precision(config.memory.dtype, device)


def settled(
    config: TrainingConfig, start: Manifest | None, device: torch.device, group: Group
) -> tuple[TrainingConfig, Precision]:
    """Return (the config with dtype = "auto" resolved, the dtype with its reason).

    A resumed run keeps its dtype. A new one from random weights computes in float32, any other in the dtype
    that the hardware multiplies. If one of several processes takes float32, all do.
    """
    own = precision(config.memory.dtype, device)
    if config.memory.dtype != AUTO:
        return config, own
    if first := group.texts(began(config))[0]:
        return in_dtype(config, first), Precision(first, BEGUN)
    if start is not None and not start.tensors:
        own = NEW
    if "float32" in group.texts(own.name) and own.name != "float32":
        own = Precision("float32", "another process has no bfloat16 units")
    return in_dtype(config, own.name), own


def in_dtype(config: TrainingConfig, name: str) -> TrainingConfig:
    """The same config with that dtype."""
    return config.model_copy(update={"memory": config.memory.model_copy(update={"dtype": name})})


def computed_here(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """The config with the dtype that a new run on this device alone would use."""
    return in_dtype(config, precision(config.memory.dtype, device).name)


def dtype_line(dtype: Precision) -> str:
    """Line at the start of a run: the dtype and its reason."""
    return f"dtype: {dtype.name} ({dtype.why})"


def warn_device(folder: Run, config: TrainingConfig, device: torch.device) -> None:
    """Emit a warning with a remedy if a GPU is here and not used, or if this device emulates the dtype."""
    # imported here: it imports torch
    from unfreeze.kernels import cards

    if unused := cards.passed_over(config.memory.device, device):
        words = f"this run is on the CPU: {unused.words()}"
        folder.events.emit("warning", folder.step, message=words)
    if why := slow(config.memory.dtype, device):
        remedy = "--dtype float32" + (" --save.allow-changed dtype" if folder.step else "")
        folder.events.emit("warning", folder.step, message=f"{why}; faster: {remedy}")
