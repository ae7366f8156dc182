"""The gated delta rule in the place of grouped-query attention: a matrix per head instead of a KV cache.

T tokens, D model width, H query heads, G key heads (J = H / G query heads each), d their width, K taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.recompute import work_bytes
from unfreeze.kernels.recurrence import Inputs, Rule, carried_bytes, workspace_bytes
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recurrent import Decay, ShortConv


class LatestConv(ShortConv):
    """A short convolution that begins as SiLU of the latest token, so that copied projections keep effect."""

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """First values: 1 for the latest token, 0 for those before it."""
        weight = torch.zeros(self.weight.shape)
        weight[..., -1] = 1
        return {"weight": weight}


class DeltaAttention(Block):
    """o_proj(norm(o) · silu(g_proj x)), o of H states S [d, d] that begin at 0 with each document.

        q, k, v = f(q_proj x), f(k_proj x), f(v_proj x)      f: silu(conv(·)) with K taps, or nothing
        q̂ = q / (|q| √d),  k̂ = k / |k|                       per head; q_norm and k_norm first, if any
        β = sigmoid(b_proj x),  a = exp(-exp(A_log) · softplus(a_proj x + dt_bias))     per query head
        S ← a S,   S ← S + β k̂ (v - Sᵀ k̂)ᵀ,   o = Sᵀ q̂

    Query head h has a state of its own, written with key and value of its group, h // J, as grouped-query
    attention repeats them. β and a are its own, so the J states of a group differ. Nothing rotates: the order
    of the writes and the decay carry the position. Without g_proj the output is o_proj(norm(o)).

    Source: arXiv:2412.06464 (rule, convolutions, gate). Its first values are Mamba-2's.
    """

    g_proj: Linear | None

    def __init__(
        self,
        layer: int,
        head_dim: int,
        *,
        projections: dict[str, Linear],
        convolutions: dict[str, LatestConv],
        norms: dict[str, RMSNorm],
        decay: Decay,
        o_norm: RMSNorm,
    ):
        """projections: q_proj, k_proj, v_proj, b_proj, a_proj, g_proj or none, o_proj.

        convolutions: q_conv1d, k_conv1d, v_conv1d, or none. norms: q_norm, k_norm, or none.
        """
        super().__init__()
        self.name, self.head_dim = f"{layer}.self_attn", head_dim
        self.rule = Rule(head_dim**-0.5, normalized=True)
        for name, part in {**projections, **convolutions, **norms}.items():
            self.add_module(name, part)
        if "g_proj" not in projections:
            self.g_proj = None
        self.decay, self.o_norm = decay, o_norm
        self.heads = projections["q_proj"].out_features // head_dim
        self.key_heads = projections["k_proj"].out_features // head_dim

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        q_THd, k_TGd, v_TGd = (self.prepared(name, x_TD, run) for name in "qkv")
        J = self.heads // self.key_heads
        k_THd, v_THd = (k_TGd, v_TGd) if J == 1 else (x.repeat_interleave(J, 1) for x in (k_TGd, v_TGd))
        g_TH = self.decay(self.linear("a_proj")(x_TD, run.reuse_linear))
        beta_TH = self.linear("b_proj")(x_TD, run.reuse_linear).sigmoid()
        o_THd = run.recur(self.name, Inputs(q_THd, k_THd, v_THd, g_TH, beta_TH), self.rule)
        if self.g_proj is None:
            o_THd = self.o_norm(o_THd)
        else:
            gate_THd = self.g_proj(x_TD, run.reuse_linear).unflatten(-1, (-1, self.head_dim))
            o_THd = self.o_norm(o_THd, gate_THd)
        return self.linear("o_proj")(o_THd.flatten(1), run.reuse_linear)

    def prepared(self, name: str, x_TD: Tensor, run: Pass) -> Tensor:
        """q, k or v of all tokens before it is divided by its length, [T, heads, d]."""
        y_TC = self.linear(f"{name}_proj")(x_TD, run.reuse_linear)
        conv, norm = self._modules.get(f"{name}_conv1d"), self._modules.get(f"{name}_norm")
        if conv is not None:
            y_TC = conv(y_TC, run, f"{self.name}.{name}")
        y_Thd = y_TC.unflatten(-1, (-1, self.head_dim))
        return y_Thd if norm is None else norm(y_Thd)

    def linear(self, name: str) -> Linear:
        """The projection of that name."""
        part = self._modules[name]
        assert isinstance(part, Linear)
        return part

    @property
    def taps(self) -> int:
        """Taps of the short convolutions; 0 without."""
        conv = self._modules.get("q_conv1d")
        return conv.taps if isinstance(conv, ShortConv) else 0

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row's states, in float32, and of the windows of its convolutions."""
        d = self.head_dim
        windows = max(0, self.taps - 1) * (self.heads + 2 * self.key_heads) * d * dtype.itemsize
        return 4 * self.heads * d * d + windows

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: q, k and v as projected, normed and repeated; o, the gate, o normed; β, b, a, g, states.

        Own: gradients of q, k and v as the rule takes them. Recomputation keeps o and, with its linear
        layers, the products.
        """
        size, H, G, d = dtype.itemsize, self.heads, self.key_heads, self.head_dim
        normed, gated = "q_norm" in self._modules, self.g_proj is not None
        carried = carried_bytes(H, d, d, device)
        projected = (H + 2 * G) * d
        before = projected if self.taps else 0  # what the convolutions keep
        before += (H + G) * d if normed else 0
        return Bytes(
            held=(before + (5 + gated) * H * d + 2 * H) * size + 4 * H + carried,
            own=3 * H * d * size,
            expensive=H * d * size + carried,
            linear=(projected + gated * H * d + 2 * H) * size,
            scratch=max(work_bytes(device), workspace_bytes(H, H, d, d, device, "delta")),
        )
