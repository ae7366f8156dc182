"""The step from ordinary LoRA to training through the rounding: the same parameters in other modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import sites
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.merge_aware.experts import RoundedExperts
from unfreeze.adapters.merge_aware.linear import RoundedLowRank
from unfreeze.adapters.merge_aware.matrix import Rounding, rounded
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import Decoder
from unfreeze.models.targets import candidates

Roundings = Mapping[tuple[str, str], Rounding]
"""(site, projection; "" of a linear layer) -> the rounding of its matrices, adapted or not."""


def begin(model: Decoder, roundings: Roundings) -> int:
    """Train through the rounding from here on -> the number of rounded projections. Twice is as once.

    A projection without an adapter is rounded now, for good: it changes no more.
    """
    adapted: set[tuple[str, str]] = set()
    for site in sites(model):
        owner, adapter = site.owner, site.adapter
        if isinstance(owner, Linear) and isinstance(adapter, LowRank):
            adapted.add((site.name, ""))
            if (rounding := roundings.get((site.name, ""))) is not None:
                owner.adapter = RoundedLowRank(adapter, rounding)
        elif isinstance(owner, Experts) and isinstance(adapter, ExpertLowRank):
            ranks = {owner.first: adapter.gate_up_rank, "down_proj": adapter.down_rank}
            own = {(site.name, name) for name, rank in ranks.items() if rank is not None}
            adapted |= own
            if of_site := {name: roundings[site.name, name] for _, name in own & roundings.keys()}:
                owner.adapter = RoundedExperts(adapter, of_site)
    for candidate in candidates(model):
        owner = candidate.owner
        matrices = {"": owner} if isinstance(owner, Linear) else {}
        if isinstance(owner, Experts):
            matrices = {owner.first: owner.gate_up_proj, "down_proj": owner.down_proj}
        for projection, module in matrices.items():
            place = candidate.name, projection
            if place in roundings and place not in adapted and module.codec is None:
                _round_base(module.weight, roundings[place])
    model.while_looking = [partial(_looked_at, model)]
    return len(adapted & roundings.keys())


def scales(model: nn.Module) -> set[str]:
    """The ways in which the matrices of this model's adapters are rounded; empty before it has begun."""
    adapters = [site.adapter for site in sites(model)]
    dense = {adapter.rounding.scales for adapter in adapters if isinstance(adapter, RoundedLowRank)}
    experts = [adapter.roundings.values() for adapter in adapters if isinstance(adapter, RoundedExperts)]
    return dense | {rounding.scales for of_site in experts for rounding in of_site}


@contextmanager
def _looked_at(model: nn.Module) -> Iterator[None]:
    """Context in which generation keeps the rounded codes."""
    with ExitStack() as stack:
        for site in sites(model):
            if isinstance(site.adapter, (RoundedLowRank, RoundedExperts)):
                stack.enter_context(site.adapter.codes.look())
        yield


@torch.no_grad()
def _round_base(weight: Tensor, rounding: Rounding) -> None:
    """W = Q(W), one matrix at a time."""
    rounding = replace(rounding, halves=rounding.halves and weight.dim() == 3)
    for matrix in weight if weight.dim() == 3 else weight[None]:
        rounded(matrix, torch.zeros(matrix.shape, device=matrix.device), rounding, matrix)
