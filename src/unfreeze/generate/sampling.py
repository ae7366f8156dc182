"""Choose the next token: greedy, temperature, top-k, top-p.

A row is sampled by inverting its cumulative distribution at one uniform number u. So its choice is a plain
function of (logits, u): it can be tested exactly and is the same on every device. u is a plain function of
(seed, prompt, answer, place of the token in the answer): it does not depend on the other rows of the batch.

S sequences, V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.core.draws import SEEDS, number
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.kernels.largest import largest


class NotFinite(UserError):
    """The logits are NaN or infinite: no token can be chosen."""

    def __init__(
        self,
        message: str = "the model's logits are not finite numbers, so no token can be chosen",
        *,
        next: str = "unfreeze doctor MODEL finds NaN weights; if there are none, compute in float32",
    ):
        super().__init__(message, next=next)


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
    n               number of answers to each prompt
    seeds           a seed for each answer in place of `seed`, the n of the first prompt first. An answer is
                    then the one that its seed gives to its prompt alone
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    seeds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens is {self.max_new_tokens}; it must be at least 1", next="try 256"
            )
        if self.n < 1:
            raise ConfigError(f"n is {self.n}; it must be at least 1 answer to a prompt", next="leave it out")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be finite, 0 (greedy) or more", next="try 0.7"
            )
        if self.top_k is not None and self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be a positive number of tokens, or 0 for all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1", next="try 0.95")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(
                f"stop is {self.stop!r}; it must be a list of non-empty strings",
                next='stop=["###"], or leave it out',
            )
        for name, seeds in (("seed", () if self.seed is None else (self.seed,)), ("seeds", self.seeds or ())):
            if other := next((seed for seed in seeds if not isinstance(seed, int)), None):
                raise ConfigError(f"{name}: {other!r} is not a whole number", next=f"{name} such as 0")
            if beyond := next((seed for seed in seeds if not SEEDS[0] <= seed <= SEEDS[1]), None):
                raise ConfigError(
                    f"{name}: {beyond} is beyond 64 bits ({SEEDS[0]} to {SEEDS[1]})", next=f"{name} such as 0"
                )

    def keys(self, num_prompts: int) -> list[int]:
        """Return for each answer the number that all its random numbers are made of.

        The n of the first prompt come first. Raises ConfigError unless there are as many `seeds`.
        """
        if self.seeds is None:
            seed = secrets.randbits(64) if self.seed is None else self.seed
            return [number(seed, prompt, answer) for prompt in range(num_prompts) for answer in range(self.n)]
        if len(self.seeds) != num_prompts * self.n:
            raise ConfigError(
                f"{len(self.seeds)} seeds for {num_prompts * self.n} answers ({num_prompts} prompts, n ="
                f" {self.n}): there must be one for each",
                next="seed=0 makes one for each answer",
            )
        return [number(seed, 0, 0) for seed in self.seeds]


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


def choose(logits_SV: Tensor, sampling: Sampling, uniforms: Sequence[float]) -> tuple[list[int], Tensor]:
    """Choose one token per row. -> S ids, and the logits [S, V] that they were drawn from.

    uniforms: u of each row, in [0, 1); greedy sampling reads none.
    Raises NotFinite if the logits are not numbers: argmax would silently return some token.
    """
    ids_S, kept_SV, finite_S = chosen(logits_SV, sampling, uniforms)
    if not bool(finite_S.all()):
        raise NotFinite
    return ids_S.tolist(), kept_SV


def chosen(logits_SV: Tensor, sampling: Sampling, uniforms: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """As `choose`. -> ids [S], the logits that they were drawn from, rows whose logits are numbers [S]."""
    if sampling.temperature == 0:
        ids_S, finite_S = largest(logits_SV)
        return ids_S, logits_SV, finite_S
    finite_S = logits_SV.sum(-1).isfinite()  # NaN or infinity in a row is one in its sum
    scaled_SV = logits_SV if sampling.temperature == 1 else logits_SV.float() / sampling.temperature
    kept_SV = keep_likely(scaled_SV, sampling.top_k, sampling.top_p)
    return draw(kept_SV, torch.tensor(uniforms, dtype=torch.float64).to(logits_SV.device)), kept_SV, finite_S


def logprobs_of(logits_SV: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return log softmax(logits_s)[tokens_s] for each row, in float32."""
    chosen_S = logits_SV.gather(1, torch.tensor(tokens, device=logits_SV.device)[:, None])[:, 0]
    return (chosen_S - logits_SV.logsumexp(-1)).tolist()
