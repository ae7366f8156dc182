"""Adapters as after training, neither factor zero, beside a model that stays as it is."""

import copy

import torch

from unfreeze.adapters import attach, sites
from unfreeze.config.lora import LoraConfig


def drawn(model, rank, seed, targets=("all-linear",)):
    """Name of a site -> its adapter; alpha is twice the rank."""
    twin = copy.deepcopy(model)
    for number, site in enumerate(
        attach(twin, LoraConfig(rank=rank, alpha=2.0 * rank, targets=targets), seed)
    ):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        for name, factor in site.adapter.named_parameters():
            if name.endswith("B"):
                factor.data.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    return {site.name: site.adapter for site in sites(twin)}
