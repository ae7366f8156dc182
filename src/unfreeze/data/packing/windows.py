"""Training batches of large files: window by window, each shuffled and packed by itself (streamed.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.packing.batches import Cursor, Fill, as_packed, batch_order, pack
from unfreeze.data.packing.packers import PACKERS, Packing, Plan
from unfreeze.data.store.handed import Taken
from unfreeze.data.store.streamed import Stream


class WindowBatches:
    """Batches without end, as `Batches` are, whose order is fixed by (seed, epoch, window).

    A cursor has {"epoch", "window", "position"}, and what must be unchanged for that to mean the same place:
    the bytes of all rows ("rows"), and every token of its window ("fingerprint").
    Raises ConfigError for a cursor of other data or settings, DataError for what `stream.window` refuses, and
    where no row of an epoch gives a document. fill: as of Batches.
    """

    fill: Fill = staticmethod(as_packed)

    def __init__(
        self,
        stream: Stream | Taken,
        tokens_per_step: int,
        start: Mapping[str, Any] | None = None,
        *,
        packing: Packing = "first_fit",
    ):
        self._stream, self.tokens_per_step, self.packing = stream, tokens_per_step, packing
        self._identity = {
            "seed": stream.seed,
            "tokens_per_step": tokens_per_step,
            "packing": packing,
            "window_rows": stream.size,
            "rows": stream.rows.digest,
            **batch_order(start),
        }
        for name, value in self._identity.items() if start is not None else ():
            self._refuse_other(start or {}, name, value)
        epoch, number = (int(start["epoch"]), int(start["window"])) if start else (0, 0)
        self._open(epoch, number)
        self.position = int(start["position"]) if start else 0
        if start is not None:
            self._refuse_other(start, "fingerprint", self._fingerprint)
            if not 0 <= self.position <= len(self._plan):
                raise ConfigError(
                    f"cannot resume: position {self.position} of window {number} lies outside its"
                    f" {len(self._plan)} batches"
                )

    def _refuse_other(self, start: Mapping[str, Any], name: str, value: object) -> None:
        if start.get(name) != value:
            what = "the data" if name in ("rows", "window_rows", "fingerprint") else name
            raise ConfigError(
                f"cannot resume: {what} changed ({name} was {start.get(name)!r}, is {value!r})",
                next=f"restore {what}, or start a new run with another --out",
            )

    def _open(self, epoch: int, number: int) -> None:
        """Wait for a window, and pack it."""
        self._examples = self._stream.window(epoch, number)
        self.epoch, self.number, self.position = epoch, number, 0
        self._fingerprint = self._examples.fingerprint()
        order, lengths = range(len(self._examples)), self._examples.packed_N.tolist()
        placed = PACKERS[self.packing](order, lengths, self.tokens_per_step) if lengths else []
        plan = Plan(order, placed)
        self._plan = (
            plan.shuffled([self._stream.seed, epoch, number]) if "batches" in self._identity else plan
        )

    def cursor(self) -> Cursor:
        """Where the next batch begins."""
        windows = self.number + self.position / max(1, len(self._plan))
        passes = self.epoch + windows / self._stream.windows
        place = {"epoch": self.epoch, "window": self.number, "position": self.position, "passes": passes}
        return {**place, **self._identity, "fingerprint": self._fingerprint}

    def __iter__(self) -> Iterator[tuple[Batch, Cursor]]:
        return self

    def __next__(self) -> tuple[Batch, Cursor]:
        self._stream.take()
        empty = 0
        while self.position >= len(self._plan):
            empty += not len(self._plan)
            if empty > self._stream.windows:
                raise DataError(
                    "no row of the data is left to train on", next="unfreeze data show FILE --model MODEL"
                )
            last = self.number + 1 == self._stream.windows
            self._open(self.epoch + last, 0 if last else self.number + 1)
        indices = self._plan[self.position]
        self.position += 1
        documents = [self._examples[index] for index in indices]
        return self.fill(pack(documents), documents), self.cursor()

    def len_steps(self, epochs: float) -> int:
        """Not known before every row is encoded: a run in windows has its number of steps given."""
        raise ConfigError(
            f"cannot go on for {epochs:g} epochs: this run reads its rows in windows, for a number of steps",
            next="--steps, with --save.allow-changed steps",
        )

    def efficiency(self) -> float:
        """Share of the token budget that the batches of this window fill."""
        return self._plan.efficiency(self._examples.packed_N, self.tokens_per_step)
