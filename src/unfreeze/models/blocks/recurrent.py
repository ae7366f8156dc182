"""Parts of layers with a recurrent state: short convolution, decay, gated norm.

T tokens, C channels, K taps, H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.kernels.recompute import recomputed
from unfreeze.kernels.rms_norm import rms_norm
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass


class ShortConv(nn.Module):
    """Causal depthwise convolution of K taps, with SiLU or without; `weight` [C, 1, K] as in checkpoints."""

    bias: Tensor | None

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        silu: bool,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.channels, self.taps, self.silu = channels, taps, silu
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, dtype=dtype, device=device))
        empty = nn.Parameter(torch.empty(channels, dtype=dtype, device=device)) if bias else None
        self.register_parameter("bias", empty)

    def forward(self, x_TC: Tensor, run: Pass, name: str) -> Tensor:
        """y [T, C]; `name` is that of its window in a cache."""
        return run.convolve(name, x_TC, self.weight[:, 0], self.bias, silu=self.silu)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row's window."""
        return (self.taps - 1) * self.channels * dtype.itemsize


class Decay(nn.Module):
    """g = -exp(A_log) · softplus(a + dt_bias): the logarithm of a head's decay, at most 0.

    A_log and dt_bias stay in float32, and so does g, whatever the computation's dtype: a decay of 0.999 is 1
    in bf16. A_log [H] and dt_bias [H].
    """

    float32 = True  # parallel/placement/fsdp.py gathers its parameters as they are

    def __init__(self, heads: int, width: int = 1, *, device: torch.device | str):
        super().__init__()
        self.heads = heads
        options = {"dtype": torch.float32, "device": device}
        self.A_log = nn.Parameter(torch.empty(heads, **options))
        self.dt_bias = nn.Parameter(torch.empty(heads * width, **options))

    def forward(self, a_TH: Tensor) -> Tensor:
        """g [T, H] for a [T, H]."""
        return recomputed(_log_decay, a_TH, shared=(self.A_log, self.dt_bias))

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        """First values (Mamba-2's): A uniform in 1 to 16, softplus(dt_bias) log-uniform in .001 to .1."""
        draw = torch.rand(self.dt_bias.shape, generator=generator)
        step = torch.exp(draw * (torch.tensor(0.1).log() - torch.tensor(1e-3).log())) * 1e-3
        A = 1 + 15 * torch.rand(self.A_log.shape, generator=generator)
        return {"dt_bias": step + torch.log(-torch.expm1(-step)), "A_log": A.log()}


class ChannelDecay(Decay):
    """A decay per head and key channel (KDA): A_log is [1, 1, H, 1], as in its releases; dt_bias [H k]."""

    def __init__(self, heads: int, width: int, *, device: torch.device | str):
        super().__init__(heads, width, device=device)
        self.A_log = nn.Parameter(self.A_log.detach()[None, None, :, None])

    def forward(self, a_TH: Tensor) -> Tensor:
        """g [T, H, k] for a [T, H k]."""
        return recomputed(_log_decay_of_channels, a_TH, shared=(self.A_log, self.dt_bias))


def _log_decay(a_TH: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    return -A_log.exp() * F.softplus(a_TH.to(torch.promote_types(a_TH.dtype, torch.float32)) + dt_bias)


def _log_decay_of_channels(a_TH: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    step_TH = F.softplus(a_TH.to(torch.promote_types(a_TH.dtype, torch.float32)) + dt_bias)
    return -A_log.exp()[0] * step_TH.unflatten(-1, (A_log.numel(), -1))


class GatedNorm(RMSNorm):
    """weight · x / sqrt(mean(x²) + eps) · f(gate), f SiLU (Qwen3-Next) or sigmoid (Kimi); x [..., d]."""

    gate = staticmethod(F.silu)

    def forward(self, x_THv: Tensor, gate_THv: Tensor) -> Tensor:  # type: ignore[override]
        def compute(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
            wide = self.gate(gate.to(torch.promote_types(gate.dtype, torch.float32)))
            return (rms_norm(x, weight, self.eps) * wide).to(x.dtype)

        return recomputed(compute, x_THv, gate_THv, shared=(self.weight,))


class SigmoidGatedNorm(GatedNorm):
    gate = staticmethod(torch.sigmoid)
