"""Cross entropy of the next token over the supervised rows of a batch.

Computed by kernels/linear_cross_entropy, which never holds the logits of all rows at once. T tokens of a
step, N supervised ones, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss


def cross_entropy(
    hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, *, block_rows: int | None = None, impl: str = "auto"
) -> Loss:
    """Return sum_t w_t * (logsumexp(z_t) - z_t[target_t]),  z_t = lm_head(hidden_t) in float32.

    A sum, not a mean, over the rows with w_t > 0.
    hidden_TD float32 or bfloat16 (float64 is computed in float64), lm_head any module [N, D] -> [N, V]: a
    dense, packed or adapted Linear.
    The gradient reaches hidden_TD and every parameter of lm_head that requires one (a weight tied to the
    embedding, an adapter's A and B).
    metrics["correct"]: sum of w_t over tokens whose target has the highest logit, ties included.
    Rows without weight are never computed, so a NaN there stays out of the loss, and their gradient is
    exactly 0.
    If `batch` came from the host by Batch.to, the host doesn't wait for the GPU here: count and metrics are
    scalars on the device.
    """
    # imported here: a recipe names its objective before anything needs torch
    import torch

    from unfreeze.core.batch import Loss
    from unfreeze.kernels.linear_cross_entropy import head_cross_entropy

    rows_N = batch.supervised()
    weights_N = batch.weights_T.index_select(0, rows_N)
    total, correct, log_p_N = head_cross_entropy(
        hidden_TD.index_select(0, rows_N),
        lm_head,
        batch.targets_T.index_select(0, rows_N),
        weights_N,
        block_rows,
        impl,
    )
    each = None if torch.is_grad_enabled() else batch.per_document(-log_p_N.double() * weights_N)
    return Loss(sum=total, count=weights_N.sum(), metrics={"correct": correct}, each=each)
