"""Source: the stream of optimizer steps a run trains on, with a cursor to resume from.

`Batches` (batches.py) is the Source of encoded documents. A Source may wrap another: one that adds a
second model's outputs for the documents (teach/second.py), or one that replaces the documents by the model's
own answers (teach/on_policy.py). Reinforcement-learning rollouts are a Source without documents
(examples/rl_loop.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data.store.examples import Example

Cursor = dict[str, Any]
"""Position of the next step, as plain JSON. A Source created with it yields that step and everything after
it.
It may hold "passes" (over the data so far), which is only reported, never read back."""

Step = tuple["list[Batch]", Cursor]
"""(micro-batches of one optimizer step, on the host; the cursor after them)."""


class Source(Protocol):
    """A stream of steps; raises StopIteration at the end. Every process gets the same steps."""

    def __iter__(self) -> Iterator[Step]: ...

    def __next__(self) -> Step: ...

    def len_steps(self, epochs: float) -> int | None:
        """Return the number of steps in `epochs` passes from the start; None if no length is known."""
        ...


class Documents(Source, Protocol):
    """A Source that packs documents and exposes them, so that a wrapper can look something up for each.

    documents  of each micro-batch of the last step returned
    """

    documents: Sequence[Sequence[Example]]
