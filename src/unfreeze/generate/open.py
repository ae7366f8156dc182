"""From a name to a model in memory: find the base checkpoint and the adapter, build without memory, stream the weights in.

This is the one place where checkpoint, shape, codec, model and placement meet; recipes begin with `open_model` too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest, read_json
from unfreeze.checkpoint.stream import LoadStats
from unfreeze.core.errors import CheckpointError, ConfigError, nearest, printable
from unfreeze.core.events import RESOLVED
from unfreeze.parallel.place import place
from unfreeze.parallel.plan import meta_model
from unfreeze.quant import not_followed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ADAPTER_CONFIG = "adapter_config.json"
log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all), called while weights are read."""


@dataclass(frozen=True)
class Source:
    """What a name stands for: a base checkpoint (folder or Hugging Face id) and, if there is one, the folder of an adapter for it.

    template_variables   NAME=VALUE of the run: it is asked with the prompts it was trained with
    """

    base: str
    adapter: Path | None = None
    template_variables: tuple[str, ...] = ()


def locate(source: str | Path) -> Source:
    """A checkpoint folder or id stands for itself; a run folder for its adapter on its base, or for the model/ it trained; an adapter
    folder for itself on its base_model_name_or_path.

    Raises CheckpointError for a run that has neither adapter nor model yet, and for an adapter that doesn't name its base.
    """
    folder = Path(source).expanduser()
    if (folder / RESOLVED).is_file():
        return _locate_run(folder)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        if not isinstance(base, str) or not base:
            raise CheckpointError(
                f"{folder / ADAPTER_CONFIG} has no base_model_name_or_path, so the model it belongs to is unknown",
                next=f"write the base checkpoint's folder or id into {ADAPTER_CONFIG}",
            )
        return Source(base, folder)
    if not folder.exists() and any(folder.parent.glob(f"*/{RESOLVED}")):  # beside other runs: a name mistyped, no Hugging Face id
        runs = sorted(path.parent.name for path in folder.parent.glob(f"*/{RESOLVED}"))
        raise CheckpointError(f"{folder} does not exist{nearest(folder.name, runs)}", next=f"ls {folder.parent}")
    return Source(str(folder) if folder.exists() else str(source))


def _locate_run(folder: Path) -> Source:
    resolved = read_json(folder / RESOLVED)
    variables = tuple(map(str, resolved.get("template_variables") or ()))
    if (folder / "model" / "config.json").is_file():
        return Source(str(folder / "model"), template_variables=variables)
    if not (folder / "adapter" / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"run {folder} has neither adapter/{ADAPTER_CONFIG} nor model/config.json: it has not saved anything yet",
            next="start the same training command again: it resumes the run",
        )
    base = resolved.get("model")
    if not isinstance(base, str) or not base:
        raise CheckpointError(f"{folder / RESOLVED} has no key 'model', so the base checkpoint of this run is unknown")
    return Source(base, folder / "adapter", variables)


def open_model(
    manifest: Manifest,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    loaded: Callable[[LoadStats], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> models.Decoder:
    """The checkpoint as a Decoder on `device`: packed weights stay packed, the others are held in `dtype`, that of the computation.

    `loaded` is told what was read, `warn` (without it: the log) which fields of config.json are not followed.
    Peak host memory is the model itself and one tensor (parallel.place).
    Raises CheckpointError where config.json, its quantization and the tensors don't fit each other.
    """
    shape = models.shape(manifest.config)
    for note in notes(manifest.config):
        (warn or log.warning)(note)
    model = meta_model(shape, manifest, dtype)
    stats = place(
        model, manifest, models.rules(shape),
        device=device, ignore=models.ignored(shape), tied=models.tied(shape), progress=progress,
    )  # fmt: skip
    if loaded is not None:
        loaded(stats)
    return model


def notes(config: Mapping[str, Any]) -> list[str]:
    """What a model computed from this config.json passes over, a line for each table of it."""
    return [printable(line) for line in (models.not_followed(config), not_followed(config)) if line]


def dtype_of(name: str) -> torch.dtype:
    """ "float32" or "bfloat16", as the torch dtype; ConfigError for anything else."""
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; one of {', '.join(DTYPES)}{nearest(str(name), DTYPES)}")
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """The named device; ConfigError where torch doesn't know it or doesn't see one here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'device is {name!r}; "cpu", "cuda" or "cuda:N"') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch {torch.__version__} sees no CUDA device here", next='device="cpu"')
    return device
