"""log p of each supervised token, used by preference losses, references and policies.

N supervised rows, S documents, D model width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch
    from unfreeze.kernels.linear_cross_entropy import Words


def token_log_p(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    block_rows: int | None = None,
    impl: str = "auto",
    *,
    words: Words | None = None,
) -> Tensor:
    """Return log p(target_t) in nats of every supervised position.

    float64 [N] in the order of batch.supervised(). No gradient.
    words: those that a sampler draws from, and its temperature. None: all rows of the head, at temperature 1.
    """
    import torch

    from unfreeze.kernels.linear_cross_entropy import ALL_WORDS, head_cross_entropy

    rows_N = batch.supervised()
    with torch.no_grad():
        _, _, log_p_N = head_cross_entropy(
            hidden_TD.detach().index_select(0, rows_N),
            lm_head,
            batch.targets_T.index_select(0, rows_N),
            torch.ones_like(rows_N, dtype=torch.float32),
            block_rows,
            impl,
            words=words or ALL_WORDS,
        )
    return log_p_N.double()


def log_probabilities(hidden_TD: Tensor, lm_head: nn.Module, batch: Batch) -> Tensor:
    """Return l of each document: sum_t w_t log p(target_t), float64 [S]. No gradient."""
    weights_N = batch.weights_T.index_select(0, batch.supervised())
    return batch.per_document(token_log_p(hidden_TD, lm_head, batch) * weights_N)


def weighted_log_p(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    weights_N: Tensor,
    block_rows: int | None = None,
    impl: str = "auto",
    *,
    words: Words | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (sum_n weights_n log p(target_n), differentiable; each log p, float32 [N], without gradient).

    weights_N may have any sign. With an advantage as the weight, the gradient of the sum is a policy
    gradient. words as in token_log_p.
    """
    from unfreeze.kernels.linear_cross_entropy import ALL_WORDS, head_cross_entropy

    rows_N = batch.supervised()
    hidden_ND, targets_N = hidden_TD.index_select(0, rows_N), batch.targets_T.index_select(0, rows_N)
    negative, _, log_p_N = head_cross_entropy(
        hidden_ND, lm_head, targets_N, weights_N, block_rows, impl, words=words or ALL_WORDS
    )
    return -negative, log_p_N
