"""The one hot op: routed experts with LoRA over a packed base, forward and backward. `expert_mlp` picks the implementation."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.fused import Kept, fused_expert_mlp
from unfreeze.kernels.expert_mlp.reference import reference_expert_mlp
from unfreeze.kernels.scratch import release_scratch, scratch_bytes
from unfreeze.quant.codec import Packed

__all__ = ["ExpertFactors", "Kept", "expert_mlp", "fused_expert_mlp", "reference_expert_mlp", "release_scratch", "scratch_bytes"]

log = logging.getLogger(__name__)
Impl = Literal["auto", "fused", "reference"]


def expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    factors: ExpertFactors | None = None,
    impl: Impl = "auto",
    kept: Kept | None = None,
) -> Tensor:
    """y_t = Σ_k w_tk · down_e( silu(gate_e x_t) * up_e x_t ),  e = ids_tk  -> [T, D] in x's dtype.

    x_TD float32 or bf16; ids_TK int64 in 0..E-1; weights_TK (differentiable); gate_up [E, 2I, D], gate rows first; down [E, D, I]: packed or
    dense, a dense one may require grad. factors add scale · B A to each matrix; computed in x's dtype, gradients in the parameters' own.
    "fused" agrees with a float64 merged model to 1e-5 of the norm in float32 and 1.5 % in bf16 (tests/kernels/expert_mlp), "reference" with B = 0
    changes no bit. "auto": fused where its preconditions hold (see `fused_refuses`), else reference, said once in the log.
    `kept`: see fused.Kept; the reference has no use for it.
    """
    if impl == "auto":
        reason = fused_refuses(x_TD, down.shape[-1])
        impl = "reference" if reason else "fused"
        _say(impl, reason, x_TD.device.type, str(x_TD.dtype))
    if impl == "reference":
        return reference_expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down, factors)
    if impl != "fused":
        raise ValueError(f"impl is {impl!r}; it is one of auto, fused, reference")
    reason = fused_refuses(x_TD, down.shape[-1])
    if reason:
        raise ValueError(f"impl='fused' cannot run: {reason}")
    return fused_expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down, factors, _part(x_TD.device.type), kept)


def fused_refuses(x: Tensor, intermediate: int) -> str:
    """Why the fused op cannot take x [T, D] and experts of width `intermediate`; empty where it can."""
    if x.device.type == "cpu":
        return "" if x.dtype in (torch.float32, torch.bfloat16) else f"dtype {x.dtype}; it computes in float32 or bfloat16"
    if x.device.type != "cuda":
        return f"device {x.device.type}; it runs on cpu and cuda"
    if x.dtype != torch.bfloat16:
        return f"dtype {x.dtype}; grouped GEMMs on cuda take bfloat16"
    if x.shape[1] % 8 or intermediate % 8:
        return f"widths {x.shape[1]} and {intermediate}; grouped GEMMs need multiples of 8"
    return _self_check(x.device.index or 0)


@functools.cache
def _self_check(device: int) -> str:
    """Once per GPU: grouped GEMMs have been reported wrong on transposed views, so a small problem is compared with the reference."""
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in ((24, 64), (4, 64, 64), (4, 64, 32)))
    ids, weights = torch.arange(48).view(24, 2) % 3, torch.rand((24, 2), generator=generator)  # the last expert stays empty
    x, gate_up, down, ids, weights = (t.to(torch.device("cuda", device)) for t in (x, gate_up * 0.1, down * 0.1, ids, weights))
    gradients = []
    for function in (reference_expert_mlp, functools.partial(fused_expert_mlp, part=_part("cuda"))):
        inputs = [t.clone().requires_grad_() for t in (x, gate_up, down)]
        y = function(inputs[0], ids, weights, inputs[1], inputs[2], None)
        gradients.append([y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))])
    errors = [float((a.float() - b.float()).norm() / b.float().norm()) for b, a in zip(*gradients, strict=True)]
    return "" if max(errors) < 0.03 else f"its self-check on cuda:{device} is off by {max(errors):.1%} of the norm (allowed 3 %)"


@functools.cache
def _part(device: str) -> Any:
    """The part that does the work on a device. Imported here because numba takes 0.4 s and only the CPU needs it."""
    if device == "cuda":
        from unfreeze.kernels.expert_mlp.grouped import Grouped

        return Grouped()
    from unfreeze.kernels.expert_mlp.loop_cpu import LoopCpu

    return LoopCpu()


@functools.cache
def _say(impl: str, reason: str, device: str, dtype: str) -> None:
    log.info("expert_mlp on %s in %s: %s%s", device, dtype, impl, f" ({reason})" if reason else "")
