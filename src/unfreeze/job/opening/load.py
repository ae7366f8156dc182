"""Load a model to be used: a checkpoint, or a run or adapter, computing as it was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.job.merge_aware import compute_as_trained
from unfreeze.job.opening.source import open_as_trained

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.generate.model import Model
    from unfreeze.generate.open import Progress
    from unfreeze.generate.source import ModelSource


def load(
    source: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Model:
    """Load a model for inference.

        source    a checkpoint folder, a Hugging Face id, a run folder, or an adapter folder (it names its
                  base)
        dtype     compute dtype: "float32", "bfloat16", or "auto": bfloat16 if the hardware has bf16 matmuls.
                  Weights stay as stored if that is no wider
        device    "cpu", "cuda", "cuda:1", or "auto": CUDA if there is one
        progress  called with (bytes done, total bytes) while weights are read
        say       called with one line about a download, and one about unsupported fields of config.json
                  (without it: a log warning)

    Raises UserError or a subclass (CheckpointError, AdapterError, ConfigError) if nothing is found, files are
    damaged, or parts don't match.
    """
    from unfreeze.generate.open import device_of, dtype_of
    from unfreeze.kernels.precision import precision

    place_to = device_of(device)
    wanted = dtype_of(precision(dtype, place_to).name)
    return load_as_trained(*open_as_trained(str(source), say), wanted, place_to, progress, say)


def load_as_trained(
    opened: ModelSource,
    manifest: Manifest,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Model:
    """`load_opened`, and an adapter trained through the rounding of a merge is rounded again.

    Raises AdapterError, beside what `load_opened` raises, for a base in another format.
    """
    from unfreeze.generate.model import load_opened

    model = load_opened(opened, manifest, dtype, device, progress, say)
    if opened.adapter is not None:
        compute_as_trained(model.decoder, manifest, opened.adapter)
    return model
