"""Bytes of answers while a model samples them: the KV cache, and the work on a step's logits."""

from __future__ import annotations

from dataclasses import dataclass

LOGIT_BYTES = 48  # per logit of a row at the peak of sampling: sorted, cumulative, in float64


@dataclass(frozen=True)
class Answers:
    """Answers that are sampled at once. positions: of the cache, of all rows together."""

    rows: int
    positions: int

    def cache(self, cached: int) -> int:
        """Bytes of the KV cache; `cached`: of a position (Decoder.cache_bytes)."""
        return self.positions * cached

    def logits(self, vocab_size: int) -> int:
        """Bytes of the work on a step's logits."""
        return self.rows * vocab_size * LOGIT_BYTES
