"""A second model, which the objective reads: a teacher, or what a policy is compared with. It never trains.

Second       the joint, with the defaults of one that needs nothing but to be asked
  Asked      a teacher that is asked while training              teacher.py
  Stored     what a teacher said, from a folder                  store.py
  AsBegun    the model as it was when training began             reference.py
  Kept       the same, asked once before the first step          kept.py
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
"""What is minimised, as train/step.py calls it."""


@dataclass(frozen=True)
class Beside:
    """What a second model stands beside, for the plan.

    start          where the model that trains starts
    tokens         of a micro-batch
    longest        tokens of its longest document
    head_trains    whether the model's head trains, which the loss then needs a gradient of
    """

    start: Manifest
    tokens: int
    longest: int
    dtype: torch.dtype
    device: torch.device
    head_trains: bool


@dataclass(frozen=True)
class Beginning:
    """The model before its first step, no save loaded, and what it is going to see.

    batches    the run's micro-batches from the first on (`count`), then the held-out ones
    in_windows whether the data is read in windows, which would be read twice
    data       a fingerprint of the documents
    folder     the run's; process 0 writes in it
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
        """Raise UserError where it cannot stand beside the model that starts as `start`; reads no tensor."""

    @abstractmethod
    def said(self, start: Manifest) -> str:
        """What it is and what is minimised, in one line, for the start of a run."""

    def known(self, examples: Examples) -> None:  # noqa: B027 (every document can be asked about)
        """Raise UserError for a document it cannot say anything of; `examples` are those of the run."""

    def aside(self, beside: Beside) -> Aside:
        """What it takes in memory."""
        from unfreeze.parallel.plan.aside import Aside

        return Aside()

    @abstractmethod
    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """What is minimised, with the second model in its place. `model` has its adapters already."""

    def source(self, source: Source, beginning: Beginning) -> Source:
        """The run's steps, with what the objective reads besides. Every process calls it."""
        return source


class Filled:
    """A Source whose batches have more than `pack` gives them: fill(batch, its documents), on the host."""

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
