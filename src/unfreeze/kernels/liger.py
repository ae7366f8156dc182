"""Liger-Kernel's functions as candidates, if that library is installed (pip install liger-kernel).

Nothing else in this package needs it.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from unfreeze.kernels.choice.op import Implementation


def refuses(device: str, dtype: torch.dtype) -> str:
    """The reason why Liger's Triton kernels cannot run there; "" if they can."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if device != "cuda":
        return f"device {device}; Liger's kernels run on CUDA"
    return (
        ""
        if dtype in (torch.float32, torch.bfloat16, torch.float16)
        else f"dtype {dtype}; it computes in float32"
    )


def load_rms_norm() -> Implementation:
    """Liger's RMSNorm, with Llama's order of roundings.

    Not in place: that would overwrite dy, which belongs to the caller, with dx.
    """
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

    def liger_rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return LigerRMSNormFunction.apply(x_TD, weight_D, eps, 0.0, "llama", False)

    return liger_rms_norm


def load_swiglu() -> Implementation:
    """Liger's SwiGLU: silu(gate) is rounded before the multiplication.

    Its backward overwrites gate and up, so it gets copies. Other activations go to the op's reference.
    """
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # type: ignore[import-not-found]

    from unfreeze.kernels.swiglu import OP
    from unfreeze.kernels.swiglu.activation import SWIGLU, Activation

    def liger_swiglu(gate: Tensor, up: Tensor | None = None, activation: Activation = SWIGLU) -> Tensor:
        if activation != SWIGLU:
            return OP.reference(gate, up, activation)
        first, second = gate.chunk(2, dim=-1) if up is None else (gate, up)
        return LigerSiLUMulFunction.apply(first.clone(), second.clone())

    return liger_swiglu
