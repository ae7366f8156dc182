"""What a recipe hands over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unfreeze.core.command import Common
from unfreeze.core.metrics import OF_TOKENS
from unfreeze.core.schema import Metric
from unfreeze.job.data import Encoding
from unfreeze.job.source import encoded_rows
from unfreeze.job.trained import Trained
from unfreeze.job.watch.spikes import spike_guard
from unfreeze.job.watch.validation import Heldout
from unfreeze.teach.second import Second

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Cursor, Source
    from unfreeze.job.job import Job
    from unfreeze.job.setup import EncodedData, Placed, Setup
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan import Plan
    from unfreeze.train.fit import OnStep
    from unfreeze.train.state import AfterUpdate
    from unfreeze.train.step import Judge, Objective


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
    source        (setup, rows, the placed model, a cursor to go on from) -> what is learned from
    metrics       how the loss and the objective's metrics are named and shown (core/metrics.py)
    judge         (the run) -> what may refuse an update: by default where the loss, in nats, or the gradient
                  norm is far above those of the steps before. The loss of a policy has no such level
    plan_check    raises ConfigError for a plan that the recipe cannot train with
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
    source: Callable[[Setup, EncodedData, Placed, Cursor | None], Source] = encoded_rows
    metrics: Sequence[Metric] = OF_TOKENS
    judge: Callable[[Job], Judge] = spike_guard
    plan_check: Callable[[Plan], None] = lambda plan: None
    said: Sequence[str] = ()
