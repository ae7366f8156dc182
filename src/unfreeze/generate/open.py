"""Load a checkpoint into memory: build the model without memory, then stream the weights in.

This is the one place where checkpoint, shape, codec, model and placement meet; recipes start with
`open_model` too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.stream import LoadStats
from unfreeze.core.devices import not_built
from unfreeze.core.errors import ConfigError, nearest
from unfreeze.core.layout import RESIDENT, Layout
from unfreeze.kernels import cards
from unfreeze.models.blocks.routers import HashRouter
from unfreeze.parallel.placement.peers import FromPeers
from unfreeze.parallel.placement.place import place
from unfreeze.parallel.placement.residency import Streaming, Together
from unfreeze.parallel.processes.collectives import Group
from unfreeze.parallel.processes.mesh import ONE, Mesh

if TYPE_CHECKING:
    from unfreeze.parallel.placement.fsdp import Sharded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(bytes done, total bytes), called while weights are read."""


def open_model(
    manifest: Manifest,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    loaded: Callable[[LoadStats], None] | None = None,
    warn: Callable[[str], None] | None = None,
    mesh: Mesh = ONE,
    layout: Layout = RESIDENT,
    as_stored: bool = False,
    built: models.Decoder | None = None,
) -> models.Decoder:
    """Load the checkpoint as a Decoder on `device`.

    Packed weights stay packed; the others are stored in `dtype`, the compute dtype.
    as_stored: on a CPU, matrices in a narrower dtype keep it, and are frozen (models.meta_model).
    built: use this model, which is on meta, instead of a new one.
    `loaded` gets the load statistics; `warn` (without it: the log) gets unsupported fields of config.json.
    mesh: the processes that load it together (parallel.mesh).
    Peak host memory is the model itself and one tensor (parallel.place).
    layout: where weights are placed. Experts on "host" and "disk" are prefetched layer by layer into two
    buffers (parallel.residency); with rest "peers" each process of the mesh keeps a shard of the other
    weights in layers (parallel.peers).
    Raises CheckpointError if config.json, its quantization and the tensors don't match.
    """
    shape = models.shape(manifest.config)
    for note in models.notes(manifest.config):
        (warn or log.warning)(note)
    keep_narrow = as_stored and torch.device(device).type == "cpu"
    model = built or models.meta_model(shape, manifest, dtype, as_stored=keep_narrow)
    streaming = None
    if layout.experts in ("host", "disk"):
        streaming = Streaming(layout.experts, layout.buffer_bytes)
    peers = None if layout.rest == "device" else FromPeers(mesh)
    stats = place(
        model,
        manifest,
        models.rules(shape),
        device=device,
        ignore=models.ignored(shape),
        tied=models.tied(shape),
        progress=progress,
        mesh=mesh,
        streaming=streaming,
        peers=peers,
    )
    _check_tables(model)
    streams = [each.residency for each in (streaming, peers) if each and each.residency]
    if streams:
        model.residency = streams[0] if len(streams) == 1 else Together(*streams)
    if loaded is not None:
        loaded(stats)
    return model


def open_sharded(
    manifest: Manifest,
    group: Group,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    loaded: Callable[[LoadStats], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> tuple[models.Decoder, Sharded]:
    """Like `open_model`, with every weight sharded over `group`'s processes (parallel/placement/fsdp.py).

    If the manifest has no tensors, weights are initialised randomly from the seed, as on one process.
    """
    from unfreeze.parallel.placement.fsdp import Sharded
    from unfreeze.parallel.placement.place import place_sharded

    shape = models.shape(manifest.config)
    for note in models.notes(manifest.config):
        (warn or log.warning)(note)
    if not manifest.tensors:
        model = models.build(shape, dtype=dtype, device="meta")
        sharded = Sharded(model, group, dtype, device)
        sharded.zero_buffers(device)
        models.initialize(model, seed, sharded.put)
        return model, sharded
    model = models.meta_model(shape, manifest, dtype)
    options: dict[str, Any] = {"ignore": models.ignored(shape), "tied": models.tied(shape)}
    stats, sharded = place_sharded(
        model, manifest, models.rules(shape), group, device=device, dtype=dtype, progress=progress, **options
    )
    _check_tables(model)
    if loaded is not None:
        loaded(stats)
    return model, sharded


def _check_tables(model: models.Decoder) -> None:
    """Raise CheckpointError for a table of experts by tokens that names one that is not there."""
    for name, module in model.named_modules():
        if isinstance(module, HashRouter):
            module.check_table(name)


def dtype_of(name: str) -> torch.dtype:
    """Return "float32" or "bfloat16" as torch dtype; ConfigError for anything else."""
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; one of {', '.join(DTYPES)}{nearest(str(name), DTYPES)}")
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """As `_device_of`; a card that is full or busy is one line, not a fault of CUDA."""
    try:
        return _device_of(name)
    except RuntimeError as error:
        words = " ".join(str(error).split()).partition(". ")[0][:200]
        raise ConfigError(
            f"device is {name!r}, but the card cannot be used: {words}",
            next="nvidia-smi lists who uses it; or --device cpu",
        ) from error


def _device_of(name: str) -> torch.device:
    """Return the named device; "auto" is CUDA if there is a card that is supported.

    On CUDA it keeps torch's attention away from cuDNN.
    Raises ConfigError if it is not supported or torch doesn't see one here.
    """
    if name == "auto":
        card = cards.here()
        name = "cuda" if card is not None and not cards.refuses(card) else "cpu"
    if why := not_built(name):
        raise ConfigError(f"device is {name!r}: {why}", next="--device cpu")
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        unused = cards.unused() or cards.Unused("there is no GPU on this machine", "--device cpu")
        raise ConfigError(
            f"device is {name!r}, but torch {torch.__version__} sees no CUDA device here: {unused.why}",
            next=unused.remedy,
        )
    if device.index is not None:
        here = torch.cuda.device_count()
        if device.index >= here:
            raise ConfigError(
                f"device is {name!r}, but there are {here} here", next=f'device="cuda:{here - 1}"'
            )
        # Triton launches on the current device, whatever device its tensors are on
        torch.cuda.set_device(device)
    if why := cards.refuses(cards.card_of(device)):
        raise ConfigError(f"device is {name!r}, but {why}", next="--device cpu")
    # cuDNN builds a plan for each shape of attention, and packed documents have new shapes in every step:
    # 0.44 s forward and 0.55 s backward a shape on a B200 (FunASR issue 3704, torch 2.11; not measured here)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device
