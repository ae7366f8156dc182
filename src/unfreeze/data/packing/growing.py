"""Sequence length that grows over a run: short documents first, the same tokens in every step.

The inner Source packs documents of the final length. While a shorter length applies, each document of a step
is cut into pieces of at most that length, inside its micro-batch. So order, tokens per step, tokens per epoch
and the encoded data are those of the run without it; only what a token sees is shorter. A cut costs one
target: a piece's first token has nothing before it.
Attention's cost falls with the length, that of all else stays (as in Press et al., arXiv:2012.15832).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from unfreeze.core.errors import ConfigError
from unfreeze.data.packing.batches import Batches, pack
from unfreeze.data.packing.source import Cursor, Step
from unfreeze.data.store.examples import Example

STEPS = "steps taken"
"""Field of the cursor: the length depends on it."""


def pieces(example: Example, length: int) -> list[Example]:
    """Return a document as pieces of at most `length` tokens, in order; itself if it is no longer."""
    if example.num_tokens <= length:
        return [example]
    cuts = (slice(begin, begin + length) for begin in range(0, example.num_tokens, length))
    return [replace(example, tokens=example.tokens[cut], weights=example.weights[cut]) for cut in cuts]


class Growing:
    """A Source that cuts the documents of another, until its last stage.

    stages  (steps, length): this many steps of documents up to that length, one stage after the other
    start   cursor to resume from: the inner Source's, with the number of steps taken
    Raises ConfigError for a cursor without that number.
    """

    def __init__(self, inner: Batches, stages: Sequence[tuple[int, int]], start: Cursor | None = None):
        if start is not None and STEPS not in start:
            raise ConfigError(
                "cannot resume: the run began without data.sequence_lengths",
                next="leave data.sequence_lengths out, or start a new run with another --out",
            )
        self._inner, self._stages = inner, tuple(stages)
        self._taken = 0 if start is None else int(start[STEPS])
        self.documents: Sequence[Sequence[Example]] = []

    @property
    def length(self) -> int | None:
        """The longest document of the next step; None: as the inner Source gives them."""
        end = 0
        for steps, length in self._stages:
            end += steps
            if self._taken < end:
                return length
        return None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        length = self.length
        batches, cursor = next(self._inner)
        self.documents = self._inner.documents
        if length is not None:
            self.documents = [
                [piece for example in batch for piece in pieces(example, length)] for batch in self.documents
            ]
            batches = [pack(batch) for batch in self.documents]
        self._taken += 1
        return batches, {**cursor, STEPS: self._taken}

    def len_steps(self, epochs: float) -> int | None:
        """Return the inner Source's number of steps: a cut changes none."""
        return self._inner.len_steps(epochs)


def stages_of(shares: Sequence[tuple[int, float]], steps: int) -> list[tuple[int, int]]:
    """Convert (length, share of the run) to (steps, length); ends are rounded, so no step is lost."""
    ends, total = [0], 0.0
    for _, share in shares:
        total += share
        ends.append(round(total * steps))
    return [
        (end - begin, length) for (length, _), begin, end in zip(shares, ends[:-1], ends[1:], strict=True)
    ]
