"""A stand-in for models.Decoder, small enough to read: embedding, residual layers with a top-1 mixture of
experts, norm-less head.

It keeps the Decoder's contract that train/ relies on: hidden(batch, through), lm_head, moe_layers(), counts_E
that a recomputation doesn't count again, replayed_3, e_score_correction_bias, device. test_real_decoder.py repeats the
central claims with the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unfreeze.core.batch import Batch
from unfreeze.models import Decoder

VOCAB, WIDTH, EXPERTS = 32, 12, 4


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))


class TinyMoE(nn.Module):
    def __init__(self, counts_recompute: bool):
        super().__init__()
        self.gate = Router()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("counts_E", torch.zeros(EXPERTS, dtype=torch.int64), persistent=False)
        self.register_buffer("replayed_3", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.counts_recompute = counts_recompute

    def forward(self, x_TD: Tensor, routes: dict[int, Tensor]) -> Tensor:
        scores_TE = (x_TD @ self.gate.weight.T).sigmoid()
        if id(self) in routes:
            ids_T = routes[id(self)]
        else:
            ids_T = routes[id(self)] = (scores_TE.detach() + self.gate.e_score_correction_bias).argmax(-1)
            self.counts_E += torch.bincount(ids_T, minlength=EXPERTS)
        if self.counts_recompute and torch.is_grad_enabled():  # the planted bug
            self.counts_E += torch.bincount(ids_T, minlength=EXPERTS)
        y_TD = torch.einsum("td,tdo->to", x_TD, self.experts[ids_T]).tanh()
        return x_TD + y_TD * scores_TE.gather(1, ids_T.unsqueeze(1))


class TinyModel(nn.Module):
    def __init__(
        self,
        *,
        layers: int = 2,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        counts_recompute: bool = False,
    ):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([TinyMoE(counts_recompute) for _ in range(layers)])
        self.lm_head = nn.Linear(WIDTH, VOCAB)
        self.to(dtype)
        for layer in self.moe_layers().values():
            layer.gate.e_score_correction_bias = torch.zeros(EXPERTS)
        self.while_looking = []

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    looking, reshard = Decoder.looking, Decoder.reshard

    def moe_names(self) -> dict[int, str]:
        return {layer: str(layer) for layer in self.moe_layers()}

    def moe_layers(self) -> dict[int, Any]:
        return dict(enumerate(self.layers))

    def hidden(self, batch: Batch, recompute: Callable[..., Tensor]) -> Tensor:
        x_TD, routes = self.embed(batch.tokens_T), {}
        for layer in self.layers:
            x_TD = recompute(layer, x_TD, routes)
        return x_TD


def plain(layer: nn.Module, x_TD: Tensor, routes: dict[int, Tensor]) -> Tensor:
    return layer(x_TD, routes)


def recompute(layer: nn.Module, x_TD: Tensor, routes: dict[int, Tensor]) -> Tensor:
    return checkpoint(layer, x_TD, routes, use_reentrant=True)


def make_batch(lengths: list[int], supervised: list[int], seed: int) -> Batch:
    """Documents of the given lengths, of which the last `supervised` positions each carry weight 1."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    weights = torch.cat(
        [torch.cat([torch.zeros(n - k), torch.ones(k)]) for n, k in zip(lengths, supervised, strict=True)]
    )
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    # a function of the token, so that there is something to learn
    return Batch(tokens, (tokens * 7 + 3) % VOCAB, weights, positions, starts)


def endless(
    start: dict[str, Any] | None = None, micro_batches: int = 1
) -> Iterator[tuple[list[Batch], dict[str, Any]]]:
    """Steps whose content follows from their position, as data.Batches does: each with the cursor of the
    one after it."""
    position = start["position"] if start else 0
    while True:
        places = range(position, position + micro_batches)
        position += micro_batches
        yield [make_batch([9, 14, 5], [3, 6, 5], seed=place) for place in places], {"position": position}


@pytest.fixture
def tiny() -> SimpleNamespace:
    return SimpleNamespace(
        Model=TinyModel,
        plain=plain,
        recompute=recompute,
        make_batch=make_batch,
        endless=endless,
        VOCAB=VOCAB,
        EXPERTS=EXPERTS,
    )
