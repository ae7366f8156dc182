"""The routed experts of one layer, stacked: y_t = Σ_k w_tk · down_e(silu(gate_e x_t) · up_e x_t), e = ids_tk.

T tokens, K experts per token, E experts, D model width, I expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.kernels.expert_mlp import ExpertFactors, Kept, expert_mlp
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.quant.codec import Codec, Packed


class ExpertWeight(PackedHolder):
    """One projection of all E experts: `weight` [E, out, in], or the codec's packed parts with a leading E."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, codec: Codec | None, dtype: Any, device: Any):
        super().__init__()
        self.codec = codec
        if codec is None:
            self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, dtype=dtype, device=device))
        else:
            self.register_packed(codec, out_features, in_features, (num_experts,), device)

    def value(self) -> Tensor | Packed:
        return self.weight if self.codec is None else self.packed


class Experts(nn.Module):
    """E SwiGLU experts. gate and up are stacked on the output dimension, gate first: gate_up_proj [E, 2I, D], down_proj [E, D, I].

    `adapter` is None or a module whose `factors()` gives the low-rank factors of every expert (see kernels/expert_mlp).
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, *, codec: Codec | None, dtype: Any, device: Any):
        super().__init__()
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        make: dict[str, Any] = {"codec": codec, "dtype": dtype, "device": device}
        self.gate_up_proj = ExpertWeight(num_experts, hidden_size, 2 * intermediate_size, **make)
        self.down_proj = ExpertWeight(num_experts, intermediate_size, hidden_size, **make)
        self.adapter: nn.Module | None = None
        self.impl = "auto"

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, kept: Kept | None = None) -> Tensor:
        factors: ExpertFactors | None = None if self.adapter is None else self.adapter.factors()  # type: ignore[operator]
        base = (self.gate_up_proj.value(), self.down_proj.value())
        return expert_mlp(x_TD, ids_TK, weights_TK, *base, factors, impl=self.impl, kept=kept)  # type: ignore[arg-type]
