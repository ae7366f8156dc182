"""Tokens to their experts and back: sort, gather, combine. `token_order` is all three in a row, which is how they are measured and tested.

T tokens, K experts per token, E experts, n = T K rows (a token at one expert, sorted by expert), D width.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Case, Op
from unfreeze.kernels.loops import triton_options
from unfreeze.kernels.token_order import reference

__all__ = ["OP", "bucket", "token_order"]


def token_order(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """(y [T, D], offsets_E int32): y_t = Σ_k w_tk x_t by way of the n rows sorted by expert, offsets_E[e] where expert e's rows end.

    The identity expert: what stands between gather and combine is the caller's. Sums are float32 in the order of k, without atomics, so y has
    the same bits at every run; dw_tk = <dy_t, row>, dx_t = Σ_k w_tk dy_t. No function of an implementation's `part` waits for the device.
    """
    return choose(OP, x_TD.device, x_TD.dtype, bucket(x_TD, ids_TK, weights_TK, num_experts), impl)(x_TD, ids_TK, weights_TK, num_experts)


def bucket(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, num_experts: int) -> str:
    """Shapes that are measured as one, by the number of rows n."""
    rows = ids_TK.numel()
    return "under 1k" if rows < 1 << 10 else "1k to 32k" if rows < 1 << 15 else "over 32k"


class TokenOrder:
    """An implementation; `part` has sort, gather, combine and combine_backward as in reference.py, for whoever computes between them."""

    def __init__(self, part: ModuleType):
        self.part = part

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        return _ThereAndBack.apply(x_TD, weights_TK, ids_TK, num_experts, self.part)  # type: ignore[return-value]


class _ThereAndBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, num_experts: int, part: ModuleType) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_TD = x_TD.contiguous()
        slot_n, row_of_slot, offsets_E = part.sort(ids_TK, num_experts)
        rows = x_TD.new_empty((slot_n.numel(), x_TD.shape[1]))
        part.gather(x_TD, slot_n, ids_TK.shape[1], rows)
        y = torch.zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, torch.float32), device=x_TD.device)
        weight_n = weights_TK.reshape(-1)[slot_n]
        part.combine(rows, row_of_slot, weight_n, y)
        ctx.save_for_backward(rows, weight_n, slot_n, row_of_slot)
        ctx.part, ctx.shape = part, weights_TK.shape
        ctx.mark_non_differentiable(offsets_E)
        return y.to(x_TD.dtype), offsets_E

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight_n, slot_n, row_of_slot = ctx.saved_tensors
        dy_TD = dy_TD.contiguous()
        wide = torch.promote_types(dy_TD.dtype, torch.float32)
        drows = torch.empty_like(rows)
        dweight_n = torch.empty(slot_n.numel(), dtype=wide, device=dy_TD.device)
        ctx.part.combine_backward(dy_TD, rows, slot_n, ctx.shape[1], weight_n, drows, dweight_n)
        dx = torch.zeros(dy_TD.shape, dtype=wide, device=dy_TD.device)
        ctx.part.combine(drows, row_of_slot, None, dx)
        dweights = dweight_n[row_of_slot].view(ctx.shape).to(weight_n.dtype)
        return dx.to(dy_TD.dtype), dweights, None, None, None


def _load_triton() -> TokenOrder:
    from unfreeze.kernels.token_order import triton_cuda

    return TokenOrder(triton_cuda)


def _case(tokens: int, per_token: int, num_experts: int, width: int, cuda_width: int) -> Case:
    """A GPU gets wider rows."""

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, ...]:
        D = cuda_width if device.type == "cuda" else width
        x = torch.randn((tokens, D), generator=generator).to(device, dtype).requires_grad_()
        ids = torch.rand((tokens, num_experts), generator=generator).topk(per_token, dim=1).indices.to(device)
        return x, ids, torch.rand((tokens, per_token), generator=generator).to(device).requires_grad_(), num_experts

    ids = torch.empty((tokens, per_token), device="meta")
    return Case(bucket(ids, ids, None, num_experts), inputs)


OP = Op(
    name="token_order",
    reference=TokenOrder(reference),  # type: ignore[arg-type]
    candidates={"triton": triton_options.candidate(_load_triton)},
    cases=(_case(64, 4, 64, 1024, 7168), _case(1024, 8, 128, 256, 7168), _case(8192, 8, 384, 64, 7168)),
    # float32: a sum of K terms. bf16: y and dx are rounded once; dx goes through rows that are rounded once before
    tolerance={torch.float32: 1e-6, torch.bfloat16: 5e-3},
)
