"""Mixture of experts: a router chooses K of E experts per token; shared experts see every token.

Routing is the same in training and evaluation, runs in fp32, and its weights carry gradients back to the
hidden state (and to the router if it trains). The router of DeepSeek-V3 chooses with a bias that never enters
the weights.

T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.passes import Pass


class SigmoidRouter(nn.Module):
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
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(num_experts, dtype=torch.float32, device=device)
        )
        self.top_k, self.n_group, self.topk_group = top_k, n_group, topk_group
        self.normalize, self.scale = normalize, scale

    def forward(self, x_TD: Tensor) -> Tensor:
        """The scores [T, E]."""
        return F.linear(x_TD.float(), self.weight.float()).sigmoid()

    def choose(self, scores_TE: Tensor) -> Tensor:
        biased_TE = scores_TE.detach() + self.e_score_correction_bias
        if self.n_group > 1:
            grouped = biased_TE.unflatten(-1, (self.n_group, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1).indices
            keep = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            biased_TE = grouped.masked_fill(~keep[..., None], float("-inf")).flatten(1)
        return biased_TE.topk(self.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * self.scale


class SoftmaxRouter(nn.Module):
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
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.top_k, self.normalize = top_k, normalize

    def forward(self, x_TD: Tensor) -> Tensor:
        """The scores [T, E]."""
        return F.linear(x_TD.float(), self.weight.float()).softmax(-1)

    def choose(self, scores_TE: Tensor) -> Tensor:
        return scores_TE.detach().topk(self.top_k, dim=-1).indices

    def weigh(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        weights_TK = scores_TE.gather(1, ids_TK)
        return weights_TK / weights_TK.sum(-1, keepdim=True) if self.normalize else weights_TK


class MoE(Block):
    """y = experts(x, ids, weights) (+ shared_experts(x)).

    counts_E (int64): tokens given to each expert in forward passes; a recomputation does not count again.
    Its reader resets it (train/step.py, once per optimizer step).
    """

    counts_E: Tensor

    def __init__(
        self, layer: int, *, gate: SigmoidRouter | SoftmaxRouter, experts: Experts, shared_experts: MLP | None
    ):
        super().__init__()
        self.layer, self.gate, self.experts, self.shared_experts = layer, gate, experts, shared_experts
        self.register_buffer(
            "counts_E", torch.zeros(experts.num_experts, dtype=torch.int64), persistent=False
        )

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        scores_TE = self.gate(x_TD)
        # Reused when the layer is recomputed: rounding could choose other experts.
        ids_TK = run.reuse(lambda: self._choose(scores_TE))
        y_TD = self.experts(x_TD, ids_TK, self.gate.weigh(scores_TE, ids_TK), run.reuse_expensive)
        return y_TD if self.shared_experts is None else y_TD + self.shared_experts(x_TD, run)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """The router, the experts for K rows of each token, and the shared experts.

        Of the router the scores in float32, and in its backward the gradient of its float32 input, D, which
        is rounded. Where there are shared experts, the gradient that they give is there during the experts'.
        """
        D, size = self.experts.hidden_size, dtype.itemsize
        router = Bytes(held=4 * self.experts.num_experts, own=(4 + size) * D)
        routed = self.experts.bytes(self.gate.top_k, dtype, device)
        if self.shared_experts is None:
            return router + routed
        routed = replace(routed, own=routed.own + D * size)
        return router + routed + self.shared_experts.bytes(dtype, device)

    def _choose(self, scores_TE: Tensor) -> Tensor:
        ids_TK = self.gate.choose(scores_TE)
        ids = ids_TK.flatten()
        self.counts_E.scatter_add_(0, ids, torch.ones_like(ids))  # bincount would make the host wait for CUDA
        return ids_TK
