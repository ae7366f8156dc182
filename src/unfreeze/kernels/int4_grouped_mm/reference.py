"""Rows times INT4 experts by expanding them.

The oracle; it runs if no faster candidate is proven.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze.kernels.expand import expand_stack
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.quant.codec import Packed


def int4_grouped_mm(x_nM: Tensor, packed: Packed, offsets_E: Tensor) -> Tensor:
    """Shapes as in kernels.int4_grouped_mm.

    On CUDA in bf16 one workspace and one grouped GEMM, elsewhere expert by expert (offsets on the host).
    """
    num_experts, N, _ = packed.shape
    if x_nM.is_cuda and x_nM.dtype == torch.bfloat16:
        weights = scratch("int4_grouped_mm", tuple(packed.shape), x_nM.dtype, x_nM.device)
        expand_stack(packed, range(num_experts), weights)
        return F.grouped_mm(x_nM, weights.transpose(1, 2), offs=offsets_E)
    y_nN, begin = x_nM.new_zeros((x_nM.shape[0], N)), 0
    for expert, end in enumerate(offsets_E.tolist()):
        if end > begin:
            y_nN[begin:end] = x_nM[begin:end] @ packed[expert].dequantize().to(x_nM.dtype).t()
        begin = end
    return y_nN
