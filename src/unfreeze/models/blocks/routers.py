"""Routers: which K of the E experts a token goes to, and with which weights.

Routing is the same in training and evaluation, runs in fp32, and its weights carry gradients back to the
hidden state (and to the router if it trains). A selection bias chooses and never enters the weights.

T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Router(nn.Module):
    """scores(x) [T, E] -> the chosen ids [T, K] -> their weights [T, K]; three steps, as a recomputed layer
    reuses the ids. `weight` [E, D]."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.top_k = top_k

    def forward(self, x_TD: Tensor) -> Tensor:
        """The scores [T, E] in float32."""
        raise NotImplementedError

    def choose(self, scores_TE: Tensor) -> Tensor:
        """ids [T, K]: the K largest scores."""
        return scores_TE.detach().topk(self.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """The weights [T, K] of the chosen: their scores."""
        return scores_TE.gather(1, ids_TK)

    def logits(self, x_TD: Tensor) -> Tensor:
        """W x in float32, [T, E]."""
        return F.linear(x_TD.float(), self.weight.float())


def best_groups(scores_TE: Tensor, of_group_TG: Tensor, topk_group: int) -> Tensor:
    """scores_TE, -inf outside the `topk_group` groups with the largest of_group; G groups of E/G experts."""
    keep_TG = torch.zeros_like(of_group_TG, dtype=torch.bool)
    keep_TG.scatter_(1, of_group_TG.topk(topk_group, dim=-1).indices, True)
    grouped = scores_TE.unflatten(-1, (of_group_TG.shape[1], -1))
    return grouped.masked_fill(~keep_TG[..., None], float("-inf")).flatten(1)


class SigmoidRouter(Router):
    """DeepSeek-V3's "noaux_tc" routing.

    s = sigmoid(W x); the K experts with the largest s + bias within the best groups; weights s / Σ s · scale.

    There are n_group groups of E/n_group experts. A group's score is the sum of its two largest s + bias;
    the topk_group best groups stay. e_score_correction_bias [E] fp32 selects and never weighs.
    Source: arXiv:2412.19437, 2.1.2.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        n_group: int,
        topk_group: int,
        normalize: bool,
        scale: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(hidden_size, num_experts, top_k, dtype=dtype, device=device)
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(num_experts, dtype=torch.float32, device=device)
        )
        self.n_group, self.topk_group = n_group, topk_group
        self.normalize, self.scale = normalize, scale

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.logits(x_TD).sigmoid()

    def choose(self, scores_TE: Tensor) -> Tensor:
        biased_TE = scores_TE.detach() + self.e_score_correction_bias
        if self.n_group > 1:
            of_group_TG = biased_TE.unflatten(-1, (self.n_group, -1)).topk(2, dim=-1).values.sum(-1)
            biased_TE = best_groups(biased_TE, of_group_TG, self.topk_group)
        return biased_TE.topk(self.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * self.scale


class SoftmaxRouter(Router):
    """Qwen3-MoE's: p = softmax(W x), the K largest, optionally renormalised to sum to one.

    Source: the Qwen3 report.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(hidden_size, num_experts, top_k, dtype=dtype, device=device)
        self.normalize = normalize

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.logits(x_TD).softmax(-1)

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        return weights_TK / weights_TK.sum(-1, keepdim=True) if self.normalize else weights_TK


class GroupedSoftmaxRouter(Router):
    """p = softmax(W x); the K largest within the topk_group best of n_group groups; weights p · scale.

    A group's score is the sum of its `best` largest p: 1 in DeepSeek-V2 ("group_limited_greedy"), 2 in
    Mistral 4. `normalize`: p over the sum of the chosen. Source: arXiv:2405.04434, 2.1.3.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        n_group: int,
        topk_group: int,
        best: int,
        normalize: bool,
        scale: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(hidden_size, num_experts, top_k, dtype=dtype, device=device)
        self.n_group, self.topk_group, self.best = n_group, topk_group, best
        self.normalize, self.scale = normalize, scale

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.logits(x_TD).softmax(-1)

    def choose(self, scores_TE: Tensor) -> Tensor:
        scores_TE = scores_TE.detach()
        if self.n_group > 1:
            grouped = scores_TE.unflatten(-1, (self.n_group, -1))
            of_group_TG = grouped.topk(self.best, dim=-1).values.sum(-1)
            scores_TE = best_groups(scores_TE, of_group_TG, self.topk_group)
        return scores_TE.topk(self.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * self.scale


class BiasedSoftmaxRouter(Router):
    """ERNIE 4.5's: p = softmax(W x); the K largest p + bias; weights p / max(Σ p, smallest).

    e_score_correction_bias [1, E] fp32, as it is stored, selects and never weighs.
    """

    e_score_correction_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        smallest: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(hidden_size, num_experts, top_k, dtype=dtype, device=device)
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(1, num_experts, dtype=torch.float32, device=device)
        )
        self.smallest = smallest

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.logits(x_TD).softmax(-1)

    def choose(self, scores_TE: Tensor) -> Tensor:
        return (scores_TE.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        return weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=self.smallest)


class LinearSoftmaxRouter(SoftmaxRouter):
    """gpt-oss's: z = W x + b, the K largest, weights softmax over the chosen.

    That is softmax over all, renormalised: the others' share cancels.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(hidden_size, num_experts, top_k, normalize=True, dtype=dtype, device=device)
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device))

    def logits(self, x_TD: Tensor) -> Tensor:
        return F.linear(x_TD.float(), self.weight.float(), self.bias.float())


class ChosenSigmoidRouter(Router):
    """Llama 4's: z = W x, the K largest; weights sigmoid(z)."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.logits(x_TD)

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return scores_TE.gather(1, ids_TK).sigmoid()


class ScaledSoftmaxRouter(SoftmaxRouter):
    """Gemma 4's: p = softmax(W n), n = scale · x / (sqrt(mean(x²) + eps) · sqrt(D)), the K largest.

    Weights p / Σ p · per_expert_scale, the sum over the chosen. scale [D] and per_expert_scale [E] are of the
    release.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__(hidden_size, num_experts, top_k, normalize=True, dtype=dtype, device=device)
        self.scale = nn.Parameter(torch.empty(hidden_size, dtype=dtype, device=device))
        self.per_expert_scale = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device))
        self.eps = eps

    def logits(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD.float()
        normed_TD = x_TD * (x_TD.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return super().logits(normed_TD * self.scale.float() * x_TD.shape[1] ** -0.5)

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        return super().weigh(scores_TE, ids_TK) * self.per_expert_scale.float()[ids_TK]
