"""Mamba-2: a recurrent state per head whose decay and input depend on the token (Nemotron-H, Granite 4).

T tokens, D model width, G groups, H heads (a multiple of G), k state size, v head width, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.kernels.recompute import recomputed, work_bytes
from unfreeze.kernels.recurrence import Inputs, Rule, carried_bytes, workspace_bytes
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recurrent import Decay, ShortConv


class Step(Decay):
    """dt = softplus(a + dt_bias) within `limits`, and g = -exp(A_log) · dt. `D` [H] is the skip's weight.

    All in float32. Source: arXiv:2405.21060; `limits` is config.json's time_step_limit.
    """

    def __init__(self, heads: int, limits: tuple[float, float], *, device: torch.device | str):
        super().__init__(heads, device=device)
        self.limits = limits
        self.D = nn.Parameter(torch.empty(heads, dtype=torch.float32, device=device))

    def forward(self, a_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """(dt [T, H], g [T, H], D [H]) in float32 at least. D is a copy: FSDP2 frees gathered parameters."""
        dt_TH = recomputed(self._step, a_TH, shared=(self.dt_bias,))
        return dt_TH, dt_TH * -self.A_log.exp(), self.D.clone()

    def _step(self, a_TH: Tensor, dt_bias_H: Tensor) -> Tensor:
        wide_TH = a_TH.to(torch.promote_types(a_TH.dtype, torch.float32))
        return F.softplus(wide_TH + dt_bias_H).clamp(*self.limits)

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {**super().drawn(generator), "D": torch.ones(self.D.shape)}


class GroupedNorm(RMSNorm):
    """norm((o + D x) · silu(z)), an RMSNorm over each of `groups` equal parts of the heads' channels.

    Source: arXiv:2405.21060, section 7; the gate comes before the norm.
    """

    groups = 1

    def forward(self, o_THv: Tensor, x_THv: Tensor, z_TC: Tensor, D_H: Tensor) -> Tensor:  # type: ignore[override]
        """[T, H v] in o's dtype; the arithmetic is in float32."""
        return recomputed(self._gated, o_THv, x_THv, z_TC, shared=(D_H, self.weight))

    def _gated(self, o_THv: Tensor, x_THv: Tensor, z_TC: Tensor, D_H: Tensor, weight_C: Tensor) -> Tensor:
        wide = torch.promote_types(o_THv.dtype, torch.float32)
        y_TC = (o_THv.to(wide) + D_H[:, None] * x_THv).flatten(1) * F.silu(z_TC.to(wide))
        y_TGc = y_TC.unflatten(1, (self.groups, -1))
        y_TGc = y_TGc * torch.rsqrt(y_TGc.square().mean(-1, keepdim=True) + self.eps)
        return (weight_C * y_TGc.flatten(1)).to(o_THv.dtype)


class Mamba2(Block):
    """out_proj(norm((o + D x) · silu(z))), o the state space of x, B and C (kernels/recurrence).

    in_proj gives z [H v], x [H v], B [G k], C [G k] and a [H] side by side; x, B and C pass a short
    convolution with SiLU. A head adds dt · x under key B, decays by exp(g), and is read by C.
    Source: arXiv:2405.21060.
    """

    def __init__(
        self,
        name: str,
        heads: tuple[int, int],
        widths: tuple[int, int],
        *,
        in_proj: Linear,
        conv1d: ShortConv,
        decay: Step,
        norm: GroupedNorm,
        out_proj: Linear,
    ):
        """name: of its state in a cache. heads: (G, H). widths: (k, v)."""
        super().__init__()
        self.name, self.heads, self.widths = name, heads, widths
        self.in_proj, self.conv1d, self.decay = in_proj, conv1d, decay
        self.norm, self.out_proj = norm, out_proj
        norm.groups = heads[0]

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        (G, H), (k, v) = self.heads, self.widths
        z_TC, mixed_TC, a_TH = self.in_proj(x_TD, run.reuse_linear).split((H * v, H * v + 2 * G * k, H), -1)
        mixed_TC = self.conv1d(mixed_TC, run, f"{self.name}.conv")
        x_THv, B_TGk, C_TGk = (
            part.unflatten(-1, (-1, width))
            for part, width in zip(mixed_TC.split((H * v, G * k, G * k), -1), (v, k, k), strict=True)
        )
        dt_TH, g_TH, D_H = self.decay(a_TH)
        added_THv = recomputed(_times, x_THv, dt_TH)
        o_THv = run.recur(self.name, Inputs(C_TGk, B_TGk, added_THv, g_TH, None), Rule())
        return self.out_proj(self.norm(o_THv, x_THv, z_TC, D_H), run.reuse_linear)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row's state, in float32, and of its convolution's window."""
        return 4 * self.heads[1] * self.widths[0] * self.widths[1] + self.conv1d.state_bytes(dtype)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: in_proj's product, the convolution's output, dt x, o, its norm, dt, g, carried states.

        Own: gradients of z and of in_proj's product, into which those of its parts are copied.
        """
        (G, H), (k, v) = self.heads, self.widths
        size, C, z = dtype.itemsize, self.conv1d.channels, H * v
        product = self.in_proj.out_features
        carried = carried_bytes(H, k, v, device)
        return Bytes(
            held=(product + C + 3 * z) * size + 8 * H + carried,
            own=(product + z) * size,
            expensive=z * size + carried,
            linear=product * size,
            scratch=max(work_bytes(device), workspace_bytes(G, H, k, v, device, "additive")),
        )


def _times(x_THv: Tensor, dt_TH: Tensor) -> Tensor:
    """dt · x in x's dtype."""
    return (x_THv * dt_TH[..., None]).to(x_THv.dtype)
