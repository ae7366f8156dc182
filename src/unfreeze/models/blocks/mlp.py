"""The dense SwiGLU MLP. T tokens, D model width, I intermediate width."""

from __future__ import annotations

from torch import Tensor, nn

from unfreeze.kernels.swiglu import swiglu
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.passes import Pass


class MLP(nn.Module):
    """y = down(silu(gate x) · up x). Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, *, gate_proj: Linear, up_proj: Linear, down_proj: Linear):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x_TD: Tensor, run: Pass | None = None) -> Tensor:
        kept = run.products if run is not None else None
        return self.down_proj(swiglu(self.gate_proj(x_TD, kept), self.up_proj(x_TD, kept)), kept)
