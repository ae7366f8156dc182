"""The expert MLP in plain torch and plain autograd: the oracle of the fused op, and its baseline.

T tokens, D width, E experts, K experts per token, I intermediate width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation
from unfreeze.quant.codec import Packed


def reference_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    factors: ExpertFactors | None = None,
    reuse: Reuse | None = None,
    activation: Activation = SWIGLU,
    gate_up_bias: Tensor | None = None,
) -> Tensor:
    """y_t = Σ_k w_tk · down_e( a(gate_e x_t, up_e x_t) ), e = ids_tk, one expert after the other.

    Shapes as in `expert_mlp`. Base and adapter are separate GEMMs, so B = 0 changes no bit. Autograd keeps
    each expanded expert until backward, so this is for small shapes; `reuse` is ignored.
    """
    lora = factors or ExpertFactors()
    y_TD = torch.zeros_like(x_TD, dtype=torch.promote_types(x_TD.dtype, torch.float32))
    for expert in torch.unique(ids_TK).tolist():
        token, slot = torch.where(ids_TK == expert)
        x = x_TD[token]
        # contiguous halves: silu of a strided view rounds differently from silu of the sums below, and B = 0
        # must change no bit
        bias = None if gate_up_bias is None else gate_up_bias[expert].to(x.dtype)
        both = F.linear(x, _matrix(gate_up, expert, x.dtype), bias)
        gate, up = (half.contiguous() for half in activation.split(both))
        if lora.gate_up_A is not None and lora.gate_up_B is not None:
            parts = len(activation.projections)
            pairs = zip(
                lora.gate_up_A[expert].to(x.dtype).chunk(parts),
                lora.gate_up_B[expert].to(x.dtype).chunk(parts),
                strict=True,
            )
            added = [lora.scale * F.linear(F.linear(x, A), B) for A, B in pairs]
            gate = gate + added[0]
            up = up + added[1] if parts == 2 else up
        h = activation.forward(gate, up)
        y = F.linear(h, _matrix(down, expert, x.dtype))
        if lora.down_A is not None and lora.down_B is not None:
            y = y + lora.down_scale * F.linear(
                F.linear(h, lora.down_A[expert].to(x.dtype)), lora.down_B[expert].to(x.dtype)
            )
        y_TD = y_TD.index_add(0, token, weights_TK[token, slot, None].to(y_TD.dtype) * y)
    return y_TD.to(x_TD.dtype)


def _matrix(base: Tensor | Packed, expert: int, dtype: torch.dtype) -> Tensor:
    return (base[expert].dequantize() if isinstance(base, Packed) else base[expert]).to(dtype)
