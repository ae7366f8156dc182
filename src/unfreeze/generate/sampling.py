"""Choose the next token: greedy, temperature, top-k, top-p.

A row is sampled by inverting its cumulative distribution at one uniform number u. So its choice is a plain
function of (logits, u): it can be tested exactly, is the same on every device, and does not change when
another row of the batch finishes.

S sequences, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError, UserError


class NotFinite(UserError):
    """The logits are NaN or infinite: no token can be chosen."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Raises ConfigError for a value out of range.

    max_new_tokens  maximum number of sampled tokens per prompt, 1 or more
    temperature     0 takes the likeliest token; otherwise logits are divided by it
    top_k           only the k likeliest tokens (and any tied with the k-th); None or 0: all
    top_p           only the smallest set of likeliest tokens whose probabilities sum to p, after top_k;
                    None
                    or 1: all
    stop            strings at which the text ends; they are not part of it
    seed            the same seed, prompts and model give the same tokens; None: a fresh seed each time
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be finite, 0 (greedy) or more", next="try 0.7"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be a positive number of tokens, or 0 for all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1", next="try 0.95")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop is {self.stop!r}; it must be a list of non-empty strings")


def keep_likely(logits_SV: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Return logits with -inf for tokens that top-k or top-p excludes. [S, V] -> [S, V] float32.

    top-k keeps the k likeliest. top-p keeps a token if the probability of all likelier ones is below p
    (Holtzman et al. 2020, arXiv:1904.09751). The likeliest token always stays.
    """
    logits_SV = logits_SV.float()
    if top_k and top_k < logits_SV.shape[-1]:
        kth_S1 = logits_SV.topk(top_k, dim=-1).values[:, -1:]
        logits_SV = logits_SV.masked_fill(logits_SV < kth_S1, float("-inf"))
    if top_p is not None and top_p < 1:
        sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True)
        probability_SV = sorted_SV.softmax(-1)
        drop_SV = probability_SV.cumsum(-1) - probability_SV >= top_p
        drop_SV[:, 0] = False
        dropped_SV = torch.zeros_like(drop_SV).scatter_(1, order_SV, drop_SV)  # back in the order of ids
        logits_SV = logits_SV.masked_fill(dropped_SV, float("-inf"))
    return logits_SV


def draw(logits_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """Return the token at which the cumulative softmax first exceeds u. logits [S, V], u [S] -> int64 [S].

    P(token v) = softmax(logits)[v] for u uniform in [0, 1). A token of probability zero is never returned.
    In float64: a float32 running sum over 163,840 random normal logits changes the share of single tokens by
    up to 80 %.
    """
    cumulative_SV = logits_SV.double().softmax(-1).cumsum(-1)
    total_S1 = cumulative_SV[:, -1:]
    below_S1 = torch.nextafter(total_S1, torch.zeros_like(total_S1))  # u * total may round up to the total
    target_S1 = torch.minimum(uniform_S.double()[:, None] * total_S1, below_S1)
    return torch.searchsorted(cumulative_SV, target_S1, right=True)[:, 0]


class Chooser:
    """Picks one token per row, step after step, with the random generator of one batch."""

    def __init__(self, sampling: Sampling, num_sequences: int):
        self.sampling, self.num_sequences = sampling, num_sequences
        self.generator = torch.Generator()  # on the host: the same numbers whatever the model's device
        if sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(sampling.seed)

    def choose(self, logits_SV: Tensor, rows: list[int]) -> list[int]:
        """Choose one step's token ids for the rows still running. logits [S, V] -> S ids.

        rows: the original index of each in the batch.
        Raises NotFinite if the logits are not numbers: argmax would silently return some token.
        """
        if self.sampling.temperature == 0:
            best_S, ids_S = logits_SV.max(-1)
            finite = bool(best_S.isfinite().all())
        else:
            finite = bool(logits_SV.isfinite().all())
            scaled_SV = logits_SV.float() / self.sampling.temperature
            kept_SV = keep_likely(scaled_SV, self.sampling.top_k, self.sampling.top_p)
            # Draw a number for every row of the original batch, so that finished rows don't shift the others'
            # numbers.
            uniform = torch.rand(self.num_sequences, generator=self.generator, dtype=torch.float64)
            ids_S = draw(kept_SV, uniform[rows].to(logits_SV.device))
        if not finite:
            raise NotFinite(
                "the model's logits are not finite numbers, so no token can be chosen",
                next="unfreeze doctor MODEL finds NaN weights; if there are none, compute in float32",
            )
        return ids_S.tolist()
