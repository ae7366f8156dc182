"""Load the model that a run starts from: from files or random, whole or sharded over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.layout import Layout
from unfreeze.job.opening.kernels import compiles
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.checkpoint.stream import LoadStats
    from unfreeze.models import Decoder
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.parallel.processes.mesh import HeldPart, Mesh
    from unfreeze.train.run import Run


def load_weights(
    start: Manifest,
    config: TrainingConfig,
    device: torch.device,
    folder: Run,
    common: Common,
    mesh: Mesh,
    layout: Layout,
    meta: Decoder,
) -> Decoder:
    """Load the checkpoint's weights into the layout's places, or random ones if it has none.

    meta: the model on meta that receives the weights. A "load" event has bytes and seconds.
    """
    from unfreeze import models
    from unfreeze.generate.open import dtype_of, open_model
    from unfreeze.parallel.placement.dispatch import split_experts

    loaded, warn = load_events(folder, device, config.memory.dtype)
    dtype = dtype_of(config.memory.dtype)
    if start.tensors:
        with LoadProgress(quiet=common.quiet) as progress:
            return open_model(start, dtype, device, progress, loaded, warn, mesh, layout, built=meta)
    for note in models.notes(start.config):
        warn(note)
    model = models.build(models.shape(start.config), dtype=dtype, device=device)
    models.initialize(model, config.seed)
    split_experts(model, mesh)
    return model


def load_divided(
    start: Manifest, config: TrainingConfig, device: torch.device, folder: Run, common: Common, group: Group
) -> tuple[Decoder, Callable[[str], HeldPart]]:
    """Like `load_weights`, with every weight sharded. Also return a function: name -> this process's part."""
    from unfreeze.generate.open import dtype_of, open_sharded

    dtype_name = config.memory.dtype
    loaded, warn = load_events(folder, device, dtype_name)
    with LoadProgress(quiet=common.quiet) as progress:
        more: dict[str, Any] = {"seed": config.seed, "progress": progress, "loaded": loaded, "warn": warn}
        model, sharded = open_sharded(start, group, dtype_of(dtype_name), device, **more)
    return model, sharded.held


def load_events(
    folder: Run, device: torch.device, dtype_name: str
) -> tuple[Callable[[LoadStats], None], Callable[[str], None]]:
    """Return two callbacks: one emits the "load" event, one emits warnings unless the run is resumed."""

    def loaded(stats: LoadStats) -> None:
        fields = {**asdict(stats), "bytes_by_rank": list(stats.bytes_by_rank)}
        if not stats.bytes_by_rank:  # one process read all bytes
            del fields["bytes_by_rank"]
        first = compiles(device, dtype_name)
        folder.events.emit("load", folder.step, **fields, **({"compiles": True} if first else {}))

    def warn(message: str) -> None:
        if folder.step == 0:
            folder.events.emit("warning", 0, message=message)

    return loaded, warn
