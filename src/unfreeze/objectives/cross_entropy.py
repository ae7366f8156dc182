"""Cross entropy of the next token, without ever holding the logits of all tokens.

[T, V] logits of one Kimi-K2 step (65,536 tokens, 163,840 words) would be 43 GB in float32. Here a block of supervised tokens is
sent through the head, its loss and the gradient of that loss are computed at once, and the block is dropped. What lives until
backward is the gradient of the hidden states [T, D] and of the head's trainable parameters.

T tokens of a step, N rows of one block (supervised tokens only), D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unfreeze.core.batch import Batch, Loss

MAX_BLOCK_ROWS = 4096
MIN_BLOCK_ROWS = 128  # below it the head's GEMM is bound by reading the weight, not by arithmetic
# float32 logits of a block. Measured on one busy core, forward and backward, 2,048 tokens, D = 1,024, V = 8,192, bfloat16, head frozen /
# trained: blocks of 128 rows 857 / 2,968 ms, 512 rows 850 / 2,106, 2,048 rows 914 / 2,149; F.cross_entropy on all logits 1,052 / 2,157.
CPU_BLOCK_BYTES = 16 * 2**20
DEVICE_BLOCK_BYTES = 5 * 2**28  # 1.25 GiB: 2,048 rows at V = 163,840, where a GPU's GEMM is at its full rate


def cross_entropy(hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, *, block_rows: int | None = None) -> Loss:
    """sum_t w_t * (logsumexp(z_t) - z_t[target_t]),  z_t = lm_head(hidden_t) in float32: a SUM over the rows with w_t > 0.

    hidden_TD float32 or bfloat16 (float64 is computed in float64), lm_head any module [N, D] -> [N, V]: a dense, packed or adapted Linear.
    The gradient reaches hidden_TD and every parameter of lm_head that requires one (a weight tied to the embedding, an adapter's A and B).
    metrics["correct"]: sum of w_t over tokens whose target no other word outscores.
    Memory beside the result: about 3 float32 blocks [N, V]; `block_rows` overrides N. Rows without weight are never computed, so a
    NaN there stays out of the loss, and their gradient is exactly 0. Reading count and metrics synchronises once.
    """
    rows_N = batch.weights_T.gt(0).nonzero().squeeze(1)
    parameters = [p for p in lm_head.parameters() if p.requires_grad]
    if torch.is_grad_enabled() and (hidden_TD.requires_grad or parameters):
        total, correct = _BlockedCrossEntropy.apply(hidden_TD, lm_head, batch, rows_N, block_rows, *parameters)  # type: ignore[misc]
    else:
        total, correct = _run_blocks(hidden_TD, lm_head, batch, rows_N, block_rows, None, [])
    count = batch.weights_T.index_select(0, rows_N).sum(dtype=torch.float32)
    correct_sum, count_sum = torch.stack([correct.float(), count]).tolist()
    return Loss(sum=total, count=count_sum, metrics={"correct": correct_sum})


def rows_per_block(vocab_size: int, device: torch.device) -> int:
    """N, the rows whose float32 logits fit the block budget of the device, within [MIN_BLOCK_ROWS, MAX_BLOCK_ROWS]."""
    budget = CPU_BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    return max(MIN_BLOCK_ROWS, min(MAX_BLOCK_ROWS, budget // (4 * vocab_size)))


class _BlockedCrossEntropy(torch.autograd.Function):
    """forward computes loss and gradients block by block; backward only scales them by the upstream scalar."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, rows_N: Tensor, block_rows: int | None, *parameters: nn.Parameter
    ) -> tuple[Tensor, Tensor]:
        grad_hidden_TD = torch.zeros_like(hidden_TD) if ctx.needs_input_grad[0] else None
        # float32 sums: a bfloat16 weight gradient summed over blocks in bfloat16 would lose what a block adds below 1/256 of the sum
        grads = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        buffers = list(zip(parameters, grads, strict=True))
        total, correct = _run_blocks(hidden_TD, lm_head, batch, rows_N, block_rows, grad_hidden_TD, buffers)
        ctx.save_for_backward(grad_hidden_TD, *(g.to(p.dtype) for g, p in zip(grads, parameters, strict=True)))
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, *parameters = (None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors)
        return hidden_TD, None, None, None, None, *parameters


def _run_blocks(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    rows_N: Tensor,
    block_rows: int | None,
    grad_hidden_TD: Tensor | None,
    parameter_grads: Sequence[tuple[nn.Parameter, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Loss sum and correct sum; where gradients are asked for, they are added into grad_hidden_TD and the parameters' buffers."""
    dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=hidden_TD.device)
    correct = torch.zeros_like(total)
    with_grad = grad_hidden_TD is not None or bool(parameter_grads)
    # The vocabulary is known once a block has passed the head; a packed or adapted head says so itself.
    size = block_rows or rows_per_block(int(lm_head.out_features), hidden_TD.device)  # type: ignore[arg-type]
    for block_N in rows_N.split(size) if rows_N.numel() else ():
        target_N1 = batch.targets_T.index_select(0, block_N).unsqueeze(1)
        weight_N = batch.weights_T.index_select(0, block_N).to(dtype)
        hidden_ND = hidden_TD.detach().index_select(0, block_N).requires_grad_(with_grad)
        with torch.set_grad_enabled(with_grad):
            logits_NV = lm_head(hidden_ND)
        loss_N, correct_N, probs_NV = _token_losses(logits_NV.detach().to(dtype), target_N1)
        total += (loss_N * weight_N).sum()
        correct += (correct_N * weight_N).sum()
        if not with_grad:
            continue
        # d(w * loss)/dz = w * (softmax(z) - onehot(target)), in the buffer of the softmax
        probs_NV.scatter_add_(1, target_N1, probs_NV.new_full((1, 1), -1.0).expand_as(target_N1)).mul_(weight_N.unsqueeze(1))
        inputs = [hidden_ND, *(p for p, _ in parameter_grads)]
        grad_ND, *grads = torch.autograd.grad(logits_NV, inputs, probs_NV.to(logits_NV.dtype))
        if grad_hidden_TD is not None:
            grad_hidden_TD.index_copy_(0, block_N, grad_ND)
        for (_, buffer), grad in zip(parameter_grads, grads, strict=True):
            buffer.add_(grad)
    return total, correct


def _token_losses(logits_NV: Tensor, target_N1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-log softmax(z)[target] per row, whether no word outscores the target, and softmax(z).

    logsumexp(z) = max z - log(max softmax(z)): the softmax is needed for the gradient anyway, and a second pass of exp would cost
    as much again (measured, 512 x 8,192 in float32 on one core: softmax 2.9 ms, logsumexp 5.2, argmax 3.6, max 0.25).
    """
    probs_NV = logits_NV.softmax(-1)
    target_logit_N = logits_NV.gather(1, target_N1).squeeze(1)
    max_N = logits_NV.amax(-1)
    loss_N = max_N - probs_NV.amax(-1).log() - target_logit_N
    return loss_N, target_logit_N.ge(max_N), probs_NV
