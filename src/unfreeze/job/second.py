"""The joint for a second model beside the one that trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.data import Example, Examples, Tokenizer
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan.aside import Aside
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
