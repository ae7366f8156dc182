"""Attention masks beyond "causal, inside one document": a sliding window, or chunks.

A model's layers may use different ones, so each call takes a mask. T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Causal inside one document, and narrower if a number is set.

    window  a query sees itself and the window - 1 tokens before it (Mistral, Gemma, gpt-oss)
    chunk   a query sees the tokens of its own chunk only; chunks of that many tokens are counted from the
            document's start (Llama 4)
    """

    window: int | None = None
    chunk: int | None = None

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """True where a query at that position sees a key at that one, in one document; broadcasts."""
        allowed = key <= query
        if self.window is not None:
            allowed &= key > query - self.window
        if self.chunk is not None:
            allowed &= key >= query // self.chunk * self.chunk
        return allowed

    def narrows(self, length: int) -> bool:
        """True if this mask differs from a causal one in a document of that many tokens."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))


CAUSAL = Mask()
