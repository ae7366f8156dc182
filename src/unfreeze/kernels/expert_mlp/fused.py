"""The expert MLP as one autograd.Function, with LoRA in the same GEMMs.

Over a frozen base (packed or dense) or a trainable dense one.

No expanded weight outlives a group of experts: backward expands the same codes again. Saved: x, the routing
weights, the parameters (no copies), and backend.SavedRows: gate_up [n, 2I] before the activation, xA [n, Q],
hA [n, P]. gate_up is saved rather than recomputed: under per-layer recompute it lives only for its layer's
backward (n * 2I * 2 bytes: 34 MB for 16,384 rows at I = 512) and saves a third of backward's GEMM work.

T tokens, D width, E experts, K per token, I intermediate, n rows, Q and P adapter columns (factors.py). A
`Backend` computes on a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.backend import Backend, Call, ExpertGradients, ExpertGroup, R, SavedRows
from unfreeze.kernels.expert_mlp.factors import ExpertFactors, down_grads, gate_up_grads, round_up
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation
from unfreeze.quant.codec import Packed


@dataclass(frozen=True)
class _Problem(Generic[R]):
    """A call's arguments except x and the routing weights."""

    backend: Backend[R]
    ids_TK: Tensor
    gate_up: Tensor | Packed
    down: Tensor | Packed
    factors: ExpertFactors
    activation: Activation = SWIGLU
    gate_up_bias: Tensor | None = None

    def route(self, x_TD: Tensor, weights_TK: Tensor) -> R:
        return self.backend.route(self.ids_TK, weights_TK, self.gate_up.shape[0], x_TD.dtype)

    def call(self, x_TD: Tensor, routing: R) -> Call[R]:
        parts = (self.gate_up, self.down, self.factors, self.activation, self.gate_up_bias)
        return Call(self.backend, x_TD.dtype, routing, *parts)


def _forward(call: Call[R], x: Tensor, *, save: bool) -> tuple[Tensor, SavedRows]:
    """y_TD and, if `save`, the results that backward needs."""
    n = call.routing.num_rows

    def buffer(columns: int) -> Tensor | None:
        # Rounded up so that layers and steps request the same size again: chunks of many sizes fragment the
        # heap.
        return x.new_empty((round_up(n, 2048), columns))[:n] if save and columns else None

    saved = SavedRows(gate_up=buffer(call.gate_up.rows), xA=buffer(call.Q), hA=buffer(call.P))
    y = call.sums(x)
    of_workers = y.unbind()

    def work(group: ExpertGroup[R], worker: int) -> None:
        call.backend.forward_group(call, group, x, saved, of_workers[worker])

    call.backend.each(call.groups(both=False), len(y), work)
    return call.total(y), saved


def _visit(
    problem: _Problem[R], x: Tensor, weights: Tensor, reuse: Reuse | None
) -> tuple[Tensor, R, SavedRows]:
    """(y_TD, routing, saved rows). If `reuse` has the last two, y is zeros: nobody reads it."""
    computed: list[Tensor] = []

    def compute() -> tuple[R, SavedRows]:
        routing = problem.route(x, weights)
        y, saved = _forward(problem.call(x, routing), x, save=True)
        computed.append(y)
        return routing, saved

    routing, saved = compute() if reuse is None else reuse(compute)
    return computed[0] if computed else torch.zeros_like(x), routing, saved


class _ExpertMLP(torch.autograd.Function):
    """Inputs that may need a gradient come first: x, weights, dense base, factors; then the constants."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor | None,
        down: Tensor | None,
        gate_up_A: Tensor | None,
        gate_up_B: Tensor | None,
        down_A: Tensor | None,
        down_B: Tensor | None,
        gate_up_bias: Tensor | None,
        problem: _Problem[R],
        reuse: Reuse | None,
    ) -> Tensor:
        y, routing, saved = _visit(problem, x, weights, reuse)
        pairs = (gate_up_A, gate_up_B, down_A, down_B)
        ctx.save_for_backward(x, weights, gate_up, down, *pairs, gate_up_bias, *saved)
        # Not `problem`: ctx already has its factors, and backward doesn't need its ids_TK.
        scales = (problem.factors.scale, problem.factors.down_scale)
        ctx.constants = (problem.backend, routing, problem.gate_up, problem.down, scales, problem.activation)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, gate_up_A, gate_up_B, down_A, down_B, bias, *saved = ctx.saved_tensors
        backend, routing, packed_gate_up, packed_down, scales, activation = ctx.constants
        need_x, _, need_gate_up, need_down = ctx.needs_input_grad[:4]
        call = Call(
            backend,
            x.dtype,
            routing,
            packed_gate_up if gate_up is None else gate_up,
            packed_down if down is None else down,
            ExpertFactors(gate_up_A, gate_up_B, down_A, down_B, *scales),
            activation,
            bias,
        )
        need_bias = ctx.needs_input_grad[8]
        grads = ExpertGradients(
            call, x.shape[1], gate_up=need_gate_up, down=need_down, gate_up_bias=need_bias
        )
        score_n = torch.empty(routing.num_rows, dtype=torch.float32, device=x.device)
        workers = call.workers()
        dx = call.sums(x) if need_x else None
        of_workers = [None] * workers if dx is None else dx.unbind()
        dy = dy.to(x.dtype).contiguous()

        def work(group: ExpertGroup[R], worker: int) -> None:
            backend.backward_group(call, group, x, dy, SavedRows(*saved), score_n, grads, of_workers[worker])

        backend.each(call.groups(both=True), workers, work)

        # Back to the shapes of the parameters, and of the routing weights.
        dgate_up_A = dgate_up_B = ddown_A = ddown_B = None
        if grads.gate_up_A is not None and grads.gate_up_Bt is not None:
            dgate_up_A, dgate_up_B = gate_up_grads(
                grads.gate_up_A, grads.gate_up_Bt, gate_up_A, gate_up_B, scales[0], call.experts, activation
            )
        if grads.down_A is not None and grads.down_Bt is not None:
            ddown_A, ddown_B = down_grads(
                grads.down_A, grads.down_Bt, down_A, down_B, scales[1], call.experts
            )
        dweights = score_n[routing.row_of_slot].view(weights.shape).to(weights.dtype)
        dx = None if dx is None else call.total(dx)
        dfactors = (dgate_up_A, dgate_up_B, ddown_A, ddown_B)
        dbias = None if grads.gate_up_bias is None else grads.gate_up_bias.to(bias.dtype)
        return dx, dweights, grads.gate_up, grads.down, *dfactors, dbias, None, None


def fused_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    factors: ExpertFactors | None,
    backend: Backend[R],
    reuse: Reuse | None = None,
    activation: Activation = SWIGLU,
    gate_up_bias: Tensor | None = None,
) -> Tensor:
    """As `expert_mlp`, computed by `backend`.

    Without gradients nothing is saved, unless `reuse` requests it.
    """
    factors = factors or ExpertFactors()
    x_TD = x_TD.contiguous()
    problem = _Problem(backend, ids_TK, gate_up, down, factors, activation, gate_up_bias)
    dense = [base if isinstance(base, Tensor) else None for base in (gate_up, down)]
    pairs = (factors.gate_up_A, factors.gate_up_B, factors.down_A, factors.down_B)
    inputs = (x_TD, weights_TK, *dense, *pairs, gate_up_bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        return _ExpertMLP.apply(*inputs, problem, reuse)

    with torch.no_grad():
        if reuse is not None:
            return _visit(problem, x_TD, weights_TK, reuse)[0]
        if activation == SWIGLU and gate_up_bias is None:  # the loops over codes support no other
            y_TD = backend.decode(x_TD, ids_TK, weights_TK, gate_up, down, factors)
            if y_TD is not None:
                return y_TD
        return _forward(problem.call(x_TD, problem.route(x_TD, weights_TK)), x_TD, save=False)[0]
