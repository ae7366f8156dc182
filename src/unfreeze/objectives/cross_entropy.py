"""Cross entropy of the next token over the supervised rows of a batch.

By kernels/linear_cross_entropy, which never holds their logits. T tokens of a step, N supervised ones, D
model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss


def cross_entropy(
    hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, *, block_rows: int | None = None, impl: str = "auto"
) -> Loss:
    """sum_t w_t * (logsumexp(z_t) - z_t[target_t]),  z_t = lm_head(hidden_t) in float32.

    A SUM over the rows with w_t > 0.
    hidden_TD float32 or bfloat16 (float64 is computed in float64), lm_head any module [N, D] -> [N, V]: a
    dense, packed or adapted Linear.
    The gradient reaches hidden_TD and every parameter of lm_head that requires one (a weight tied to the
    embedding, an adapter's A and B).
    metrics["correct"]: sum of w_t over tokens whose target no other word outscores.
    Rows without weight are never computed, so a NaN there stays out of the loss, and their gradient is
    exactly 0. Nothing here waits for a GPU where `batch` was sent there from the host (Batch.to): count and
    metrics are scalars on the device.
    """
    # here, because a recipe names its objective before it knows whether there is a model
    from unfreeze.core.batch import Loss
    from unfreeze.kernels.linear_cross_entropy import head_cross_entropy

    rows_N = batch.supervised()
    weights_N = batch.weights_T.index_select(0, rows_N)
    total, correct, _ = head_cross_entropy(
        hidden_TD.index_select(0, rows_N),
        lm_head,
        batch.targets_T.index_select(0, rows_N),
        weights_N,
        block_rows,
        impl,
    )
    return Loss(sum=total, count=weights_N.sum(), metrics={"correct": correct})
