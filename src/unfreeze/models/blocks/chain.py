"""Chain of Experts: C passes of a token through one pool of experts, one after the other.

    with norms     x_t = x_(t-1) + MoE_t(norm_t(x_(t-1))),  t = 1 to C
    without        z_0 = norm(x), z_t = MoE_t(z_(t-1)) [+ z_(t-1)],  y = z_C [+ x]

MoE_t has the layer's experts and shared experts, and a gate of its own, or the first pass's. With norms and
C = 1 a layer is that of a mixture of experts. Without norms and without x in y the residual stream becomes
the normalised activation, which is what the published code does (inner_residual true, outer_residual false).
Source: arXiv:2506.18945.

A layer whose next pass reads a pass's output computes that output again in a recomputation.
T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from unfreeze.kernels.decode_step.program import Row
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.moe import MoE, ReadMoE
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import Recording
from unfreeze.models.blocks.routers import Router
from unfreeze.models.layer import Layer


class Again(MoE):
    """A later pass through the experts of `first`, with counts of its own.

    gate  its own; None: the first pass's
    norm  of its input; None: it has none
    """

    def __init__(self, layer: int, first: MoE, gate: Router | None, norm: RMSNorm | None):
        Block.__init__(self)
        self.layer = layer
        parts = {"experts": first.experts, "shared_experts": first.shared_experts}
        for name, part in parts.items() if gate is not None else {**parts, "gate": first.gate}.items():
            object.__setattr__(self, name, part)  # not a submodule: a weight has one name and one gradient
        if gate is not None:
            self.gate = gate
        if norm is not None:
            self.norm = norm
        self.begin_counts()

    @property
    def owns_gate(self) -> bool:
        return "gate" in self._modules

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As MoE; the workspace is the first pass's."""
        counted = super().bytes(dtype, device)
        return replace(counted, scratch=0, scratch_per_rank=0, adapter_per_rank=0)


class AgainRead(Again, ReadMoE):
    """A later pass that is not the last."""


def again_of(layer: nn.Module) -> Sequence[Again]:
    """Return the later passes of a layer, in order; none unless it is a chain."""
    return cast("Sequence[Again]", list(getattr(layer, "passes", nn.ModuleDict()).values()))


class ChainLayer(Layer):
    """x + attention(norm(x)), then C times x + MoE_t(norm_t(x)). The first norm is post_attention_layernorm.

    mlp is the first pass, `passes` has the later ones by number, from 1 on.
    """

    mlp: MoE

    def __init__(self, *, passes: Sequence[Again], **parts: Any):
        super().__init__(**parts)
        self.passes = nn.ModuleDict({str(number): again for number, again in enumerate(passes, 1)})

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        x_TD = super().forward(x_TD, run)
        for again in again_of(self):
            x_TD = x_TD + again(again.norm(x_TD), run)
        return x_TD

    def record(self, to: Recording, x: Row) -> Row:
        x = super().record(to, x)
        for again in again_of(self):
            x = to.of(again, again.norm.record(to, x), add=x)
        return x

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As Layer, and D for the sum after each later pass beside its parts."""
        counted = super().bytes(dtype, device)
        for again in again_of(self):
            sums = Bytes(held=dtype.itemsize * self.input_layernorm.size)
            counted = counted + sums + again.norm.bytes(dtype, device) + again.bytes(dtype, device)
        return counted


class InnerChainLayer(ChainLayer):
    """x + attention(norm(x)) = u; then z = norm(u), C times z = MoE_t(z) [+ z], and y = z [+ u].

    inner  True: each pass adds its input
    outer  True: the layer adds u, the residual stream
    """

    def __init__(self, *, inner: bool, outer: bool, **parts: Any):
        super().__init__(**parts)
        self.inner, self.outer = inner, outer

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        u_TD = x_TD + self.attention(self.input_layernorm(x_TD), run)
        z_TD = self.post_attention_layernorm(u_TD)
        for mixture in (self.mlp, *again_of(self)):
            y_TD = mixture(z_TD, run)
            z_TD = z_TD + y_TD if self.inner else y_TD
        return u_TD + z_TD if self.outer else z_TD

    def record(self, to: Recording, x: Row) -> Row:
        u = to.of(self.attention, self.input_layernorm.record(to, x), add=x)
        z = self.post_attention_layernorm.record(to, u)
        for mixture in (self.mlp, *again_of(self)):
            z = to.of(mixture, z, add=z if self.inner else None)
        return to.program.combine(u, z) if self.outer else z

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As Layer, and for each later pass its parts, and D for its input."""
        counted = Layer.bytes(self, dtype, device)
        for again in again_of(self):
            sums = Bytes(held=dtype.itemsize * self.input_layernorm.size)
            counted = counted + sums + again.bytes(dtype, device)
        return counted
