"""Examples to packed batches: the only place where labels are shifted, and the iterator that knows where it stands.

T tokens of a step, S documents. An Example holds one document, *not* shifted; `pack` lays documents end to end and shifts.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError, DataError

Cursor = dict[str, Any]
"""Where the next batch begins: {"epoch", "position"} and what must be unchanged for that to mean the same place:
{"seed", "tokens_per_step", "fingerprint"}. Plain JSON."""

MAX_OPEN_BATCHES = 64
"""First fit looks back at so many unfinished batches. Bounds the search to O(documents · 64); at 64 and documents of a tenth of a
step, less than 1 % of the token budget stays unused (tests/data/test_packing.py)."""


@dataclass(frozen=True)
class Example:
    """One document before the shift: weights[i] says whether token i counts as a *target*. `row` is its line in the data file.

    weights[0] is 0 by construction: nothing precedes the first token, so nothing can predict it. `cut`: tokens truncation took off.
    """

    tokens: Sequence[int]
    weights: Sequence[float]
    row: int = 0
    cut: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_supervised(self) -> int:
        """Targets that carry loss after the shift."""
        return sum(1 for weight in self.weights[1:] if weight)


def pack(examples: Sequence[Example]) -> Batch:
    """targets[t] = tokens[t + 1] and weights[t] = weights[t + 1] inside each document; its last position has weight 0 and target 0.

    Documents keep their order. This is the only shift in the project (FAILURES N4). Raises DataError for no or empty documents.
    """
    if not examples or any(not example.num_tokens for example in examples):
        raise DataError(f"a batch needs documents of at least 1 token; got lengths {[example.num_tokens for example in examples]}")
    lengths = np.array([example.num_tokens for example in examples])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    total = int(lengths.sum())
    tokens = np.empty(total, dtype=np.int64)
    targets = np.zeros(total, dtype=np.int64)
    weights = np.zeros(total, dtype=np.float32)
    for example, start, length in zip(examples, starts, lengths, strict=True):
        if len(example.weights) != length:
            raise DataError(f"row {example.row}: {length} tokens but {len(example.weights)} weights")
        tokens[start : start + length] = example.tokens
        targets[start : start + length - 1] = example.tokens[1:]
        weights[start : start + length - 1] = example.weights[1:]
    return Batch(
        tokens_T=torch.from_numpy(tokens),
        targets_T=torch.from_numpy(targets),
        weights_T=torch.from_numpy(weights),
        positions_T=torch.from_numpy(np.arange(total) - np.repeat(starts, lengths)),
        starts_S=torch.from_numpy(starts.astype(np.int64)),
    )


class Batches:
    """Training batches without end: every document once per epoch, in an order fixed by (seed, epoch).

    Iterating yields (Batch, Cursor); the cursor says where the *next* batch begins, so `Batches(…, start=cursor)` goes on exactly
    there. A batch holds whole documents, at most `tokens_per_step` tokens together: first fit over the shuffled order.

    Raises DataError for a document longer than a step, ConfigError for a cursor that belongs to other data or settings.
    """

    def __init__(self, examples: Sequence[Example], tokens_per_step: int, seed: int, start: Mapping[str, Any] | None = None):
        if not examples:
            raise DataError("no documents to train on")
        longest = max(examples, key=lambda example: example.num_tokens)
        if longest.num_tokens > tokens_per_step:
            raise DataError(
                f"row {longest.row} has {longest.num_tokens} tokens, tokens_per_step is {tokens_per_step}; a step holds whole documents",
                next=f"--tokens-per-step {longest.num_tokens} or more, or --sequence-length {tokens_per_step} or less",
            )
        self.examples = examples
        self.tokens_per_step = tokens_per_step
        self.seed = seed
        self._identity = {"seed": seed, "tokens_per_step": tokens_per_step, "fingerprint": fingerprint(examples)}
        self._plans: dict[int, list[list[int]]] = {}
        self.epoch, self.position = 0, 0
        if start is not None:
            self._resume(start)

    def _resume(self, start: Mapping[str, Any]) -> None:
        for name, value in self._identity.items():
            if start.get(name) != value:
                what = "the data" if name == "fingerprint" else name
                raise ConfigError(
                    f"cannot resume: {what} changed ({name} was {start.get(name)!r}, is {value!r})",
                    next=f"restore {what}, or start a new run with another --out",
                )
        epoch, position = int(start["epoch"]), int(start["position"])
        if epoch < 0 or not 0 <= position <= len(self.plan(epoch)):
            raise ConfigError(f"cannot resume: position {position} of epoch {epoch} lies outside its {len(self.plan(epoch))} batches")
        self.epoch, self.position = epoch, position

    def plan(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch as lists of example indices. A pure function of (lengths, tokens_per_step, seed, epoch)."""
        if epoch not in self._plans:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
            lengths = [example.num_tokens for example in self.examples]
            self._plans = {epoch: first_fit(order.tolist(), lengths, self.tokens_per_step)}  # one plan is kept: epochs come in order
        return self._plans[epoch]

    def cursor(self) -> Cursor:
        """Where the next batch begins."""
        return {"epoch": self.epoch, "position": self.position, **self._identity}

    def __iter__(self) -> Iterator[tuple[Batch, Cursor]]:
        return self

    def __next__(self) -> tuple[Batch, Cursor]:
        if self.position >= len(self.plan(self.epoch)):
            self.epoch, self.position = self.epoch + 1, 0
        indices = self.plan(self.epoch)[self.position]
        self.position += 1
        return pack([self.examples[index] for index in indices]), self.cursor()

    def len_steps(self, epochs: float) -> int:
        """Steps in `epochs` passes over the data, counted from the beginning (a fraction is rounded up to a whole step)."""
        whole = math.floor(epochs)
        steps = sum(len(self.plan(epoch)) for epoch in range(whole))
        fraction = epochs - whole
        return steps + (math.ceil(fraction * len(self.plan(whole))) if fraction else 0)

    def efficiency(self) -> float:
        """Share of the token budget that the first epoch's batches fill (1.0 = every step full)."""
        total = sum(example.num_tokens for example in self.examples)
        return total / (len(self.plan(0)) * self.tokens_per_step)


def first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each document into the first unfinished batch that has room; batches come out in the order they were begun.

    At most MAX_OPEN_BATCHES stay unfinished: beyond it the oldest is closed.
    """
    batches: list[list[int]] = []
    open_batches: list[tuple[int, int]] = []  # (index into batches, room left), oldest first
    shortest = min(lengths)
    for index in order:
        length = lengths[index]
        slot = next((slot for slot, (_, room) in enumerate(open_batches) if room >= length), None)
        if slot is None:
            open_batches.append((len(batches), capacity))
            batches.append([])
            slot = len(open_batches) - 1
        batch, room = open_batches[slot]
        batches[batch].append(index)
        open_batches[slot] = (batch, room - length)
        if room - length < shortest:
            del open_batches[slot]
        elif len(open_batches) > MAX_OPEN_BATCHES:
            del open_batches[0]
    return batches


def fingerprint(examples: Sequence[Example]) -> str:
    """16 hex digits over every token and weight: two data sets with equal fingerprints give equal batches."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.tokens).to_bytes(8, "little"))
        digest.update(array("q", example.tokens).tobytes())
        digest.update(array("d", example.weights).tobytes())
    return digest.hexdigest()[:16]
