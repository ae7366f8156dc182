"""Random checkpoints to measure on, written once per run or kept in the folder of --checkpoint."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unfreeze import models
from unfreeze.checkpoint import disk_tensors, save_checkpoint
from unfreeze.core.errors import ConfigError
from unfreeze.quant import Int4, recognise
from unfreeze.quant.codec import Codec
from unfreeze.quant.halves import stacked

SHARD_BYTES = 200 * 2**20


Packed = Callable[[Codec, torch.Size, torch.Generator], dict[str, torch.Tensor]]
"""(codec, shape [E, out, in], generator) -> random parts of a packed weight, by suffix."""


def quantized(codec: Codec, shape: torch.Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Normal numbers with variance 1 / in, quantized."""
    return codec.quantize(torch.randn(shape, generator=generator) / math.sqrt(shape[-1]))


def expanded(codec: Codec, shape: torch.Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What `quantized` packs, expanded to bf16: the same numbers for a reader without the format."""
    return {"weight": codec.dequantize(quantized(codec, shape, generator)).bfloat16()}


def make(folder: Path, config: dict[str, Any], packed: Packed = quantized) -> None:
    """Write random bf16 weights with a trained model's spread; routed experts in the format that
    quantization_config names, Kimi's INT4 where there is none."""
    shape, scheme = models.shape(config), recognise(config)
    codec = Int4(group_size=32) if scheme is None else scheme.codecs[0]
    # a tied head of variance 1 would make logits of the size of sqrt(D)
    embedding = shape.initializer_range if shape.tied else 1.0
    generator = torch.Generator().manual_seed(0)

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in models.build(shape, dtype=torch.bfloat16, device="meta").state_dict().items():
            if name in models.tied(shape):
                continue
            if ".experts." in name and tensor.dim() > 1:
                both = "gate_up_proj" in name  # two matrices on disk
                own = stacked(codec, *tensor.shape[-2:]) if both else codec
                parts = packed(own, tensor.shape, generator)
                yield from (
                    (f"{name.removesuffix('.weight')}.{suffix}", part) for suffix, part in parts.items()
                )
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                yield name, noise * 0.05
            elif tensor.dim() == 1:
                yield name, (1 + 0.05 * noise).bfloat16()
            else:
                yield (
                    name,
                    (
                        noise * embedding if "embed" in name else noise / math.sqrt(tensor.shape[-1])
                    ).bfloat16(),
                )

    folder.mkdir(parents=True, exist_ok=True)
    tensors = disk_tensors(parameters(), models.rules(shape), lambda module: codec)
    save_checkpoint(folder, config, tensors, max_shard_bytes=SHARD_BYTES)


@contextmanager
def checkpoints(folder: str, config: dict[str, Any], checked: dict[str, Any]) -> Iterator[tuple[Path, Path]]:
    """Yield (the checkpoint, the small one for the float64 comparison); write them if they don't exist yet.

    folder "": a temporary one, removed afterwards.
    Raises ConfigError if the folder holds another model.
    """
    with tempfile.TemporaryDirectory(prefix="unfreeze-bench-") as temporary:
        root = Path(folder or temporary)
        yield made(root / "model", config), made(root / "checked", checked)


def made(place: Path, wanted: dict[str, Any]) -> Path:
    """The checkpoint in a folder, written if there is none. Raises ConfigError if it is of another model."""
    if not (place / "config.json").is_file():
        make(place, wanted)
    elif json.loads((place / "config.json").read_text()) != wanted:
        raise ConfigError(
            f"checkpoint = {str(place.parent)!r} holds another model than this benchmark's",
            next="give an empty folder, or none",
        )
    return place
