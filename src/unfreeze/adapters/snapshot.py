"""Values of the trained parameters before a step, and their movement since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

COPY_BYTES = 2**30  # full copies of trained weights up to 1 GiB; beyond, a sample per parameter
SAMPLE = 65536  # elements of a sampled parameter
BESIDE = "beside."  # prefix of parameters that train with a model but are not part of it (teach/inside.py)


@dataclass
class Snapshot:
    """Values of the trained parameters: name -> full copy, sample, or None (all zero, like a new B).

    `full`: names with a full copy.
    """

    kept: dict[str, Tensor | None] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)


@torch.no_grad()
def snapshot(weights: Mapping[str, Tensor], copy_bytes: int = COPY_BYTES) -> Snapshot:
    """Record the values of the named weights. Zero weights cost nothing.

    Others are copied until `copy_bytes` are used up, then sampled.
    """
    result = Snapshot()
    for name, weight in weights.items():
        if not weight.any():
            result.kept[name] = None
        elif weight.nbytes <= copy_bytes:
            copy_bytes -= weight.nbytes
            result.kept[name] = weight.detach().clone()
            result.full.add(name)
        else:
            result.kept[name] = sample(weight).clone()
    return result


def sample(weight: Tensor) -> Tensor:
    """About SAMPLE elements, evenly spaced, at least one per row.

    So every matrix of a stack and every row of an embedding is covered.
    """
    width = weight.shape[-1]
    return weight.detach()[..., :: max(1, min(width, weight.numel() // SAMPLE))]


def change_since(weight: Tensor, before: Tensor | None, full: bool) -> tuple[Tensor, float]:
    """(change, share of the weight's elements that the change covers)."""
    if before is None:
        return weight.detach(), 1.0
    now = weight.detach() if full else sample(weight)
    return now - before, before.numel() / weight.numel()


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of the model that train; parameters that a loss trains beside it are left out."""
    named = model.named_parameters()
    return ((name, p) for name, p in named if p.requires_grad and not name.startswith(BESIDE))
