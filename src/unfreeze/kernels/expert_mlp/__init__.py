"""The hottest op: routed experts with LoRA over a packed base, forward and backward.

`expert_mlp` picks the implementation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Candidate, Implementation, Op
from unfreeze.kernels.expert_mlp import cases, workspace
from unfreeze.kernels.expert_mlp.backend import Backend
from unfreeze.kernels.expert_mlp.cases import SUFFIX, inputs, measured
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.fused import fused_expert_mlp
from unfreeze.kernels.expert_mlp.reference import reference_expert_mlp
from unfreeze.kernels.expert_mlp.workspace import WORKSPACE, adapter_columns, expert_groups, workspace_bytes
from unfreeze.kernels.loops.scratch import release_scratch, scratch_bytes
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation, ClampedSwiGLU, GeGLU, SquaredReLU
from unfreeze.quant.codec import Packed

__all__ = [
    "OP",
    "SWIGLU",
    "WORKSPACE",
    "Activation",
    "ClampedSwiGLU",
    "ExpertFactors",
    "GeGLU",
    "SquaredReLU",
    "adapter_columns",
    "bucket",
    "expert_groups",
    "expert_mlp",
    "fused_expert_mlp",
    "packed_op",
    "reference_expert_mlp",
    "release_scratch",
    "scratch_bytes",
    "workspace_bytes",
]

log = logging.getLogger(__name__)
# of the norm; in bf16 a correct implementation is off by less than 1.5 %
CHECK_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 0.03}
NO_MEMORY = "OutOfMemoryError"
MANY = 64  # rows per expert; below this, expanding the weights costs more than multiplying with them


def expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    factors: ExpertFactors | None = None,
    impl: str = "auto",
    reuse: Reuse | None = None,
    activation: Activation = SWIGLU,
    gate_up_bias: Tensor | None = None,
) -> Tensor:
    """y_t = Σ_k w_tk · down_e( a(gate_e x_t + b_e, up_e x_t + c_e) ),  e = ids_tk  -> [T, D] in x's dtype.

    With an activation of one matrix, a(up_e x_t): gate_up is [E, I, D] then.

    x_TD float32 or bf16; weights_TK (differentiable); gate_up [E, 2I, D], gate rows first; down [E, D, I]:
    packed or dense, a dense one may require grad. ids_TK int64 in 0..E-1: others raise IndexError on a CPU,
    but give undefined rows on CUDA, where a check would make the host wait. Callers that drop ids do so
    before.

    factors add scale · B A to each matrix; computed in x's dtype, gradients in the parameters' own. "fused"
    and "loop" agree with a float64 merged model to 1e-5 of the norm in float32 and 1.5 % in bf16
    (tests/kernels/expert_mlp); "reference" with B = 0 changes no bit. "auto": fused if its preconditions hold
    (see `OP.preferred`, `narrow_refuses`), else loop on CUDA (`OP.instead`), else reference.

    activation: a, silu(gate) · up by default, and the layout of gate and up in gate_up (activation.py);
    gate_up_bias [E, 2I]: b and c in the same layout, may require grad. `reuse`: of a layer that is recomputed
    (kernels/recompute.py); the reference ignores it.
    """
    reason = narrow_refuses(x_TD, down.shape[-1])
    if reason and impl == "fused":
        raise ConfigError(f"expert_mlp cannot run as 'fused' here: {reason}", next="choose impl = 'auto'")
    op = NARROW if reason or impl == "loop" else OP  # a loop that is asked for is checked
    kind = bucket(ids_TK, gate_up) + (", narrow" if reason else "")
    return choose(op, x_TD.device, x_TD.dtype, kind, impl)(
        x_TD, ids_TK, weights_TK, gate_up, down, factors, reuse, activation, gate_up_bias
    )


def bucket(ids_TK: Tensor, gate_up: Tensor | Packed) -> str:
    """Mean rows per expert, "under 64" or "64 on", and the kind of base.

    Packed and frozen: "". In x's dtype: ", unpacked", or ", all weights" if it trains.
    """
    rows = "64 on" if ids_TK.numel() >= MANY * gate_up.shape[0] else "under 64"
    if isinstance(gate_up, Packed):
        return rows + SUFFIX["packed"]
    return rows + SUFFIX["all weights" if gate_up.requires_grad else "unpacked"]


def narrow_refuses(x: Tensor, intermediate: int) -> str:
    """The reason why grouped GEMMs on CUDA cannot take x [T, D] and experts of width `intermediate`.

    Empty if they can, and on other devices.
    """
    if x.is_cuda and (x.shape[1] % 8 or intermediate % 8):
        return f"widths {x.shape[1]} and {intermediate}; grouped GEMMs need multiples of 8"
    return ""


@functools.cache
def fused_refuses(device: str, dtype: torch.dtype) -> str:
    """The reason why the fused op cannot run on that device in that dtype; empty if it can."""
    if device == "cpu":
        return (
            ""
            if dtype in (torch.float32, torch.bfloat16)
            else f"dtype {dtype}; it computes in float32 or bfloat16"
        )
    if device != "cuda":
        return f"device {device}; it runs on cpu and cuda"
    if dtype != torch.bfloat16:
        return f"dtype {dtype}; grouped GEMMs on cuda take bfloat16"
    return _self_check("fused", torch.device("cuda", torch.cuda.current_device()), dtype)


@functools.cache
def loop_refuses(device: str, dtype: torch.dtype) -> str:
    """The reason why the loop of torch.mm cannot run on that device in that dtype; empty if it can.

    It is checked only where the fused op cannot run. Elsewhere it is measured (against float64) or named
    (`named_loop_refuses`), and not worth a check of every kind in each process.
    """
    if (reason := _loop_lacks(device, dtype)) or not fused_refuses(device, dtype):
        return reason
    return named_loop_refuses(device, dtype)


def named_loop_refuses(device: str, dtype: torch.dtype) -> str:
    """As `loop_refuses`, for a call in which no other candidate can run, or is wanted: always checked."""
    return _loop_lacks(device, dtype) or _self_check(
        "loop", torch.device("cuda", torch.cuda.current_device()), dtype
    )


def _loop_lacks(device: str, dtype: torch.dtype) -> str:
    if device != "cuda":
        return f"device {device}; it runs on cuda"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {dtype}; it computes in float32 or bfloat16"
    return ""


@functools.cache
def _self_check(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The reason why that candidate is wrong on that device, "" if it is right; checked once per GPU.

    Every kind of call, outputs and all gradients: first at small shapes, whose exact result the CPU computes,
    then at a hot one, where the device does. Grouped GEMMs have been reported wrong on transposed views.
    """
    # imported here: predicted.py loads the ops
    from unfreeze.kernels.choice import predicted

    load, limit = OP.candidates[name].load, CHECK_LIMIT[dtype]
    for shapes, fault in ((cases.SMALL, predicted.fault), (cases.HOT, predicted.fault_on_device)):
        for kind in cases.EVERY_KIND:
            with workspace.at_most(kind.workspace(shapes, dtype)):
                wrong = fault(OP, kind.case(shapes), load, device, dtype, limit)
            if wrong.startswith(NO_MEMORY) and shapes is cases.HOT:
                log.info("expert_mlp: no memory to check %s at a hot shape; small ones are right", name)
                return ""
            if wrong:
                reason = f"its self-check on {device}, {kind.name}: {wrong}"
                log.warning("expert_mlp: %s does not run: %s", name, reason)
                return reason
    return ""


def backend_for(
    x_TD: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    activation: Activation = SWIGLU,
    gate_up_bias: Tensor | None = None,
) -> Backend[Any]:
    """The backend for that device and kind of weights. Each backend has its own routing type."""
    if x_TD.is_cuda:
        from unfreeze.kernels.expert_mlp.grouped import Grouped

        return Grouped()
    from unfreeze.kernels.expert_mlp import loop_cpu, packed, panels_cpu

    if not panels_cpu.supports(x_TD.dtype, gate_up, down, activation, gate_up_bias):
        return loop_cpu.LoopCpu()
    by: Any = choose(packed_op(), x_TD.device, x_TD.dtype, packed.BUCKET)  # a packed.By
    return by.backend()


@functools.cache
def packed_op() -> Op:
    """The op that chooses the backend of packed experts on a CPU: timed like any other op (packed.py)."""
    from unfreeze.kernels.expert_mlp import packed

    return packed.op_of(inputs(128, "packed"))


def _fused() -> Implementation:
    return _by(lambda *args: backend_for(*args))


def _loop() -> Implementation:
    from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda

    return _by(lambda *_: LoopCuda())


def _by(backend_of: Callable[..., Backend[Any]]) -> Implementation:
    """The op, computed by the backend that `backend_of` returns; its arguments are those of `backend_for`."""

    def computed(
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
        backend = backend_of(x_TD, gate_up, down, activation, gate_up_bias)
        return fused_expert_mlp(
            x_TD, ids_TK, weights_TK, gate_up, down, factors, backend, reuse, activation, gate_up_bias
        )

    return computed


OP = Op(
    name="expert_mlp",
    reference=reference_expert_mlp,
    candidates={
        "fused": Candidate(_fused, fused_refuses),
        "loop": Candidate(_loop, loop_refuses, waits_on=("cuda",)),
    },
    cases=measured(),
    # float32: sums of some hundred terms. bf16: 2^-9 per rounding and about five roundings in a row.
    tolerance={torch.float32: 1e-5, torch.bfloat16: 0.015},
    preferred="fused",
    instead="loop",
    because="nothing expanded is saved for backward",
)
NARROW = replace(
    OP,
    candidates={"loop": replace(OP.candidates["loop"], refuses=named_loop_refuses)},
    preferred="loop",
    instead="",
    because="fused cannot run: grouped GEMMs need widths that are multiples of 8",
)
"""The op for widths that grouped GEMMs on CUDA cannot take."""
