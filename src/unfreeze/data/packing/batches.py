"""Examples to packed batches: the only place where labels are shifted.

Batches is the iterator, and it says where it stands. T tokens of a step, S documents. An Example holds one
document, *not* shifted; `pack` lays documents end to end and shifts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.packing.answers import laid_out
from unfreeze.data.packing.order import Order, Shuffled
from unfreeze.data.packing.packers import PACKERS, Packing, Plan
from unfreeze.data.store.examples import TAUGHT, Example, Examples

Cursor = dict[str, Any]
"""Where the next batch begins: {"epoch", "position"} and what must be unchanged for that to mean the same
place:
{"seed", "tokens_per_step", "packing", "fingerprint", "batches"} and data_weights where files are mixed.
"passes" over the data so far are told beside it, and not read back. Plain JSON."""

SHUFFLED = "shuffled"
"""Cursor["batches"]: an epoch's batches come in a random order. In the order in which they were begun, as
earlier versions took them (their cursors have no such field, and go on so), short documents come first, and
the loss falls from one end of an epoch to the other where nothing is learned."""

PLANS = 2
"""Plans that are kept: a run asks for the first epoch's for its account, its steps and its batches."""


def pack(examples: Sequence[Example]) -> Batch:
    """targets[t] = tokens[t + 1] and weights[t] = weights[t + 1] inside each document.

    Its last position has weight 0 and target 0.

    Documents keep their order; of answers that are compared see packing/answers.py: `documents` then has the
    "side" of each and its "example", `examples` how many these are. This is the only shift in the project
    (docs/trust.md N4). Raises DataError for no or empty documents.
    """
    compared: dict[str, Any] = {}
    if examples and examples[0].chosen != TAUGHT:
        compared["examples"] = len(examples)
        examples, sides, numbers = laid_out(examples)
        compared["documents"] = {"side": torch.tensor(sides), "example": torch.tensor(numbers)}
    if not examples or any(not example.num_tokens for example in examples):
        raise DataError(
            "a batch needs documents of at least 1 token; got lengths"
            f" {[example.num_tokens for example in examples]}"
        )
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
        **compared,
    )


def batch_order(start: Mapping[str, Any] | None) -> dict[str, str]:
    """What a cursor says of the order of batches; nothing where `start` is an earlier version's."""
    return {"batches": SHUFFLED} if start is None or "batches" in start else {}


Fill = Callable[[Batch, Sequence[Example]], Batch]


def as_packed(batch: Batch, examples: Sequence[Example]) -> Batch:
    """The Fill that adds nothing."""
    return batch


_plans: OrderedDict[tuple[str, int], Plan] = OrderedDict()


class Batches:
    """Training batches without end, in an order fixed by (seed, epoch).

    Every document comes once per epoch, or as `order` mixes files. Iterating yields (Batch, Cursor); the
    cursor says where the *next* batch begins, so `Batches(…, start=cursor)` goes on exactly there. A batch
    holds whole documents, at most `tokens_per_step` tokens together, put together as `packing` says
    (PACKERS).

    Raises DataError for a document longer than a step, ConfigError for a cursor that belongs to other data or
    settings.
    fill: called with (batch, its documents) where a batch gets more than `pack` gives it.
    """

    fill: Fill = staticmethod(as_packed)

    def __init__(
        self,
        examples: Sequence[Example],
        tokens_per_step: int,
        seed: int,
        start: Mapping[str, Any] | None = None,
        *,
        packing: Packing = "first_fit",
        order: Order | None = None,
    ):
        if not examples:
            raise DataError("no documents to train on")
        self.examples = Examples.of(examples)
        # a step holds whole documents, so the longest must fit
        place = int(self.examples.packed_N.argmax())
        longest = int(self.examples.packed_N[place])
        if longest > tokens_per_step:
            raise DataError(
                f"row {self.examples.rows_N[place]} has {longest} tokens, tokens_per_step is"
                f" {tokens_per_step}; a step holds whole documents",
                next=(f"--tokens-per-step {longest} or more, or --sequence-length {tokens_per_step} or less"),
            )
        self.tokens_per_step, self._seed = tokens_per_step, seed
        self.order = order or Shuffled(len(self.examples), seed)
        self.packing: Packing = packing
        # what a cursor is compared with: (epoch, position) means the same place only under these
        self._identity = {
            **self.order.identity,
            "tokens_per_step": tokens_per_step,
            "packing": packing,
            "fingerprint": self.examples.fingerprint(),
            **batch_order(start),
        }
        # what plans are kept by: an order can also depend on which document is of which file
        files = hashlib.blake2b(self.examples.sources_N.tobytes(), digest_size=16).hexdigest()
        self._made_of = json.dumps([self._identity, files, seed], sort_keys=True)
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
            raise ConfigError(
                f"cannot resume: position {position} of epoch {epoch} lies outside its"
                f" {len(self.plan(epoch))} batches"
            )
        self.epoch, self.position = epoch, position

    def plan(self, epoch: int) -> Plan:
        """The batches of an epoch as lists of example indices.

        A pure function of (lengths, tokens_per_step, packing, order, seed, epoch).
        """
        made_of = (self._made_of, epoch)
        if made_of not in _plans:
            order, lengths = self.order(epoch), self.examples.packed_N.tolist()
            plan = Plan(order, PACKERS[self.packing](order, lengths, self.tokens_per_step))
            shuffled = "batches" in self._identity
            _plans[made_of] = plan.shuffled([self._seed, epoch]) if shuffled else plan
            while len(_plans) > PLANS:
                _plans.popitem(last=False)
        _plans.move_to_end(made_of)
        return _plans[made_of]

    def cursor(self) -> Cursor:
        """Where the next batch begins."""
        passes = self.epoch + self.position / max(1, len(self.plan(self.epoch)))
        return {"epoch": self.epoch, "position": self.position, "passes": passes, **self._identity}

    def __iter__(self) -> Iterator[tuple[Batch, Cursor]]:
        return self

    def __next__(self) -> tuple[Batch, Cursor]:
        # an epoch of small data_weights can hold no document
        while self.position >= len(self.plan(self.epoch)):
            self.epoch, self.position = self.epoch + 1, 0
        indices = self.plan(self.epoch)[self.position]
        self.position += 1
        documents = [self.examples[index] for index in indices]
        return self.fill(pack(documents), documents), self.cursor()

    def len_steps(self, epochs: float) -> int:
        """Count the steps in `epochs` passes over the data, from the beginning.

        A fraction is rounded up to a whole step.
        """
        whole = math.floor(epochs)
        steps = sum(len(self.plan(epoch)) for epoch in range(whole))
        fraction = epochs - whole
        return steps + (math.ceil(fraction * len(self.plan(whole))) if fraction else 0)

    def efficiency(self) -> float:
        """Share of the token budget that the first epoch's batches fill (1.0 = every step full)."""
        return self.plan(0).efficiency(self.examples.packed_N, self.tokens_per_step)
