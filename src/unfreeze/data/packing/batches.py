"""Pack examples into batches: the only place where labels are shifted.

`Batches` is the iterator; its cursor says where it is. Axes: T tokens of a step, S documents. An Example
holds one *unshifted* document; `pack` concatenates documents and shifts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.torch_types import from_numpy
from unfreeze.data.packing.answers import laid_out
from unfreeze.data.packing.order import Order, Shuffled
from unfreeze.data.packing.packers import PACKERS, Packing, PackingPlan
from unfreeze.data.packing.source import Cursor, Step
from unfreeze.data.packing.windows import InWindows, Whole, Windows
from unfreeze.data.store.examples import TAUGHT, Example, Examples

SHUFFLED = "shuffled"
"""Value of Cursor["batches"]: batches of an epoch are shuffled. Older versions took batches in the order the
packer opened them (their cursors lack this field and resume that way). Short documents then come first, so
the loss falls within an epoch even if nothing is learned."""

PLANS = 2
"""Number of plans to cache: a run uses the first epoch's plan for its summary, its step count and its
batches."""


def pack(examples: Sequence[Example], extras: Mapping[str, Sequence[Sequence[float]]] | None = None) -> Batch:
    """Concatenate documents into a batch: targets[t] = tokens[t + 1], weights[t] = weights[t + 1] in each.

    The last position of each document has weight 0 and target 0.

    Documents keep their order. For compared answers see packing/answers.py: `documents` then holds each one's
    "side" and "example", and `examples` their number. This is the only shift in the project
    (docs/why/trust.md N4).

    extras: name -> one number per token for each document. They are shifted like weights and become
    Batch.extras (float32 [T]). Raises DataError for no documents, empty documents, or extras of another
    length.
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
    compared["extras"] = {
        name: from_numpy(_shifted(name, values, lengths)) for name, values in (extras or {}).items()
    }
    for example, start, length in zip(examples, starts, lengths, strict=True):
        if len(example.weights) != length:
            raise DataError(f"row {example.row}: {length} tokens but {len(example.weights)} weights")
        tokens[start : start + length] = example.tokens
        targets[start : start + length - 1] = example.tokens[1:]
        weights[start : start + length - 1] = example.weights[1:]
    return Batch(
        tokens_T=from_numpy(tokens),
        targets_T=from_numpy(targets),
        weights_T=from_numpy(weights),
        positions_T=from_numpy(np.arange(total) - np.repeat(starts, lengths)),
        starts_S=from_numpy(starts.astype(np.int64)),
        **compared,
    )


def _shifted(name: str, values: Sequence[Sequence[float]], lengths: np.ndarray) -> np.ndarray:
    """Shift one extra like weights, float32 [T]: each document's numbers without the first, then 0."""
    if [len(each) for each in values] != lengths.tolist():
        raise DataError(
            f"extras {name!r} has {[len(each) for each in values]} numbers, not {lengths.tolist()}"
        )
    return np.array([number for each in values for number in [*each[1:], 0.0]], dtype=np.float32)


def batch_order(start: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the cursor field for the batch order; empty if `start` comes from an older version."""
    return {"batches": SHUFFLED} if start is None or "batches" in start else {}


_plans: OrderedDict[tuple[str, int, int], PackingPlan] = OrderedDict()


class Batches:
    """The Source of encoded documents (source.py): an endless stream of steps in an order fixed by the seed.

    Every document appears once per epoch, or as often as `order` says when it mixes files. Iterating yields
    (`micro_batches` of Batch, Cursor). The cursor is the position of the *next* step: `Batches(…,
    start=cursor)` resumes there. A batch holds whole documents, at most `tokens_per_step` tokens in total,
    packed as `packing` says (PACKERS). `documents` holds those of the last step's batches.

    A cursor has {"epoch", "position"} with the position in batches, plus "window" if an epoch has several. It
    also has everything that must be unchanged for the position to be valid: {"seed", "tokens_per_step",
    "packing", "batches", "fingerprint"}, data_weights for mixed files, and a digest of all rows for windows.

    Raises DataError for a document longer than a batch, or if an epoch yields no document. Raises ConfigError
    for a cursor of other data or settings.
    """

    def __init__(
        self,
        examples: Sequence[Example] | InWindows,
        tokens_per_step: int,
        seed: int,
        start: Mapping[str, Any] | None = None,
        *,
        packing: Packing = "first_fit",
        order: Order | None = None,
        micro_batches: int = 1,
    ):
        self._windows: Windows = (
            examples
            if isinstance(examples, InWindows)
            else _whole(Examples.of(examples), tokens_per_step, seed, order)
        )
        self.tokens_per_step, self.micro_batches, self._seed = tokens_per_step, micro_batches, seed
        self.packing: Packing = packing
        self.documents: list[list[Example]] = []
        self.examples: Examples = Examples.of(())  # until the first window is open
        self._fingerprint = self._made_of = ""
        # Settings that the cursor is checked against: its position is valid only if they are unchanged.
        self._identity = {
            **self._windows.identity,
            "tokens_per_step": tokens_per_step,
            "packing": packing,
            **batch_order(start),
        }
        for name, value in self._identity.items() if start is not None else ():
            self._refuse_other(start or {}, name, value)
        epoch, window = (int(start["epoch"]), int(start.get("window", 0))) if start else (0, 0)
        if epoch < 0 or not 0 <= window < self._windows.count:
            raise ConfigError(f"cannot resume: there is no window {window} of epoch {epoch}")
        self._open(epoch, window)
        if start is not None:
            self._refuse_other(start, "fingerprint", self._fingerprint)
            self._go_to(int(start["position"]))

    def _refuse_other(self, start: Mapping[str, Any], name: str, value: object) -> None:
        if start.get(name) != value:
            what = "the data" if name in ("rows", "window_rows", "fingerprint") else name
            raise ConfigError(
                f"cannot resume: {what} changed ({name} was {start.get(name)!r}, is {value!r})",
                next=f"restore {what}, or start a new run with another --out",
            )

    def _go_to(self, position: int) -> None:
        (name, number), count = list(self._place().items())[-1], len(self._plan)
        if not 0 <= position <= count:
            raise ConfigError(
                f"cannot resume: position {position} of {name} {number} lies outside its {count} batches"
            )
        self.position = position

    def _place(self) -> dict[str, int]:
        return self._windows.place(self.epoch, self.window)

    def _open(self, epoch: int, window: int) -> None:
        """Wait for a window, pack it, and go to its start."""
        examples = self._windows.examples(epoch, window)
        self.epoch, self.window, self.position = epoch, window, 0
        if examples is not self.examples:
            self.examples, self._fingerprint = examples, examples.fingerprint()
            # Cache key of plans: an order may also depend on the file of each document.
            files = hashlib.blake2b(examples.sources_N.tobytes(), digest_size=16).hexdigest()
            made_of = [self._identity, self._fingerprint, files, self._seed]
            self._made_of = json.dumps(made_of, sort_keys=True)
        self._plan = self._planned(epoch, window)

    def _planned(self, epoch: int, window: int) -> PackingPlan:
        """Return the batches of a window of the current documents, from the cache if recently used."""
        made_of = (self._made_of, epoch, window)
        if made_of not in _plans:
            order, lengths = self._windows.order(epoch, len(self.examples)), self.examples.packed_N.tolist()
            placed = PACKERS[self.packing](order, lengths, self.tokens_per_step) if lengths else []
            plan = PackingPlan(order, placed)
            place = self._windows.place(epoch, window).values()
            _plans[made_of] = plan.shuffled([self._seed, *place]) if "batches" in self._identity else plan
            while len(_plans) > PLANS:
                _plans.popitem(last=False)
        _plans.move_to_end(made_of)
        return _plans[made_of]

    def plan(self, epoch: int) -> PackingPlan:
        """Return the batches of an epoch (or of its current window) as lists of example indices.

        A pure function of (lengths, tokens_per_step, packing, order, seed, epoch).
        """
        return self._planned(epoch, 0) if self._windows.known else self._plan

    def cursor(self) -> Cursor:
        """Return the position of the next step."""
        windows = self.window + self.position / max(1, len(self._plan))
        passes = self.epoch + windows / self._windows.count
        place = {**self._place(), "position": self.position, "passes": passes}
        return {**place, **self._identity, "fingerprint": self._fingerprint}

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        self.documents = [self._next() for _ in range(self.micro_batches)]
        return [pack(documents) for documents in self.documents], self.cursor()

    def _next(self) -> list[Example]:
        """Return the documents of the next batch."""
        self._windows.take()
        empty = 0
        while self.position >= len(self._plan):
            empty += not len(self._plan)
            # with small data_weights an epoch may hold no document
            if empty > self._windows.count and not self._windows.known:
                raise DataError(
                    "no row of the data is left to train on", next="unfreeze data show FILE --model MODEL"
                )
            last = self.window + 1 == self._windows.count
            self._open(self.epoch + last, 0 if last else self.window + 1)
        self.position += 1
        return [self.examples[index] for index in self._plan[self.position - 1]]

    def len_batches(self, epochs: float) -> int | None:
        """Return the number of batches in `epochs` passes from the start; None if data comes in windows.

        A fraction is rounded up to a whole batch.
        """
        if not self._windows.known:
            return None
        whole = math.floor(epochs)
        batches = sum(len(self.plan(epoch)) for epoch in range(whole))
        fraction = epochs - whole
        return batches + (math.ceil(fraction * len(self.plan(whole))) if fraction else 0)

    def len_steps(self, epochs: float) -> int | None:
        """Return the number of steps in `epochs` passes, or None if the data comes in windows.

        The last step is filled up from the next pass.
        """
        batches = self.len_batches(epochs)
        return None if batches is None else -(-batches // self.micro_batches)

    def efficiency(self) -> float:
        """Return the share of the token budget used by the first epoch's batches (1.0 = every batch is full).

        With windows: the batches of the current window.
        """
        return self.plan(0).efficiency(self.examples.packed_N, self.tokens_per_step)


def _whole(examples: Examples, tokens_per_step: int, seed: int, order: Order | None) -> Whole:
    """Return an epoch of in-memory documents; the longest must fit, because a batch holds whole documents."""
    if not examples:
        raise DataError("no documents to train on")
    place = int(examples.packed_N.argmax())
    longest = int(examples.packed_N[place])
    if longest > tokens_per_step:
        raise DataError(
            f"row {examples.rows_N[place]} has {longest} tokens, tokens_per_step is"
            f" {tokens_per_step}; a step holds whole documents",
            next=(f"--tokens-per-step {longest} or more, or --sequence-length {tokens_per_step} or less"),
        )
    return Whole(examples, order or Shuffled(len(examples), seed))
