"""Losses of logits by blocks of rows: cross entropy (TargetSums), and any other sum over rows (Sums).

A block's logits, their loss and the gradient of that loss are computed at once; then the logits are dropped.

N rows, B rows of a block, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unfreeze.kernels.linear_cross_entropy.softcap import capped, through_softcap_
from unfreeze.kernels.widened import times, times_transposed

MAX_BLOCK_ROWS = 4096
MIN_BLOCK_ROWS = 128  # below this the head's GEMM is bound by reading the weight, not by arithmetic
# In float32 a GEMM lays out the weight anew for each block. V = 151,936, D = 1,024, two cores with AVX2:
# 89 GFLOP/s in blocks of 128 rows, 111 of 256, 132 of 512, 138 of 1,024; large square GEMMs reach 160.
MIN_FLOAT32_ROWS = 512
# Bytes of a block's logits. Frozen head: blocks of 128 rows are as fast as larger ones and take the least
# memory. Head that trains in bf16: few blocks. With one block its gradient needs no float32 sum of [V, D]
# (545 MB at V = 151,936, D = 896: more than the logits of 1,024 rows); each further block would read and
# write that sum. Blocks of 256 or 512 rows were slower and took more memory. 320 MiB = 1,104 rows of bf16
# logits at V = 151,936; layer gradients are not allocated yet at that point.
CPU_BLOCK_BYTES = {"frozen": 16 * 2**20, "trained": 320 * 2**20}
# 1.25 GiB: 4,096 rows in bf16 at V = 163,840, where a GPU's GEMM is at its full rate
DEVICE_BLOCK_BYTES = 5 * 2**28
# bytes of the head's half precision gradient added to the float32 sum at a time: fits a cache
WEIGHT_CHUNK_BYTES = 8 * 2**20

Answer = tuple[Tensor, Tensor, Tensor]
"""sum_n w_n · -log p_n (differentiable); not differentiable: sum_n w_n over rows whose target wins, and log
p_N of each row."""


class Words(NamedTuple):
    """The words that log p is over, as a sampler draws them: log p = log softmax(z[:num_ids] / temperature).

    num_ids      rows of the head beyond them are padding, with probability 0. None: all rows
    temperature  above 0; z has its softcap already
    """

    num_ids: int | None = None
    temperature: float = 1.0


ALL_WORDS = Words()


class SoftmaxFunctions(Protocol):
    """The module of an implementation; reference.py documents softmax_gradient()."""

    def softmax_gradient(
        self, logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor, wanted: bool, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Sums(Protocol):
    """Sums over blocks of rows.

    add     a block's logits and its slice of rows -> the gradient of the first total by these logits, in
            their dtype, possibly in their memory. If not `wanted` it is undefined
    totals  after all blocks. The first is a differentiable scalar; the others are not differentiable
    dtype   of the sums: float32, or float64 for float64
    """

    dtype: torch.dtype

    def add(self, logits_BV: Tensor, rows: slice, wanted: bool, /) -> Tensor: ...
    def totals(self) -> tuple[Tensor, ...]: ...


def least_rows(dtype: torch.dtype, device: str) -> int:
    """Rows below which the head's GEMMs in that dtype lose speed."""
    return MIN_FLOAT32_ROWS if device == "cpu" and dtype.itemsize >= 4 else MIN_BLOCK_ROWS


def rows_per_block(
    rows: int, vocab: int, itemsize: int, device: str, trained: bool, least: int = MIN_BLOCK_ROWS
) -> int:
    """B: rows whose logits fit the device's budget, within [least, MAX_BLOCK_ROWS].

    The rows are spread as evenly as the number of blocks allows.
    """
    budget = CPU_BLOCK_BYTES["trained" if trained else "frozen"] if device == "cpu" else DEVICE_BLOCK_BYTES
    most = max(least, min(MAX_BLOCK_ROWS, budget // (itemsize * vocab)))
    return -(-rows // -(-rows // most)) if rows else most


class Dense:
    """An implementation of the op.

    (hidden_ND, weight_VD, bias_V, targets_N, weights_N, block_rows, softcap, words) -> Answer.
    """

    def __init__(self, functions: SoftmaxFunctions):
        self.functions = functions

    def __call__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        weights_N: Tensor,
        block_rows: int | None = None,
        softcap: float | None = None,
        words: Words = ALL_WORDS,
    ) -> Answer:
        sums = TargetSums(self.functions, hidden_ND, targets_N, weights_N, words)
        return cast(Answer, through_dense(hidden_ND, weight_VD, bias_V, sums, block_rows, softcap))


def through_dense(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    sums: Sums,
    block_rows: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, ...]:
    """The totals of `sums` over all rows of W h + b, softcapped if `softcap` is a number."""
    wanted = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (hidden_ND, weight_VD, bias_V)
    )
    return _Dense.apply(hidden_ND, weight_VD, bias_V, sums, block_rows, softcap, wanted)


class _Dense(torch.autograd.Function):
    """forward computes loss and gradients block by block.

    backward only scales them by the upstream scalar.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        sums: Sums,
        block_rows: int | None,
        softcap: float | None,
        wanted: bool,
    ) -> tuple[Tensor, ...]:
        to_hidden, to_weight, to_bias = (wanted and needs for needs in ctx.needs_input_grad[:3])
        dtype, device = hidden_ND.dtype, hidden_ND.device.type
        least = least_rows(dtype, device)
        size = block_rows or rows_per_block(
            len(hidden_ND), len(weight_VD), dtype.itemsize, device, to_weight, least
        )
        dhidden_ND = torch.empty_like(hidden_ND) if to_hidden else None
        dweight = _WeightGradient(weight_VD, single=0 < len(hidden_ND) <= size) if to_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=sums.dtype) if to_bias and bias_V is not None else None
        for rows in _blocks(len(hidden_ND), size):
            hidden_BD = hidden_ND[rows]
            logits_BV = _logits(hidden_BD, weight_VD, bias_V)
            shown_BV = logits_BV if softcap is None else capped(logits_BV, softcap)
            dlogits_BV = sums.add(shown_BV, rows, wanted)
            if softcap is not None and wanted:
                through_softcap_(dlogits_BV, logits_BV, softcap)
            if dhidden_ND is not None:
                dhidden_ND[rows] = _times(dlogits_BV, weight_VD)
            if dweight is not None:
                dweight.add(dlogits_BV, hidden_BD)
            if dbias_V is not None:
                dbias_V += dlogits_BV.sum(0, dtype=sums.dtype)
            # otherwise two blocks would be alive while the next one's logits are computed
            del dlogits_BV, logits_BV, shown_BV
        ctx.save_for_backward(
            dhidden_ND,
            None if dweight is None else dweight.value(),
            None if dbias_V is None or bias_V is None else dbias_V.to(bias_V.dtype),
        )
        totals = sums.totals()
        ctx.mark_non_differentiable(*totals[1:])
        return totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors), *(None,) * 4)


def _logits(hidden_BD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """W h + b in h's dtype; a frozen W may be held in a narrower one."""
    if weight_VD.dtype == hidden_BD.dtype:
        return F.linear(hidden_BD, weight_VD, bias_V)
    logits_BV = times_transposed(hidden_BD, weight_VD)
    return logits_BV if bias_V is None else logits_BV.add_(bias_V)


def _times(dlogits_BV: Tensor, weight_VD: Tensor) -> Tensor:
    """dz W in dz's dtype."""
    same = weight_VD.dtype == dlogits_BV.dtype
    return dlogits_BV @ weight_VD if same else times(dlogits_BV, weight_VD)


class TargetSums:
    """Sums of cross entropy: the loss, the weight of rows whose target wins, and every log p."""

    def __init__(
        self,
        functions: SoftmaxFunctions,
        hidden_ND: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        words: Words = ALL_WORDS,
    ):
        self.functions, self.targets_N, self.words = functions, targets_N, words
        self.dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        self.weights_N = weights_N.to(self.dtype)
        self.loss, self.correct = (
            torch.zeros((), dtype=self.dtype, device=hidden_ND.device) for _ in range(2)
        )
        self.log_p_N = torch.empty(len(hidden_ND), dtype=self.dtype, device=hidden_ND.device)

    def add(self, logits_BV: Tensor, rows: slice, wanted: bool) -> Tensor:
        """Add a block's loss. -> its gradient w · (softmax(z / τ) - onehot(target)) / τ.

        It is in the memory of the logits if `functions` can do that.
        """
        weights_B, targets_B = self.weights_N[rows], self.targets_N[rows]
        num_ids, temperature = self.words

        # padding gets probability 0 in place: a slice of the logits would be copied by the kernels
        if num_ids is not None:
            logits_BV[:, num_ids:] = -math.inf
        # rounded as in the sampler: the logits in their dtype, then divided in float32
        divided_BV = logits_BV if temperature == 1 else logits_BV.to(self.dtype).div_(temperature)
        log_p_B, wins_B, dlogits_BV = self.functions.softmax_gradient(
            divided_BV, targets_B, weights_B / temperature, wanted
        )
        self.log_p_N[rows] = log_p_B
        self.loss -= (log_p_B * weights_B).sum()
        self.correct += (wins_B * weights_B).sum()

        # exactly 0: a kernel's exp(-inf) may be 1e-38
        if num_ids is not None and wanted:
            dlogits_BV[:, num_ids:] = 0
        return dlogits_BV.to(logits_BV.dtype)

    def totals(self) -> Answer:
        return self.loss, self.correct, self.log_p_N


class _WeightGradient:
    """dW = sum over blocks of dzᵀ h.

    In half precision the product of a single block is the result. Several blocks are summed in float32,
    because bf16 drops addends below 1/256 of the sum. A block is added in slices of the vocabulary; its whole
    product [V, D] would be one more copy in memory.
    """

    def __init__(self, weight_VD: Tensor, single: bool):
        self.dtype, self.half = weight_VD.dtype, weight_VD.element_size() < 4
        self.single = single and self.half
        new = torch.empty_like if self.single else torch.zeros_like
        self.sum_VD = new(
            weight_VD, dtype=self.dtype if self.single else torch.promote_types(self.dtype, torch.float32)
        )

    def add(self, dlogits_BV: Tensor, hidden_BD: Tensor) -> None:
        if self.single:
            torch.mm(dlogits_BV.t(), hidden_BD, out=self.sum_VD)
        elif not self.half:
            self.sum_VD.addmm_(dlogits_BV.t(), hidden_BD)
        else:
            words = max(1, WEIGHT_CHUNK_BYTES // (hidden_BD.shape[1] * hidden_BD.element_size()))
            for sum_wD, dlogits_Bw in zip(
                self.sum_VD.split(words), dlogits_BV.split(words, dim=1), strict=True
            ):
                sum_wD += dlogits_Bw.t() @ hidden_BD

    def value(self) -> Tensor:
        return self.sum_VD.to(self.dtype)


def through_head(
    hidden_ND: Tensor, head: Callable[[Tensor], Tensor], sums: Sums, block_rows: int
) -> tuple[Tensor, ...]:
    """The same for any head [B, D] -> [B, V]: packed in 4 bits, or with an adapter.

    It uses the head's own backward, block by block.
    """
    parameters = [p for p in head.parameters() if p.requires_grad] if isinstance(head, nn.Module) else []
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or parameters):
        return _Through.apply(hidden_ND, head, sums, block_rows, *parameters)
    for rows in _blocks(len(hidden_ND), block_rows):
        sums.add(head(hidden_ND[rows]), rows, False)
    return sums.totals()


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head: Callable[[Tensor], Tensor],
        sums: Sums,
        block_rows: int,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, ...]:
        dhidden_ND = torch.empty_like(hidden_ND)
        # as in _WeightGradient
        grads = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        for rows in _blocks(len(hidden_ND), block_rows):
            hidden_BD = hidden_ND[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits_BV = head(hidden_BD)
            # a copy: the head's backward may need the logits
            dlogits_BV = sums.add(logits_BV.detach().clone(), rows, True)
            inputs = [hidden_BD, *parameters]
            dhidden_ND[rows], *dparameters = torch.autograd.grad(logits_BV, inputs, dlogits_BV)
            for total, grad in zip(grads, dparameters, strict=True):
                total.add_(grad)
        ctx.save_for_backward(dhidden_ND, *(g.to(p.dtype) for g, p in zip(grads, parameters, strict=True)))
        totals = sums.totals()
        ctx.mark_non_differentiable(*totals[1:])
        return totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, *parameters = (g * upstream.to(g.dtype) for g in ctx.saved_tensors)
        return hidden, None, None, None, *parameters


def _blocks(rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
