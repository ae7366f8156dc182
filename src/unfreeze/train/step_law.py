"""Learning rate and batch for pretraining by published scaling laws, and the range in which they were fitted.

N parameters without embeddings, D training tokens.

    eta = 1.79 · N^-0.713 · D^0.307        peak learning rate
    B   = 0.58 · D^0.571                   tokens per step

Source: Li et al., "Predictable Scale: Part I, Step Law", arXiv:2503.04715; AdamW, cosine schedule to a small
fixed end, dense models and mixtures.
    D = 20 N                               tokens for the least loss at given compute
Source: Hoffmann et al., arXiv:2203.15556 (Chinchilla).
"""

from __future__ import annotations

from dataclasses import dataclass

from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_count

PARAMETERS = (60e6, 1.1e9)
"""Range of N in the fit: the runs' models have 60 M to 1.07 B."""
TOKENS = (2e9, 100e9)
"""Range of D in the fit: the runs have 2 B to 100 B tokens."""
PER_PARAMETER = 20.0
"""Tokens per parameter, by Chinchilla."""
MOST = 1e18


@dataclass(frozen=True)
class Advice:
    """outside: one sentence per size beyond the fit's range; empty if both are inside."""

    parameters: float
    tokens: float
    learning_rate: float
    tokens_per_step: float
    outside: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Optimizer steps of that many tokens; at least 1."""
        return max(1, round(self.tokens / self.tokens_per_step))

    @property
    def chinchilla(self) -> float:
        """20 N, in tokens."""
        return PER_PARAMETER * self.parameters


def advise(parameters: float, tokens: float) -> Advice:
    """Apply the law. Raises ConfigError for sizes that are no sizes of a model or a text."""
    for name, value in (("params", parameters), ("tokens", tokens)):
        if not 1 <= value <= MOST:
            raise ConfigError(f"{name} = {value:g}; expected 1 to {MOST:g}", next=f"give --{name} 1e9")
    rate = 1.79 * parameters**-0.713 * tokens**0.307
    batch = 0.58 * tokens**0.571
    outside = [
        f"{format_count(value)} {what} are outside the fit ({format_count(low)} to {format_count(high)})"
        for value, what, (low, high) in ((parameters, "parameters", PARAMETERS), (tokens, "tokens", TOKENS))
        if not low <= value <= high
    ]
    return Advice(parameters, tokens, rate, batch, tuple(outside))
