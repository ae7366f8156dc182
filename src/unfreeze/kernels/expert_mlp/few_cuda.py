"""The expert MLP without gradients where few rows ask each expert: INT4 codes go into the GEMM's tiles, no expert is expanded in memory.

n rows, D width, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import Adapter, ExpertFactors, down_adapter, gate_up_adapter
from unfreeze.kernels.int4_grouped_mm import int4_grouped_mm
from unfreeze.kernels.swiglu import part_for
from unfreeze.quant.codec import Packed


def few_rows(x_TD: Tensor, part: Any, routing: Any, gate_up: Packed, down: Packed, factors: ExpertFactors, impl: str = "auto") -> Tensor:
    """As expert_mlp; part and routing are grouped.Grouped and its Routing."""
    (group,) = part.groups(routing, 0, 0)
    x_nD = part.rows("x", group, x_TD.shape[1], x_TD.dtype)
    part.gather(x_TD, group, x_nD)
    adapter = None
    if factors.gate_up_A is not None and factors.gate_up_B is not None:
        adapter = gate_up_adapter(factors.gate_up_A, factors.gate_up_B, factors.scale, None, x_TD.dtype)
    gate_up_n = _projected(x_nD, gate_up, adapter, routing.offsets_E, impl)
    h_nI = part.rows("h", group, down.shape[2], x_TD.dtype)
    part_for(gate_up_n).forward(*gate_up_n.chunk(2, dim=-1), h_nI)
    adapter = None
    if factors.down_A is not None and factors.down_B is not None:
        adapter = down_adapter(factors.down_A, factors.down_B, factors.down_scale, None, x_TD.dtype)
    y_nD = _projected(h_nI, down, adapter, routing.offsets_E, impl)
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    part.scatter_add(y_nD, group, group.weight, y_TD)
    return y_TD.to(x_TD.dtype)


def _projected(x_nM: Tensor, packed: Packed, adapter: Adapter | None, offsets_E: Tensor, impl: str) -> Tensor:
    """W x + B (A x), two thin grouped GEMMs for the adapter."""
    y_nN = int4_grouped_mm(x_nM, packed, offsets_E, impl)
    if adapter is None:
        return y_nN
    xA_nQ = F.grouped_mm(x_nM, adapter.A.transpose(1, 2), offs=offsets_E)
    return y_nN.add_(F.grouped_mm(xA_nQ, adapter.B.transpose(1, 2), offs=offsets_E))
