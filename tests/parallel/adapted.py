"""A model with adapters that are not zero, and what one step of it gives: for tests that compare places of weights
to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Batch
from unfreeze.core.taps import Tap
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.objectives.cross_entropy import cross_entropy


def batch(tokens: int, documents: int, vocab: int = 256) -> Batch:
    length = tokens // documents
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(1))
    ones, positions = torch.ones(tokens), torch.arange(tokens) % length
    return Batch(ids, ids.roll(-1), ones, positions, torch.arange(0, tokens, length))


def adapted(model: models.Decoder) -> models.Decoder:
    attach(model, LoraConfig(rank=4), 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.endswith("B"):
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(3))
    return model


def step(
    model: models.Decoder, recompute: str, given: Batch, asked: Sequence[Tap] = (), *, alone: bool = False
) -> dict[str, torch.Tensor]:
    """The loss, and every gradient by name. asked: taps whose squares are added; alone: without cross entropy."""
    model.zero_grad()
    taps = Taps(asked)
    loss = cross_entropy(model.hidden(given, RECOMPUTE[recompute], taps=taps), model.lm_head, given)
    squares = [tensor.float().pow(2).sum() for tensor in taps.found.values()]
    torch.stack(squares + [loss.sum] * (not alone)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.sum.detach(), **found}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
