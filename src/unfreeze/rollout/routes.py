"""The experts that the sampler chose, as a batch carries them to the training pass.

T tokens of a micro-batch, L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unfreeze.core.batch import Batch

UNKNOWN = -1


def with_routes(batch: Batch, experts: Sequence[Tensor | None]) -> Batch:
    """Return the batch with extras["routes"], int16 [T, L, K]: the training pass then chooses the same.

    experts: of each document, in the batch's order, those of its first tokens, int16 [tokens, L, K]
    (generate/answer.py: Completion.experts, which lacks the last token); None if the sampler kept none.
    Tokens beyond are UNKNOWN: the model chooses for them itself. Without any experts the batch stays as it
    is.
    """
    kept = next((ids for ids in experts if ids is not None and ids.numel()), None)
    if kept is None:
        return batch
    routes_TLK = torch.full((batch.num_tokens, *kept.shape[1:]), UNKNOWN, dtype=torch.int16)
    starts = [int(start) for start in batch.starts_S]
    for start, length, ids in zip(starts, batch.lengths(), experts, strict=True):
        if ids is not None:
            routes_TLK[start : start + min(length, len(ids))] = ids[:length]
    return replace(batch, extras={**batch.extras, "routes": routes_TLK})
