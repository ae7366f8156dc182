"""A second model that the objective reads: a teacher or a reference. It never trains.

Second       the interface, with defaults
  Asked      a teacher that is queried while training          teacher.py
  Stored     a teacher's stored outputs, from a folder         store.py
  AsBegun    the model as it was when training began           reference.py
  Kept       the same, evaluated once before the first step    kept.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from unfreeze.checkpoint.manifest import Manifest
    from unfreeze.core.batch import Batch, Loss
    from unfreeze.data.packing.source import Documents, Source, Step
    from unfreeze.data.store.examples import Example, Examples
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.parallel.processes.collectives import Group

Objective = Callable[["Tensor", "nn.Module", "Batch"], "Loss"]
"""The objective, as train/step.py calls it."""


@dataclass(frozen=True)
class Beside:
    """The trained model's facts that a second model needs for the plan.

    start          the trained model's starting point
    tokens         of a micro-batch
    longest        tokens of its longest document
    head_trains    True if the model's head trains, so that the loss needs its gradient
    """

    start: Manifest
    tokens: int
    longest: int
    dtype: torch.dtype
    device: torch.device
    head_trains: bool


@dataclass(frozen=True)
class Beginning:
    """The model before its first step, with no save loaded, and its upcoming data.

    batches    the run's micro-batches from the first on (`count`), then the held-out ones
    in_windows True if the data is read in windows, so that it would be read twice
    data       a fingerprint of the documents
    folder     the run's; process 0 writes to it
    """

    model: Decoder
    batches: Callable[[], Iterable[Batch]]
    count: int
    in_windows: bool
    data: str
    dtype: str
    folder: Path
    group: Group
    say: Callable[[str], None]


class Second(ABC):
    """A second model of a run."""

    def check(self, start: Manifest, tokenizer: Tokenizer) -> None:  # noqa: B027 (nothing is refused)
        """Raise UserError if it does not fit the model that starts as `start`; reads no tensor."""

    @abstractmethod
    def said(self, start: Manifest) -> str:
        """Describe the second model and the objective in one line, for the start of a run."""

    def known(self, examples: Examples) -> None:  # noqa: B027 (every document can be asked about)
        """Raise UserError for one of the run's documents that it has no output for."""

    def aside(self, beside: Beside) -> Aside:
        """Return its memory."""
        from unfreeze.parallel.plan.aside import Aside

        return Aside()

    @abstractmethod
    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """Return the objective with the second model in place. `model` already has its adapters."""

    def source(self, source: Source, beginning: Beginning) -> Source:
        """Return the run's steps with the objective's additional inputs. Every process calls it."""
        return source


class Filled:
    """A Source whose batches get further data: fill(batch, its documents), on the host."""

    def __init__(self, source: Documents, fill: Callable[[Batch, Sequence[Example]], Batch]):
        self.source, self.fill = source, fill

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        micro_batches, cursor = next(self.source)
        pairs = zip(micro_batches, self.source.documents, strict=True)
        return [self.fill(batch, documents) for batch, documents in pairs], cursor

    def len_steps(self, epochs: float) -> int | None:
        return self.source.len_steps(epochs)
