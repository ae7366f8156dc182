"""What attention may look at beyond "causal, inside one document": a sliding window, or chunks.

A model's layers may differ in it, so it is given per call. T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Causal inside one document, and narrower where a number is given.

    window  a query sees itself and the window - 1 tokens before it (Mistral, Gemma, gpt-oss)
    chunk   a query sees the tokens of its own chunk only; chunks of so many tokens are counted from the
            document's beginning (Llama 4)
    """

    window: int | None = None
    chunk: int | None = None

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query at that position sees a key at that one; positions of one document, broadcast."""
        allowed = key <= query
        if self.window is not None:
            allowed &= key > query - self.window
        if self.chunk is not None:
            allowed &= key >= query // self.chunk * self.chunk
        return allowed

    def narrows(self, length: int) -> bool:
        """Whether a document of so many tokens is seen otherwise than by a causal mask alone."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))


CAUSAL = Mask()
