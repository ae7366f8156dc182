"""The joint for a second model beside the one that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

from unfreeze.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.data import Batches, Dataset, Example, Examples, Tokenizer
    from unfreeze.data.packing.windows import WindowBatches
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.step import Objective


class Second(Protocol):
    """A second model, which the objective reads: a teacher, or what a policy is compared with.

    It never trains. teach/ has the kinds of it.
    """

    def check(self, start: Manifest, tokenizer: Tokenizer) -> None:
        """Raise UserError where it cannot stand beside the model that starts as `start`; reads no tensor."""
        ...

    def said(self, start: Manifest) -> str:
        """What it is and what is minimised, in one line, for the start of a run."""
        ...

    def known(self, examples: Examples) -> None:
        """Raise UserError for a document it cannot say anything of; `examples` are those of the run."""
        ...

    def fill(self, batch: Batch, examples: Sequence[Example]) -> Batch:
        """The batch of these documents with what the objective reads besides, on the host."""
        ...

    def aside(
        self,
        start: Manifest,
        tokens: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
        trained: bool,
    ) -> Aside:
        """What it takes beside micro-batches of `tokens`; trained: whether the model's head trains."""
        ...

    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """What is minimised, with the second model in its place. `model` has its adapters already."""
        ...


class Begin(Protocol):
    """What is asked of the model as it began, once. Every process calls it, before a save is loaded.

    batches: the run's micro-batches from the first on (`count`), then the held-out ones. data: a fingerprint
    of the documents. folder: the run's; process 0 writes in it.
    """

    def __call__(
        self,
        model: Decoder,
        batches: Iterable[Batch],
        *,
        count: int,
        data: str,
        dtype: str,
        folder: Path,
        group: Group,
        say: Callable[[str], None],
    ) -> None: ...


def first_asked(
    begin: Begin, model: Decoder, batches: Batches | WindowBatches, dataset: Dataset, count: int, **given: Any
) -> None:
    """Call `begin` with the first `count` micro-batches of `batches`, then the held-out ones.

    Raises ConfigError for data that comes in windows: it would be read twice.
    """
    from unfreeze.data import validation_batches

    if dataset.stream is not None:
        raise ConfigError(
            "--preference.reference cached asks about all rows before the first step, and these come in"
            " windows",
            next="--preference.reference live",
        )
    held_out = dataset.validation or ()
    all_of_them = chain(
        (batch for batch, _ in islice(batches, count)), validation_batches(held_out, batches.tokens_per_step)
    )
    begin(model, all_of_them, count=count, data=dataset.examples.fingerprint(), **given)
    model.reshard()  # a forward pass gathers divided weights: the optimizer takes those held here
