"""Routers: choose K of the E experts for a token, and their weights.

RoutingRule is the same in training and evaluation and runs in fp32. Its weights carry gradients back to the
hidden state (and to the router if it trains). A selection bias affects the choice and never enters the
weights.

T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.core.errors import CheckpointError
from unfreeze.kernels.decode_step.experts import LOGITS, SIGMOID, SOFTMAX
from unfreeze.kernels.decode_step.mixture import Choice, Routed, route
from unfreeze.kernels.decode_step.program import Row
from unfreeze.models.blocks.part import Part
from unfreeze.models.blocks.recording import CannotRecord, Recording


@dataclass(frozen=True)
class RoutingRule:
    """A family's routing: score, choose, weigh. z = W x.

    score       s = sigmoid(z), softmax(z) over the experts, sqrt(softplus(z)), or z itself ("logits")
    correction  shape of e_score_correction_bias, whose last dim is E; None: no bias. The largest s + bias win
    groups      groups of E / groups experts; the `topk_group` best stay. A group's score is the sum of its
                `best` largest s + bias
    normalize   weights are s / (max(Σ s, smallest) + added), the sum over the chosen
    after       weights are sigmoid(s) of the chosen
    scale       final factor on the weights
    eps         of the norm before W, if there is one (NormedRouter)
    """

    score: Literal["sigmoid", "softmax", "sqrtsoftplus", "logits"] = "softmax"
    correction: Literal["E", "1 E"] | None = None
    groups: int = 1
    topk_group: int = 1
    best: int = 1
    normalize: bool = False
    smallest: float = 0.0
    added: float = 0.0
    after: bool = False
    scale: float = 1.0
    eps: float = 0.0


def noaux_tc(
    groups: int = 1, topk_group: int = 1, *, normalize: bool = True, scale: float = 1.0
) -> RoutingRule:
    """DeepSeek-V3's routing: the K largest sigmoid(z) + bias within the best groups, weights s / Σ s · scale.

    A group's score is the sum of its two largest. Source: arXiv:2412.19437, 2.1.2.
    """
    return RoutingRule("sigmoid", "E", groups, topk_group, 2, normalize, added=1e-20, scale=scale)


def best_groups(scores_TE: Tensor, of_group_TG: Tensor, topk_group: int) -> Tensor:
    """scores_TE with -inf outside the `topk_group` groups of largest of_group; G groups of E/G experts."""
    keep_TG = torch.zeros_like(of_group_TG, dtype=torch.bool)
    keep_TG.scatter_(1, of_group_TG.topk(topk_group, dim=-1).indices, True)
    grouped = scores_TE.unflatten(-1, (of_group_TG.shape[1], -1))
    return grouped.masked_fill(~keep_TG[..., None], float("-inf")).flatten(1)


SCORES = {"sigmoid": SIGMOID, "softmax": SOFTMAX, "logits": LOGITS}


class Router(nn.Module):
    """scores(x) [T, E] -> the chosen ids [T, K] -> their weights [T, K].

    Three separate steps, because a recomputed layer reuses the ids. `weight` [E, D]; e_score_correction_bias
    [E] or [1, E] fp32 if the routing has one.
    """

    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        routing: RoutingRule,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.top_k, self.routing = top_k, routing
        self.part: Part | None = None  # set where only some experts train (models/only.py)
        bias = None
        if routing.correction:
            shape = (num_experts,) if routing.correction == "E" else (1, num_experts)
            bias = torch.zeros(shape, dtype=torch.float32, device=device)
        self.register_buffer("e_score_correction_bias", bias)
        self.add(lambda size: nn.Parameter(torch.empty(size, dtype=dtype, device=device)))

    def add(self, vector: Callable[[int], nn.Parameter]) -> None:
        """Register parameters beside `weight`; vector(size) creates one with its dtype and device."""

    def logits(self, x_TD: Tensor) -> Tensor:
        """W x in float32, [T, E]."""
        return F.linear(x_TD.float(), self.value().float())

    def value(self) -> Tensor:
        """W [E, D]."""
        return self.weight if self.part is None else self.part.joined(self.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        """The scores [T, E] in float32."""
        logits_TE, score = self.logits(x_TD), self.routing.score
        if score == "logits":
            return logits_TE
        if score == "sqrtsoftplus":
            return F.softplus(logits_TE).sqrt()
        return logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(-1)

    def record(self, to: Recording, x: Row) -> Routed:
        """The chosen experts of a step, sorted by expert."""
        rule = self.routing
        if rule.score not in SCORES:
            raise CannotRecord(f"the score {rule.score}")
        choice = Choice(
            top_k=self.top_k,
            score=SCORES[rule.score],
            correction=None
            if self.e_score_correction_bias is None
            else self.e_score_correction_bias.flatten(),
            groups=rule.groups,
            keep=rule.topk_group,
            best=rule.best,
            normalize=rule.normalize,
            after=rule.after,
            per_expert=self.per_expert(),
            smallest=rule.smallest,
            added=rule.added,
            scale=rule.scale,
        )
        return route(to.program, self.record_logits(to, x), choice)

    def record_logits(self, to: Recording, x: Row) -> Row:
        return to.program.linear(x, self.value())

    def per_expert(self) -> Tensor | None:
        """A factor of each expert's weight, [E]."""
        return None

    def shares(self, scores_TE: Tensor) -> Tensor:
        """The scores divided by their sum over all experts; of a router without a score, the softmax."""
        if self.routing.score == "logits":
            return scores_TE.softmax(-1)
        if self.routing.score == "softmax":
            return scores_TE
        return scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)

    def choose(self, scores_TE: Tensor, noise: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """ids [T, K]: the K largest scores, with bias and best groups if the rule has them.

        noise: perturbs what is then compared (blocks/noise.py), so that the K are drawn. A bias then counts
        less its mean, which no choice of the largest depends on.
        """
        rule, scores_TE, bias = self.routing, scores_TE.detach(), self.e_score_correction_bias
        if noise is not None and rule.score == "logits":
            scores_TE = scores_TE.softmax(-1)
        if bias is not None:
            scores_TE = scores_TE + (bias if noise is None else bias - bias.mean())
        if rule.groups > 1:
            grouped = scores_TE.unflatten(-1, (rule.groups, -1))
            of_group_TG = grouped.topk(rule.best, dim=-1).values.sum(-1)
            scores_TE = best_groups(scores_TE, of_group_TG, rule.topk_group)
        if noise is not None:
            scores_TE = noise(scores_TE)
        return scores_TE.topk(self.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Weights [T, K] of the chosen experts, from their scores."""
        rule, weights_TK = self.routing, scores_TE.gather(1, ids_TK)
        if rule.after:
            weights_TK = weights_TK.sigmoid()
        if rule.normalize:
            sum_T1 = weights_TK.sum(-1, keepdim=True)
            if rule.smallest:
                sum_T1 = sum_T1.clamp(min=rule.smallest)
            weights_TK = weights_TK / (sum_T1 + rule.added)
        return weights_TK if rule.scale == 1.0 else weights_TK * rule.scale


class LinearRouter(Router):
    """z = W x + b (gpt-oss)."""

    def add(self, vector: Callable[[int], nn.Parameter]) -> None:
        self.bias = vector(self.weight.shape[0])

    def logits(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.float(), self.weight.float(), self.bias.float())

    def record_logits(self, to: Recording, x: Row) -> Row:
        return to.program.linear(x, self.weight, self.bias)


class HashRouter(Router):
    """The experts of a token are those that a table names, tid2eid [V, K]; the scores weigh them only."""

    tid2eid: Tensor

    def of_tokens(self, vocab_size: int) -> None:
        """Allocate the table, which comes from the checkpoint and is never trained."""
        empty = torch.zeros(vocab_size, self.top_k, dtype=torch.int64, device=self.weight.device)
        self.register_buffer("tid2eid", empty)

    def draw_table(self, generator: torch.Generator) -> None:
        """Name K different experts for each token at random, for a model without files."""
        drawn_VE = torch.rand(len(self.tid2eid), len(self.weight), generator=generator)
        self.tid2eid.copy_(drawn_VE.topk(self.top_k, dim=1).indices)

    def check_table(self, name: str) -> None:
        """Raise CheckpointError if the table names an expert that is not there."""
        low, high = int(self.tid2eid.min()), int(self.tid2eid.max())
        if low < 0 or high >= len(self.weight):
            raise CheckpointError(
                f"{name}.tid2eid names expert {low if low < 0 else high}; the experts are 0 to"
                f" {len(self.weight) - 1}",
                next="get the file again: the table of experts by tokens is damaged, or of another model",
            )

    def record(self, to: Recording, x: Row) -> Routed:
        raise CannotRecord("a choice by the token")


class NormedRouter(Router):
    """Gemma 4's: z = W n, n = scale · x / (sqrt(mean(x²) + eps) · sqrt(D)); weights · per_expert_scale.

    scale [D] and per_expert_scale [E] come from the checkpoint.
    """

    def add(self, vector: Callable[[int], nn.Parameter]) -> None:
        experts, width = self.weight.shape
        self.scale, self.per_expert_scale = vector(width), vector(experts)

    def logits(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD.float()
        normed_TD = x_TD * (x_TD.square().mean(-1, keepdim=True) + self.routing.eps).rsqrt()
        return super().logits(normed_TD * self.scale.float() * x_TD.shape[1] ** -0.5)

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(scores_TE, ids_TK) * self.per_expert_scale.float()[ids_TK]

    def record_logits(self, to: Recording, x: Row) -> Row:
        gain = self.scale.float() * x.width**-0.5
        return to.program.dots(to.program.norm(x, gain, self.routing.eps), self.weight)

    def per_expert(self) -> Tensor | None:
        return self.per_expert_scale
