"""What a recipe hands over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unfreeze.core.command import Common
from unfreeze.job.data import Encoding
from unfreeze.job.second import Begin, Second
from unfreeze.job.trained import Trained
from unfreeze.job.watch.validation import Heldout

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.job.job import Job
    from unfreeze.models import Decoder
    from unfreeze.train.fit import OnStep
    from unfreeze.train.state import AfterUpdate
    from unfreeze.train.step import Objective


@dataclass(frozen=True)
class Parts:
    """What makes a kind of training.

    recipe        its name on the command line
    trained       what trains and is left behind: Adapters | AllWeights
    objective     what is minimised; with a second model, `second.objective` gives it
    start         the model's name -> where training starts
    encoding      how rows become examples
    after_update  what changes the model after an update, such as the balancing bias
    chat          whether prompts of the user's own are asked as messages (else continued)
    on_step       called with (state, result) after each step, after receipt and validation
    second        a model beside the one that trains, which the objective reads
    heldout       what is measured of held-out documents, where that is not their cross entropy
    rewrite       (the run, a step's micro-batches, steps before it) -> the micro-batches that are learned:
                  with answers of the model's own, for example. Called on every process; all get the same
    begin         what is asked of the model as it began, before a save is loaded
    said          lines that the start shows of the recipe, beside model, memory and what trains
    """

    recipe: str
    trained: Trained
    objective: Objective
    start: Callable[[str, Common], Manifest]
    encoding: Encoding = field(default_factory=Encoding)
    after_update: Callable[[Decoder], Sequence[AfterUpdate]] = lambda model: ()
    chat: bool = True
    on_step: Sequence[OnStep] = ()
    second: Second | None = None
    heldout: Heldout | None = None
    rewrite: Callable[[Job, list[Batch], int], list[Batch]] | None = None
    begin: Begin | None = None
    said: Sequence[str] = ()
