"""The part that a request has in the choice of the next token: ids it may have, and numbers for their logits.

For token v after the answer's tokens so far, count(v) of them v:
    logit(v) + logit_bias(v) - frequency_penalty · count(v) - presence_penalty · [count(v) > 0]
Log-probabilities that a client sees are those before all of it.

V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from unfreeze.serve.request import Asking, Refused

Allow = Callable[[list[int]], Tensor | None]


class Steer:
    """Called with an answer's tokens so far, for each next one.

    ends      ids that end an answer
    allowed   bool [V] of the ids that may come next
    -> bool [V]; float32 [V], which is added to the logits; or None
    """

    def __init__(self, request: Asking, ends: frozenset[int], num_ids: int, allowed: Allow | None):
        self.request, self.allowed, self.num_ids = request, allowed, num_ids
        if wrong := next((id for id in request.bias if id >= num_ids), None):
            words = f"logit_bias: token id {wrong} is outside the vocabulary 0 to {num_ids - 1}"
            raise Refused(400, words, param="logit_bias")
        self._ends = [id for id in ends if id < num_ids]
        self._bias_V = torch.zeros(num_ids)
        self._bias_V[list(request.bias)] = torch.tensor(list(request.bias.values()))
        self._adds = bool(request.bias or request.presence or request.frequency)

    def __call__(self, tokens: list[int]) -> Tensor | None:
        request = self.request
        allowed_V = None if self.allowed is None else self.allowed(tokens)
        if len(tokens) < request.min_tokens:
            allowed_V = torch.ones(self.num_ids, dtype=torch.bool) if allowed_V is None else allowed_V
            allowed_V[self._ends] = False
            if not allowed_V.any():
                words = (
                    "min_tokens, ignore_eos: an answer with a form ends where its form does; leave them out"
                )
                raise Refused(400, words, param="min_tokens")
        if not self._adds:
            return allowed_V
        added_V = self._bias_V.clone()
        if (request.presence or request.frequency) and tokens:
            ids, counts = torch.tensor(tokens).unique(return_counts=True)
            added_V[ids] -= request.presence + request.frequency * counts
        return added_V if allowed_V is None else added_V.masked_fill(~allowed_V, -torch.inf)


def steered(request: Asking, ends: frozenset[int], num_ids: int, allowed: Allow | None) -> Allow | None:
    """Return what the engine calls for each token; None if the model alone decides. Raises Refused."""
    free = not (request.bias or request.presence or request.frequency or request.min_tokens)
    return allowed if free else Steer(request, ends, num_ids, allowed)
