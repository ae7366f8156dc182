"""Source: what a run learns from, one optimizer step after the other, and a place to go on from.

`Batches` (batches.py) is the one of encoded documents. A source may wrap another: with what a second model
said of the documents (teach/second.py), or with the model's own answers in their place (teach/on_policy.py).
Rollouts of reinforcement learning are one that has no documents (examples/rl_loop.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data.store.examples import Example

Cursor = dict[str, Any]
"""Where the next step begins, as plain JSON: a source made with it gives that step and all behind it.
"passes" over the data so far may stand in it; they are told and not read back."""

Step = tuple["list[Batch]", Cursor]
"""(micro-batches of one optimizer step, on the host; the cursor behind them)."""


class Source(Protocol):
    """Steps, one after the other; StopIteration where nothing is left. Every process gets the same."""

    def __iter__(self) -> Iterator[Step]: ...

    def __next__(self) -> Step: ...

    def len_steps(self, epochs: float) -> int | None:
        """Steps of `epochs` passes over the data, from the beginning. None: no length is known."""
        ...


class Documents(Source, Protocol):
    """A Source that packs documents, and says which: what wraps it may look something up for each.

    documents  of each micro-batch of the step that was given last.
    """

    documents: Sequence[Sequence[Example]]
