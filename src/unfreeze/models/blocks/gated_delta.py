"""Gated DeltaNet: attention whose memory is one matrix per head (Qwen3-Next, Qwen3.5).

T tokens, D model width, G key heads, H value heads (J = H / G per key head), k and v their widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.recompute import work_bytes
from unfreeze.kernels.recurrence import Inputs, Rule, carried_bytes, workspace_bytes
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recurrent import Decay, GatedNorm, ShortConv


class GatedDeltaNet(Block):
    """out_proj(norm(o, z)), o the gated delta rule of q, k, v = silu(conv(…)) (kernels/recurrence).

    q and k have length 1, q is scaled by 1/sqrt(k); β = sigmoid(b); the decay is that of `Decay`.
    Source: arXiv:2412.06464.
    """

    in_proj_qkv: Linear
    in_proj_z: Linear
    in_proj_b: Linear
    in_proj_a: Linear

    def __init__(
        self,
        layer: int,
        heads: tuple[int, int],
        widths: tuple[int, int],
        *,
        conv1d: ShortConv,
        decay: Decay,
        norm: GatedNorm,
        out_proj: Linear,
        **projections: Linear,
    ):
        super().__init__()
        self.name = f"{layer}.linear_attn"
        self.key_heads, self.value_heads = heads
        self.key_width, self.value_width = widths
        self.rule = Rule(self.key_width**-0.5, normalized=True)
        self.conv1d, self.decay = conv1d, decay
        for name, projection in projections.items():
            self.add_module(name, projection)
        self.norm, self.out_proj = norm, out_proj

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        mixed_TC, z_THv, b_TH, a_TH = self.project(x_TD, run)
        mixed_TC = self.conv1d(mixed_TC, run, f"{self.name}.conv")
        G, H, k, v = self.key_heads, self.value_heads, self.key_width, self.value_width
        q_TC, k_TC, v_TC = mixed_TC.split((G * k, G * k, H * v), -1)
        q_TGk, k_TGk, v_THv = (
            part.unflatten(-1, (-1, width)) for part, width in ((q_TC, k), (k_TC, k), (v_TC, v))
        )
        inputs = Inputs(q_TGk, k_TGk, v_THv, self.decay(a_TH), b_TH.sigmoid())
        o_THv = run.recur(self.name, inputs, self.rule)
        return self.out_proj(self.norm(o_THv, z_THv).flatten(1), run.reuse_linear)

    def project(self, x_TD: Tensor, run: Pass) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k and v side by side [T, 2 G k + H v], z [T, H, v], b [T, H], a [T, H])."""
        mixed_TC, z_TC, b_TH, a_TH = (
            projection(x_TD, run.reuse_linear)
            for projection in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        )
        return mixed_TC, z_TC.unflatten(-1, (self.value_heads, -1)), b_TH, a_TH

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row's state, in float32, and of its convolution's window."""
        state = 4 * self.value_heads * self.key_width * self.value_width
        return state + self.conv1d.state_bytes(dtype)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: input and output of the convolution, z, o, o normed and gated, β, b, a, g, carried states.

        Own: the gradient of the convolution's output, once those of o and z have taken their places.
        Recomputation keeps o and, with its linear layers, the products.
        """
        size, C, z = dtype.itemsize, self.conv1d.channels, self.value_heads * self.value_width
        G, H, k, v = self.key_heads, self.value_heads, self.key_width, self.value_width
        carried = carried_bytes(H, k, v, device)
        return Bytes(
            held=(2 * C + 3 * z + 3 * H) * size + 4 * H + carried,
            own=C * size,
            expensive=z * size + carried,
            linear=(C + z + 2 * H) * size,
            scratch=max(work_bytes(device), workspace_bytes(G, H, k, v, device, "delta")),
        )


class FusedGatedDeltaNet(GatedDeltaNet):
    """With two projections whose rows are grouped by key head: q, k, v, z and b, a (Qwen3-Next)."""

    in_proj_qkvz: Linear
    in_proj_ba: Linear

    def project(self, x_TD: Tensor, run: Pass) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        J, k, v = self.value_heads // self.key_heads, self.key_width, self.value_width
        both_TGw = self.in_proj_qkvz(x_TD, run.reuse_linear).unflatten(-1, (self.key_heads, -1))
        q_TGw, k_TGw, v_TGw, z_TGw = both_TGw.split((k, k, J * v, J * v), -1)
        b_TGJ, a_TGJ = (
            self.in_proj_ba(x_TD, run.reuse_linear).unflatten(-1, (self.key_heads, -1)).chunk(2, -1)
        )
        mixed_TC = torch.cat([part.flatten(1) for part in (q_TGw, k_TGw, v_TGw)], -1)
        # a copy: a view of z would keep the whole product alive until backward
        z_THv = z_TGw.contiguous().view(len(x_TD), self.value_heads, v)
        return mixed_TC, z_THv, b_TGJ.flatten(1), a_TGJ.flatten(1)
