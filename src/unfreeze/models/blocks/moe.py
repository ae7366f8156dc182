"""Mixture of experts: a router chooses K of E experts per token; shared experts see every token.

The routers are in routers.py. T tokens, D model width, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.program import Row
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mlp import MLP, FusedMLP, PlainMLP
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import Recording
from unfreeze.models.blocks.routers import HashRouter, Router


class MoE(Block):
    """y = experts(x, ids, weights) (+ shared_experts(x)).

    counts_E    int64: tokens routed to each expert in forward passes; a recomputation does not count again.
    replayed_3  int64: choices that were given to the layer (Pass.route), those of them that its router would
                not have made, and those it made itself because none was given.
    Their reader resets both (train/step.py, once per optimizer step).
    """

    counts_E: Tensor
    replayed_3: Tensor

    def __init__(
        self, layer: int, *, gate: Router, experts: Experts, shared_experts: MLP | FusedMLP | PlainMLP | None
    ):
        super().__init__()
        self.layer, self.gate, self.experts, self.shared_experts = layer, gate, experts, shared_experts
        self.begin_counts()

    def begin_counts(self) -> None:
        """Register the counters, which are never saved."""
        none_E = torch.zeros(self.experts.num_experts, dtype=torch.int64)
        self.register_buffer("counts_E", none_E, persistent=False)
        self.register_buffer("replayed_3", torch.zeros(3, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        scores_TE = self.gate(x_TD)
        ids_TK = self._chosen(scores_TE, run)
        weights_TK = self.gate.weigh(scores_TE, ids_TK)
        shared = None if self.shared_experts is None else partial(self.shared_experts, x_TD, run)
        return self.experts(x_TD, ids_TK, weights_TK, run.reuse_expensive, run.reuse, shared)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · MoE(x)."""
        if factor != 1.0 and add is not None:
            return to.total(self.record(to, x), add, factor)
        if self.shared_experts is not None:
            add = self.shared_experts.record(to, x, add=add)
        return to.total(self.record_experts(to, x, x, add), None, factor)

    def record_experts(
        self, to: Recording, routed_by: Row, x: Row, add: Row | None, scales_input: bool = False
    ) -> Row:
        """add + experts(x), chosen by `routed_by`."""
        routed = self.gate.record(to, routed_by)
        to.chosen[self.layer] = routed.ids
        return self.experts.record(to, x, routed, add=add, scales_input=scales_input)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """The router, the experts for K rows of each token, and the shared experts.

        The router holds its scores in float32. Its backward has the gradient of its float32 input, D, which
        is rounded. If there are shared experts, their input gradient is alive during the experts' backward.
        """
        D, size = self.experts.hidden_size, dtype.itemsize
        router = Bytes(held=4 * self.experts.num_experts, own=(4 + size) * D)
        routed = self.experts.bytes(self.gate.top_k, dtype, device)
        if self.shared_experts is None:
            return router + routed
        routed = replace(routed, own=routed.own + D * size)
        return router + routed + self.shared_experts.bytes(dtype, device)

    def _chosen(self, scores_TE: Tensor, run: Pass) -> Tensor:
        if run.taps is not None and "router" in run.taps.names:
            run.taps.append("router", self.gate.shares(scores_TE))
        choose = self.gate.choose
        if run.noise is not None:
            choose = partial(choose, noise=partial(run.noise, self.layer))
        # Recomputation reuses the ids: rounding could choose other experts.
        ids_TK = run.reuse(lambda: self._counted(choose(scores_TE), run.route(self.layer)))
        run.chose(self.layer, ids_TK)
        return ids_TK

    def _counted(self, own_TK: Tensor, given_TK: Tensor | None) -> Tensor:
        """The given ids where a token has them, else its own; the weights come from the live scores of both.

        A token with one unknown id keeps its own K: a mixture of both could name an expert twice.
        """
        ids_TK = own_TK if given_TK is None else self._replayed(own_TK, given_TK.to(own_TK.dtype))
        ids = ids_TK.flatten()
        self.counts_E.scatter_add_(0, ids, torch.ones_like(ids))  # bincount would make the host wait for CUDA
        return ids_TK

    def _replayed(self, own_TK: Tensor, given_TK: Tensor) -> Tensor:
        known_T1 = given_TK.ge(0).all(1, keepdim=True)
        among_TK = given_TK.unsqueeze(2).eq(own_TK.unsqueeze(1)).any(2)
        known = known_T1.sum() * own_TK.shape[1]
        flipped = (~among_TK & known_T1).sum()
        self.replayed_3 += torch.stack([known, flipped, own_TK.numel() - known])
        return torch.where(known_T1, given_TK, own_TK)


class ReadMoE(MoE):
    """MoE whose output is read in backward, so a recomputed layer computes it again.

    Streams are mixed by weights that train (blocks/streams.py); the next pass of a chain has it as its input
    (blocks/chain.py).
    """

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        scores_TE = self.gate(x_TD)
        ids_TK = self._chosen(scores_TE, run)
        weights_TK = self.gate.weigh(scores_TE, ids_TK)
        assert isinstance(self.shared_experts, MLP | None)
        shared = None if self.shared_experts is None else partial(self.shared_experts.read, x_TD, run)
        return self.experts(x_TD, ids_TK, weights_TK, None, run.reuse, shared)

    def read(self, x_TD: Tensor, run: Pass) -> Tensor:
        """As MLP.read: forward itself."""
        return self(x_TD, run)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As MoE; recomputation keeps no output of the experts, and that of the shared expert's product."""
        counted = super().bytes(dtype, device)
        shared = 0 if self.shared_experts is None else self.experts.hidden_size * dtype.itemsize
        return replace(counted, expensive=0, linear=counted.linear + shared)


class HashMoE(ReadMoE):
    """ReadMoE whose router looks the experts up by the token (DeepSeek-V4's first layers)."""

    gate: HashRouter

    def _chosen(self, scores_TE: Tensor, run: Pass) -> Tensor:
        assert run.tokens_T is not None
        own_TK = self.gate.tid2eid[run.tokens_T]
        ids_TK = run.reuse(lambda: self._counted(own_TK, run.route(self.layer)))
        run.chose(self.layer, ids_TK)
        return ids_TK


class GatedSharedMoE(MoE):
    """y = experts(x, ids, weights) + sigmoid(g · x) · shared_expert(x), as in Qwen2-MoE.

    shared_expert_gate maps D to one number per token. Source: arXiv:2407.10671, 2.2.2.
    """

    def __init__(
        self, layer: int, *, gate: Router, experts: Experts, shared_expert: MLP, shared_expert_gate: Linear
    ):
        super().__init__(layer, gate=gate, experts=experts, shared_experts=None)
        self.shared_expert, self.shared_expert_gate = shared_expert, shared_expert_gate

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        share_T1 = self.shared_expert_gate(x_TD).sigmoid()
        return super().forward(x_TD, run) + share_T1 * self.shared_expert.read(x_TD, run)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        share = self.shared_expert_gate.record(to, x)
        y = self.record_experts(to, x, x, None)
        shared = self.shared_expert.record(to, x)
        return to.total(to.program.combine(y, shared, share=share), add, factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As MoE, plus the shared expert's output, D, which the gate's gradient reads."""
        D, size = self.experts.hidden_size, dtype.itemsize
        gated = Bytes(held=D * size, own=2 * D * size, linear=D * size)
        return super().bytes(dtype, device) + self.shared_expert.bytes(dtype, device) + gated


class InputScaledMoE(MoE):
    """y = Σ_k expert(w_tk x_t) + shared_experts(x): the weight scales an expert's input (Llama 4).

    The expert op sees each slot as a separate token with one expert and weight 1.
    """

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        scores_TE = self.gate(x_TD)
        ids_TK = self._chosen(scores_TE, run)
        weights_TK = self.gate.weigh(scores_TE, ids_TK).to(x_TD.dtype)
        scaled_nD = (x_TD[:, None] * weights_TK[..., None]).flatten(0, 1)
        ids_n1 = ids_TK.flatten()[:, None]
        ones_n1 = torch.ones_like(ids_n1, dtype=torch.float32)
        y_nD = self.experts(scaled_nD, ids_n1, ones_n1, run.reuse_expensive, run.reuse)
        y_TD = y_nD.unflatten(0, ids_TK.shape).sum(1)
        return y_TD if self.shared_experts is None else y_TD + self.shared_experts(x_TD, run)

    def record_experts(
        self, to: Recording, routed_by: Row, x: Row, add: Row | None, scales_input: bool = False
    ) -> Row:
        return super().record_experts(to, routed_by, x, add, scales_input=True)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As MoE, plus K scaled copies of each token and their gradients."""
        scaled = self.gate.top_k * self.experts.hidden_size * dtype.itemsize
        return super().bytes(dtype, device) + Bytes(held=scaled, own=scaled)


class NormedMoE(MoE):
    """y = post_norm(experts(pre_norm(x), ids, weights)), routed by x itself (Gemma 4).

    post_norm's gradient reads the experts' output, so a recomputed layer computes it again.
    """

    def __init__(self, layer: int, *, gate: Router, experts: Experts, pre_norm: RMSNorm, post_norm: RMSNorm):
        super().__init__(layer, gate=gate, experts=experts, shared_experts=None)
        self.pre_norm, self.post_norm = pre_norm, post_norm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        scores_TE = self.gate(x_TD)
        ids_TK = self._chosen(scores_TE, run)
        weights_TK = self.gate.weigh(scores_TE, ids_TK)
        return self.post_norm(self.experts(self.pre_norm(x_TD), ids_TK, weights_TK, None, run.reuse))

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        y = self.record_experts(to, x, self.pre_norm.record(to, x), None)
        return to.total(self.post_norm.record(to, y), add, factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As MoE with the two norms, plus the router's float32 copy of x if x is not float32.

        Recomputation keeps no output of the experts.
        """
        copy = Bytes(held=4 * self.experts.hidden_size * (dtype != torch.float32))
        mixture = replace(super().bytes(dtype, device), expensive=0)
        return self.pre_norm.bytes(dtype, device) + mixture + copy + self.post_norm.bytes(dtype, device)


class LatentMoE(MoE):
    """y = fc2(experts(fc1 x, ids, weights)) + shared_experts(x): experts of a narrower width (Nemotron 3).

    The router sees x itself. fc2's gradients read the experts' output, so a recomputed layer computes it
    again. Source: the model card of Nemotron 3 Super.
    """

    def __init__(
        self,
        layer: int,
        *,
        gate: Router,
        experts: Experts,
        fc1_latent_proj: Linear,
        fc2_latent_proj: Linear,
        shared_experts: PlainMLP,
    ):
        super().__init__(layer, gate=gate, experts=experts, shared_experts=shared_experts)
        self.fc1_latent_proj, self.fc2_latent_proj = fc1_latent_proj, fc2_latent_proj

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        assert self.shared_experts is not None
        scores_TE = self.gate(x_TD)
        ids_TK = self._chosen(scores_TE, run)
        weights_TK = self.gate.weigh(scores_TE, ids_TK)
        low_TL = self.fc1_latent_proj(x_TD, run.reuse_linear)
        y_TL = self.experts(low_TL, ids_TK, weights_TK, None, run.reuse)
        return self.fc2_latent_proj(y_TL, run.reuse_linear) + self.shared_experts(x_TD, run)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As MoE, plus x and the experts' output in the latent width. Recomputation keeps no such output."""
        latent, D, size = self.experts.hidden_size, self.fc1_latent_proj.in_features, dtype.itemsize
        mixture = replace(super().bytes(dtype, device), expensive=0)
        return mixture + Bytes(held=2 * latent * size, own=(latent + D) * size, linear=(latent + D) * size)
