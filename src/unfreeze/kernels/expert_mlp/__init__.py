"""The hottest op: routed experts with LoRA over a packed base, forward and backward.

`expert_mlp` picks the implementation.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Implementation, Op
from unfreeze.kernels.expert_mlp.activation import SWIGLU, Activation, ClampedSwiGLU, GeGLU
from unfreeze.kernels.expert_mlp.backend import Backend
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.expert_mlp.fused import fused_expert_mlp
from unfreeze.kernels.expert_mlp.reference import reference_expert_mlp
from unfreeze.kernels.expert_mlp.workspace import WORKSPACE, adapter_columns, expert_groups, workspace_bytes
from unfreeze.kernels.loops.scratch import release_scratch, scratch_bytes
from unfreeze.kernels.recompute import Reuse
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

__all__ = [
    "OP",
    "SWIGLU",
    "WORKSPACE",
    "Activation",
    "ClampedSwiGLU",
    "ExpertFactors",
    "GeGLU",
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
SELF_CHECK_LIMIT = 0.03  # of the norm; in bf16 a correct implementation is off by less than 1.5 %
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

    x_TD float32 or bf16; weights_TK (differentiable); gate_up [E, 2I, D], gate rows first; down [E, D, I]:
    packed or dense, a dense one may require grad. ids_TK int64 in 0..E-1: others raise IndexError on a CPU,
    but give undefined rows on CUDA, where a check would make the host wait. Callers that drop ids do so
    before.

    factors add scale · B A to each matrix; computed in x's dtype, gradients in the parameters' own. "fused"
    agrees with a float64 merged model to 1e-5 of the norm in float32 and 1.5 % in bf16
    (tests/kernels/expert_mlp); "reference" with B = 0 changes no bit. "auto": fused if its preconditions hold
    (see `OP.preferred`, `narrow_refuses`), else reference, logged once.

    activation: a, silu(gate) · up by default, and the layout of gate and up in gate_up (activation.py);
    gate_up_bias [E, 2I]: b and c in the same layout, may require grad. `reuse`: of a layer that is recomputed
    (kernels/recompute.py); the reference ignores it.
    """
    reason = narrow_refuses(x_TD, down.shape[-1])
    if reason and impl == "fused":
        raise ConfigError(f"expert_mlp cannot run as 'fused' here: {reason}", next="choose impl = 'auto'")
    if reason and impl == "auto":
        impl = "reference"
        _log_once(reason)
    return choose(OP, x_TD.device, x_TD.dtype, bucket(ids_TK, gate_up), impl)(
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
    return _self_check(torch.device("cuda", torch.cuda.current_device()))


@functools.cache
def _self_check(device: torch.device) -> str:
    """The reason why the fused op is wrong on that device, "" if it is right; checked once per GPU.

    Packed and dense bases with adapters, and dense ones that train: outputs and every gradient. Grouped GEMMs
    have been reported wrong on transposed views.
    """
    # imported here: predicted.py loads the ops
    from unfreeze.kernels.choice.predicted import fault

    for kind in SUFFIX:
        case = Case(kind, functools.partial(_small_inputs, kind))
        if reason := fault(OP, case, _fused, device, torch.bfloat16, SELF_CHECK_LIMIT):
            reason = f"its self-check on {device}, {kind}: {reason}"
            log.warning("expert_mlp: fused does not run, the reference does: %s", reason)
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

    return packed.op_of(functools.partial(_inputs, 128, "packed"))


@functools.cache
def _log_once(reason: str) -> None:
    log.info("expert_mlp: reference (%s)", reason)


def _fused() -> Implementation:
    def fused(
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
        backend = backend_for(x_TD, gate_up, down, activation, gate_up_bias)
        return fused_expert_mlp(
            x_TD, ids_TK, weights_TK, gate_up, down, factors, backend, reuse, activation, gate_up_bias
        )

    return fused


Base = Literal["packed", "unpacked", "all weights"]
SUFFIX: dict[Base, str] = {"packed": "", "unpacked": ", unpacked", "all weights": ", all weights"}


def _inputs(
    rows: int, kind: Base, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Arguments:
    """2 of 8 experts per token, about `rows` rows each: INT4 or not, with LoRA of rank 8, or trained whole.

    On a GPU 16 times the weights.
    """
    sizes = (8, 2048, 1024, 8) if device.type == "cuda" else (8, 512, 256, 8)
    return _problem(sizes, 8, rows * 8 // 2, kind, device, dtype, generator)


def _small_inputs(
    kind: Base, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Arguments:
    """24 tokens; one of 4 experts gets none. Rank 3, so the workspace's rows are padded."""
    return _problem((4, 64, 32, 3), 3, 24, kind, device, dtype, generator)


def _problem(
    sizes: tuple[int, int, int, int],
    used: int,
    T: int,
    kind: Base,
    device: torch.device,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Arguments:
    """T tokens, each to 2 of the first `used` of E experts. sizes: E, D, I and the rank R."""
    E, D, I, R = sizes
    codec = Int4(32)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    bases = [randn(E, 2 * I, D, scale=D**-0.5), randn(E, D, I, scale=I**-0.5)]
    matrices = (
        [
            Packed(codec, {name: part.to(device) for name, part in codec.quantize(base.bfloat16()).items()})
            for base in bases
        ]
        if kind == "packed"
        else [base.to(device, dtype).requires_grad_(kind == "all weights") for base in bases]
    )
    pairs = (
        randn(E, 2 * R, D, scale=D**-0.5),
        randn(E, 2 * I, R, scale=0.1),
        randn(E, R, I, scale=I**-0.5),
        randn(E, D, R, scale=0.1),
    )
    factors = ExpertFactors(*(pair.to(device).requires_grad_() for pair in pairs), scale=2.0, down_scale=2.0)
    ids = torch.rand(T, used, generator=generator).topk(2, dim=1).indices.to(device)
    weights = torch.rand(T, 2, generator=generator).to(device).requires_grad_()
    x = randn(T, D).to(device, dtype).requires_grad_()
    return x, ids, weights, *matrices, None if kind == "all weights" else factors


def _cases() -> tuple[Case, ...]:
    return tuple(
        Case(name + suffix, functools.partial(_inputs, rows, kind))
        for kind, suffix in SUFFIX.items()
        for name, rows in (("under 64", 16), ("64 on", 128))
    )


OP = Op(
    name="expert_mlp",
    reference=reference_expert_mlp,
    candidates={"fused": Candidate(_fused, fused_refuses)},
    cases=_cases(),
    # float32: sums of some hundred terms. bf16: 2^-9 per rounding and about five roundings in a row.
    tolerance={torch.float32: 1e-5, torch.bfloat16: 0.015},
    preferred="fused",
    because="nothing expanded is saved for backward",
)
