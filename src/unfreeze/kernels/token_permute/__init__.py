"""Tokens to their experts and back: sort, gather, combine.

`token_permute` does all three in a row; measurements and tests use it.

T tokens, K experts per token, E experts, n = T K rows (a token at one expert, sorted by expert), D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.draw import normal, uniform
from unfreeze.kernels.choice.op import Arguments, Case, Op
from unfreeze.kernels.loops import triton_options
from unfreeze.kernels.token_permute import reference

__all__ = ["OP", "TokenPermute", "bucket", "token_permute"]


def token_permute(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(y [T, D], offsets_E int32): y_t = Σ_k w_tk x_t through the n rows sorted by expert.

    Expert e's rows stop at offsets_E[e]. This is the identity expert: real callers compute between gather and
    combine. Sums are float32 in the order of k, without atomics, so y is bit-identical at every run;
    dw_tk = <dy_t, row>, dx_t = Σ_k w_tk dy_t. No implementation waits for the device.
    """
    return choose(OP, x_TD.device, x_TD.dtype, bucket(x_TD, ids_TK, weights_TK, num_experts), impl)(
        x_TD, ids_TK, weights_TK, num_experts
    )


def bucket(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, num_experts: int) -> str:
    """The bucket of shapes that share a measurement, by the number of rows n."""
    rows = ids_TK.numel()
    return "under 1k" if rows < 1 << 10 else "1k to 32k" if rows < 1 << 15 else "over 32k"


class PermuteFunctions(Protocol):
    """The module of an implementation; reference.py documents each function."""

    def sort(self, ids_TK: Tensor, num_experts: int, /) -> tuple[Tensor, Tensor, Tensor]: ...

    def gather(self, source_TD: Tensor, slot_n: Tensor, per_token: int, out: Tensor, /) -> None: ...

    def combine(
        self, rows_nD: Tensor, row_of_slot: Tensor, weight_n: Tensor | None, out_TD: Tensor, /
    ) -> None: ...

    def combine_backward(
        self,
        dy_TD: Tensor,
        rows_nD: Tensor,
        slot_n: Tensor,
        per_token: int,
        weight_n: Tensor,
        drows_nD: Tensor,
        dweight_n: Tensor,
        /,
    ) -> None: ...


class TokenPermute:
    """An implementation: the op as autograd sees it.

    A caller that computes between gather and combine uses its functions.
    """

    def __init__(self, functions: PermuteFunctions):
        self.functions = functions

    def __call__(
        self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        return _Permuted.apply(x_TD, weights_TK, ids_TK, num_experts, self.functions)


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        num_experts: int,
        functions: PermuteFunctions,
    ) -> tuple[Tensor, Tensor]:
        x_TD = x_TD.contiguous()
        slot_n, row_of_slot, offsets_E = functions.sort(ids_TK, num_experts)
        rows = x_TD.new_empty((slot_n.numel(), x_TD.shape[1]))
        functions.gather(x_TD, slot_n, ids_TK.shape[1], rows)
        y = torch.zeros(x_TD.shape, dtype=torch.promote_types(x_TD.dtype, torch.float32), device=x_TD.device)
        weight_n = weights_TK.reshape(-1)[slot_n]
        functions.combine(rows, row_of_slot, weight_n, y)
        ctx.save_for_backward(rows, weight_n, slot_n, row_of_slot)
        ctx.functions, ctx.shape = functions, weights_TK.shape
        ctx.mark_non_differentiable(offsets_E)
        return y.to(x_TD.dtype), offsets_E

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight_n, slot_n, row_of_slot = ctx.saved_tensors
        dy_TD = dy_TD.contiguous()
        wide = torch.promote_types(dy_TD.dtype, torch.float32)
        drows = torch.empty_like(rows)
        dweight_n = torch.empty(slot_n.numel(), dtype=wide, device=dy_TD.device)
        ctx.functions.combine_backward(dy_TD, rows, slot_n, ctx.shape[1], weight_n, drows, dweight_n)
        dx = torch.zeros(dy_TD.shape, dtype=wide, device=dy_TD.device)
        ctx.functions.combine(drows, row_of_slot, None, dx)
        dweights = dweight_n[row_of_slot].view(ctx.shape).to(weight_n.dtype)
        return dx.to(dy_TD.dtype), dweights, None, None, None


def _load_triton() -> TokenPermute:
    from unfreeze.kernels.token_permute import triton_cuda

    return TokenPermute(triton_cuda)


def _case(tokens: int, per_token: int, num_experts: int, width: int, cuda_width: int) -> Case:
    """Inputs to measure with; a GPU gets wider rows."""

    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        D = cuda_width if device.type == "cuda" else width
        x = normal(device, generator, tokens, D).to(dtype).requires_grad_()
        ids = uniform(device, generator, tokens, num_experts).topk(per_token, dim=1).indices
        return x, ids, uniform(device, generator, tokens, per_token).requires_grad_(), num_experts

    ids = torch.empty((tokens, per_token), device="meta")
    return Case(bucket(ids, ids, None, num_experts), inputs)


def _use(name: str, inputs: Callable[..., Arguments]) -> Case:
    return Case("under 1k", inputs, function=lambda op: getattr(op.functions, name), name=name)


def _sorted(
    device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor]:
    """(x [48, 40], the order of its 3 rows per token among 8 experts, weights of the rows)."""
    x, ids, weights, _ = _case(48, 3, 8, 40, 40).inputs(device, dtype, generator)
    assert isinstance(x, Tensor) and isinstance(ids, Tensor) and isinstance(weights, Tensor)
    order = reference.sort(ids, 8)
    return x.detach(), order, weights.detach().reshape(-1)[order[0]]


def _gather_inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
    """Into a wider buffer: beside x stand the columns of adapters."""
    x, (slot_n, _, _), _ = _sorted(device, dtype, generator)
    return x, slot_n, 3, x.new_zeros(len(slot_n), x.shape[1] + 8)


def _combine_inputs(
    weighted: bool, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> Arguments:
    """Added to what is there."""
    x, (slot_n, row_of_slot, _), weight_n = _sorted(device, dtype, generator)
    rows = x.repeat_interleave(3, dim=0)[slot_n].contiguous()
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.randn(x.shape, generator=generator).to(device, wide)
    return rows, row_of_slot, weight_n if weighted else None, out


OP = Op(
    name="token_order",  # in records and on the command line
    reference=TokenPermute(reference),
    candidates={
        "triton": triton_options.candidate(_load_triton, "2 bytes a number to combine, the reference 22")
    },
    cases=(_case(64, 4, 64, 1024, 7168), _case(1024, 8, 128, 256, 7168), _case(8192, 8, 384, 64, 7168)),
    # float32: a sum of K terms. bf16: one rounding of y and dx; dx passes through rows that were rounded once
    # before
    tolerance={torch.float32: 1e-6, torch.bfloat16: 5e-3},
    uses=(
        _use("gather", _gather_inputs),
        _use("combine", functools.partial(_combine_inputs, True)),
        _use("combine", functools.partial(_combine_inputs, False)),
    ),
)
