"""Kimi Delta Attention (KDA): the gated delta rule with a decay per head and key channel (Kimi Linear).

T tokens, D model width, H heads, k the width of a head's queries, keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.recompute import work_bytes
from unfreeze.kernels.recurrence import Inputs, Rule, carried_bytes, workspace_bytes
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recurrent import ChannelDecay, ShortConv, SigmoidGatedNorm


class KimiDeltaAttention(Block):
    """o_proj(norm(o, g_b(g_a x))), o the delta rule (kernels/recurrence) of q, k, v = silu(conv(… x)).

    q and k have length 1, q is scaled by 1/sqrt(k); β = sigmoid(b_proj x); the decay is that of f_b(f_a x).
    Source: arXiv:2510.26692.
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    q_conv1d: ShortConv
    k_conv1d: ShortConv
    v_conv1d: ShortConv
    f_a_proj: Linear
    f_b_proj: Linear
    b_proj: Linear
    g_a_proj: Linear
    g_b_proj: Linear
    o_proj: Linear

    def __init__(
        self,
        layer: int,
        heads: int,
        width: int,
        *,
        decay: ChannelDecay,
        o_norm: SigmoidGatedNorm,
        **parts: Linear | ShortConv,
    ):
        super().__init__()
        self.name, self.heads, self.width = f"{layer}.self_attn", heads, width
        self.rule = Rule(width**-0.5, normalized=True)
        for name, part in parts.items():
            self.add_module(name, part)
        self.decay, self.o_norm = decay, o_norm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        # q, k and v, each with the window of its own convolution
        q_THk, k_THk, v_THk = (
            conv(projection(x_TD, run.reuse_linear), run, f"{self.name}.{name}").unflatten(
                -1, (self.heads, -1)
            )
            for name, projection, conv in (
                ("q", self.q_proj, self.q_conv1d),
                ("k", self.k_proj, self.k_conv1d),
                ("v", self.v_proj, self.v_conv1d),
            )
        )

        # the decay of each channel and the gate of the output go through pairs of low rank
        low_Tk = self.f_a_proj(x_TD, run.reuse_linear)
        g_THk = self.decay(self.f_b_proj(low_Tk, run.reuse_linear))
        b_TH = self.b_proj(x_TD, run.reuse_linear).sigmoid()
        o_THk = run.recur(self.name, Inputs(q_THk, k_THk, v_THk, g_THk, b_TH), self.rule)
        low_Tk = self.g_a_proj(x_TD, run.reuse_linear)
        gate_THk = self.g_b_proj(low_Tk, run.reuse_linear).unflatten(-1, (self.heads, -1))
        return self.o_proj(self.o_norm(o_THk, gate_THk).flatten(1), run.reuse_linear)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row's state, in float32, and of the windows of its three convolutions."""
        windows = (conv.state_bytes(dtype) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d))
        return 4 * self.heads * self.width**2 + sum(windows)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: input and output of the convolutions, f, g, the gate, o, o normed and gated, β, low ranks.

        Own: gradients of q, k, v and, in float32, of g. Recomputation keeps o and, with its linear layers,
        the products.
        """
        size, H, k = dtype.itemsize, self.heads, self.width
        C = H * k
        carried = carried_bytes(H, k, k, device)
        return Bytes(
            held=(10 * C + 2 * k + H) * size + 4 * C + carried,
            own=(3 * size + 4) * C,
            expensive=C * size + carried,
            linear=(5 * C + 2 * k + H) * size,
            scratch=max(work_bytes(device), workspace_bytes(H, H, k, k, device, "channel")),
        )
