"""The expert MLP as one autograd.Function over a frozen base (packed or dense) or a trainable dense one, with LoRA in the same GEMMs.

Nothing expanded survives a group of experts: backward expands the same codes again. Saved: x, the routing weights, the parameters (no copies),
gate_up [n, 2I] before the activation, xA [n, Q], hA [n, P]. gate_up is kept rather than recomputed: under per-layer recompute it lives only
for its layer's backward (n * 2I * 2 bytes: 34 MB for 16,384 rows at I = 512) and saves a third of backward's GEMM work.

T tokens, D width, E experts, K per token, I intermediate, n rows, Q and P adapter columns (factors.py), a "part" does the work on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import (
    ExpertFactors,
    down_adapter,
    down_grads,
    gate_up_adapter,
    gate_up_grads,
    round_up,
    width,
)
from unfreeze.kernels.expert_mlp.workspace import Base
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.quant.codec import Packed

Kept = Callable[[Callable[[], Any]], Any]
"""Called with `compute`. First visit of a layer (no gradients): returns compute() and keeps it. Second visit
(with gradients): returns what was kept. The second forward then computes nothing; its output is zeros, and is
not used."""


class _Call:
    """What one call's forward and backward share: the part, the routing, base weights and adapters in the computation's dtype."""

    def __init__(self, part: Any, dtype: torch.dtype, routing: Any, gate_up: Tensor | Packed, down: Tensor | Packed, factors: ExpertFactors):
        self.part, self.dtype, self.routing = part, dtype, routing
        self.gate_up, self.down = Base(gate_up, dtype, "base gate_up"), Base(down, dtype, "base down")
        self.experts = routing.selection()
        self.gate_up_adapter = self.down_adapter = None
        if factors.gate_up_A is not None and factors.gate_up_B is not None:
            self.gate_up_adapter = gate_up_adapter(factors.gate_up_A, factors.gate_up_B, factors.scale, self.experts, dtype)
        if factors.down_A is not None and factors.down_B is not None:
            self.down_adapter = down_adapter(factors.down_A, factors.down_B, factors.down_scale, self.experts, dtype)

    def groups(self, *, both: bool) -> Any:
        """Groups of experts. `both`: gate_up and down are needed at once (backward), else one after the other."""
        costs = [base.nbytes(adapter) for base, adapter in ((self.gate_up, self.gate_up_adapter), (self.down, self.down_adapter))]
        row = 2 * self.gate_up.columns + 3 * self.down.columns
        return self.part.groups(self.routing, sum(costs) if both else max(costs), row * self.dtype.itemsize)

    def workers(self) -> int:
        """Cores that share the call."""
        return self.part.workers(self.routing, 3 * self.down.columns * self.gate_up.columns)

    def sums(self, x: Tensor) -> Tensor:
        """Zeros [workers, T, D] float32: two workers may have rows of the same token, so each adds into its
        own."""
        return scratch("sums", (self.workers(), *x.shape), torch.float32, x.device).zero_()  # fresh, its pages alone would cost 12 ms per 16 MB

    def total(self, sums: Tensor) -> Tensor:
        """[T, D] in the computation's dtype. In place, worker by worker: [workers, T, D] float32 is the largest buffer of a call."""
        for worker in range(1, len(sums)):
            sums[0] += sums[worker]
        return sums[0].to(self.dtype, copy=True)


def _forward(call: _Call, x: Tensor, keep: bool) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """y_TD and, if `keep`, what backward needs: gate_up [n, 2I], xA [n, Q], hA [n, P]."""
    part, I, n = call.part, call.down.columns, call.routing.num_rows
    Q, P = width(call.gate_up_adapter), width(call.down_adapter)
    # Rounded up so that layers and steps ask for the same size again: chunks of many sizes leave the heap in pieces (0.3 GB of 3.4 here)
    gate_up_n, xA_n, hA_n = (x.new_empty((round_up(n, 2048), columns))[:n] if keep and columns else None for columns in (2 * I, Q, P))
    y = call.sums(x)

    def work(group: Any, worker: int) -> None:
        part.forward_group(call, group, x, (gate_up_n, xA_n, hA_n), y[worker])

    part.each(call.groups(both=False), len(y), work)
    return call.total(y), (gate_up_n, xA_n, hA_n)


class _Grads:
    """Buffers of the gradients of one call.

    Adapters: a row per expert in use, float32 as the parameters are; A's buffer is its gradient. Dense base:
    a row per expert, in the computation's dtype, zero for experts without tokens.
    """

    def __init__(self, call: _Call, needs: dict[str, bool], D: int, I: int):
        active = len(call.routing.experts)
        Q, P = width(call.gate_up_adapter), width(call.down_adapter)
        like = torch.empty((0,), dtype=call.dtype, device=call.routing.token_n.device)  # only its dtype and device matter
        wide: dict[str, Any] = {"dtype": torch.float32}
        self.gate_up_A = like.new_empty((active, Q, D), **wide) if Q else None
        self.gate_up_Bt = like.new_empty((active, Q, 2 * I), **wide) if Q else None
        self.down_A = like.new_empty((active, P, I), **wide) if P else None
        self.down_Bt = like.new_empty((active, P, D), **wide) if P else None
        everyone = call.experts is None
        shape = (call.routing.num_experts, 2 * I, D)
        make = like.new_empty if everyone else like.new_zeros
        self.gate_up = make(shape) if needs["gate_up"] else None
        self.down = make((shape[0], D, I)) if needs["down"] else None


class _ExpertMLP(torch.autograd.Function):
    """Inputs that may need a gradient stand first: x, weights, dense base, factors; then what is constant."""

    @staticmethod
    def forward(ctx: Any, x, weights, gate_up, down, gate_up_A, gate_up_B, down_A, down_B, scales, packed, part, route, kept) -> Tensor:
        factors = ExpertFactors(gate_up_A, gate_up_B, down_A, down_B, *scales)
        bases = (gate_up if gate_up is not None else packed[0], down if down is not None else packed[1])
        y, routing, saved = _visit(part, x, route, bases, factors, kept)
        ctx.save_for_backward(x, weights, gate_up, down, gate_up_A, gate_up_B, down_A, down_B, *saved)
        ctx.constants = (scales, packed, part, routing)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weights, gate_up, down, gate_up_A, gate_up_B, down_A, down_B, *saved = ctx.saved_tensors
        scales, packed, part, routing = ctx.constants
        need_x, _, need_gate_up, need_down = ctx.needs_input_grad[:4]
        factors = ExpertFactors(gate_up_A, gate_up_B, down_A, down_B, *scales)
        bases = (gate_up if gate_up is not None else packed[0], down if down is not None else packed[1])
        call = _Call(part, x.dtype, routing, *bases, factors)
        grads = _Grads(call, {"gate_up": need_gate_up, "down": need_down}, x.shape[1], call.down.columns)
        score_n = torch.empty(routing.num_rows, dtype=torch.float32, device=x.device)
        workers = call.workers()
        dx = call.sums(x) if need_x else None
        dy = dy.to(x.dtype).contiguous()

        def work(group: Any, worker: int) -> None:
            part.backward_group(call, group, x, dy, tuple(saved), score_n, grads, None if dx is None else dx[worker])

        part.each(call.groups(both=True), workers, work)

        pairs: list[Tensor | None] = [None] * 4
        if grads.gate_up_A is not None and grads.gate_up_Bt is not None:
            pairs[:2] = gate_up_grads(grads.gate_up_A, grads.gate_up_Bt, gate_up_A, gate_up_B, scales[0], call.experts)
        if grads.down_A is not None and grads.down_Bt is not None:
            pairs[2:] = down_grads(grads.down_A, grads.down_Bt, down_A, down_B, scales[1], call.experts)
        score = score_n[routing.row_of_slot].view(weights.shape).to(weights.dtype)
        return (None if dx is None else call.total(dx), score, grads.gate_up, grads.down, *pairs, None, None, None, None, None)


def _visit(
    part: Any, x: Tensor, route: Callable[[], Any], bases: tuple[Any, Any], factors: ExpertFactors, kept: Kept | None
) -> tuple[Tensor, Any, Any]:
    """(y_TD, routing, what backward needs)."""
    y = None

    def compute() -> tuple[Any, tuple[Tensor | None, ...]]:
        nonlocal y
        routing = route()
        y, saved = _forward(_Call(part, x.dtype, routing, *bases, factors), x, keep=True)
        return routing, saved

    routing, saved = compute() if kept is None else kept(compute)
    return torch.zeros_like(x) if y is None else y, routing, saved


def fused_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    factors: ExpertFactors | None,
    part: Any,
    kept: Kept | None = None,
) -> Tensor:
    """As `expert_mlp`, with the work done by `part`. Without gradients nothing is kept, unless `kept` asks for it."""
    factors = factors or ExpertFactors()
    x_TD = x_TD.contiguous()

    def route() -> Any:
        return part.route(ids_TK, weights_TK, gate_up.shape[0], x_TD.dtype)

    dense = [base if isinstance(base, Tensor) else None for base in (gate_up, down)]
    pairs = (factors.gate_up_A, factors.gate_up_B, factors.down_A, factors.down_B)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x_TD, weights_TK, *dense, *pairs))):
        with torch.no_grad():
            if kept is None:
                few = part.few(x_TD, ids_TK, weights_TK, gate_up, down, factors)
                if few is not None:
                    return few
                return _forward(_Call(part, x_TD.dtype, route(), gate_up, down, factors), x_TD, keep=False)[0]
            return _visit(part, x_TD, route, (gate_up, down), factors, kept)[0]
    scales = (factors.scale, factors.down_scale)
    return _ExpertMLP.apply(x_TD, weights_TK, *dense, *pairs, scales, (gate_up, down), part, route, kept)  # type: ignore[return-value]
