"""Parts: a recipe's own parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unfreeze.core.command import Common
from unfreeze.core.metrics import OF_TOKENS
from unfreeze.core.schema import Metric
from unfreeze.job.data import Encoding
from unfreeze.job.planning.plan import Answering
from unfreeze.job.source import encoded_rows, refuse_changed_rows
from unfreeze.job.trained import Trained
from unfreeze.job.watch.spikes import spike_guard
from unfreeze.job.watch.validation import Heldout
from unfreeze.teach.second import Second
from unfreeze.train.interrupt import Interrupt

if TYPE_CHECKING:
    from torch import Tensor

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
    """Definition of a recipe.

    recipe        its name on the command line
    trained       the trained weights and how they are written: Adapters | AllWeights
    objective     the loss; with a second model, `second.objective` replaces it
    start         the model's name -> manifest of the starting model
    new           True if `start` makes a model: `model` is then the folder of its tokenizer
    encoding      conversion of rows to examples
    beside        (the model, its objective) -> the objective with what trains beside it, such as a loss that
                  balances experts
    after_update  changes to the model after an update, such as the balancing bias
    chat          True if the user's prompts are sent as messages, False if they are continued as text
    on_step       hooks called with (state, result) after each step, after receipt and validation
    second        a second model that the objective reads (teacher, reference)
    heldout       measure of held-out documents, if it is not their cross entropy
    source        (setup, rows, the placed model, a cursor to resume from) -> source of batches
    kept          cursor -> tensors of a save that the source needs to go on there (train/state.py)
    metrics       names and format of the loss and the objective's metrics (core/metrics.py)
    judge         (the run) -> judge that can refuse an update. Default: refuse a loss (in nats) or a gradient
                  norm far above those of earlier steps. Override it for a loss without a usual level, such
                  as a policy gradient's
    answers       (tokens of a micro-batch, of a mean document, of the longest; documents) -> answers sampled
                  at once, if the model answers prompts before it trains on them; the plan has their cache
    rows_check    (setup, rows) -> raises for rows that the recipe cannot take, or that are not those of a
                  resumed run, before any weight is loaded
    close         called when the run has ended, however it did
    plan_check    raises ConfigError for a plan that the recipe cannot train with
    interrupt     notices Ctrl-C and SIGTERM while the run trains; a source may look at it
    before        called once with the run, after the first validation and before the first step of a new run
    start_lines   lines shown at the start, after model, memory and trained weights
    """

    recipe: str
    trained: Trained
    objective: Objective
    start: Callable[[str, Common], Manifest]
    encoding: Encoding = field(default_factory=Encoding)
    beside: Callable[[Decoder, Objective], Objective] = lambda model, objective: objective
    after_update: Callable[[Decoder], Sequence[AfterUpdate]] = lambda model: ()
    chat: bool = True
    on_step: Sequence[OnStep] = ()
    second: Second | None = None
    heldout: Heldout | None = None
    source: Callable[[Setup, EncodedData, Placed, Cursor | None], Source] = encoded_rows
    kept: Callable[[Cursor], Mapping[str, Tensor]] = lambda cursor: {}
    new: bool = False
    metrics: Sequence[Metric] = OF_TOKENS
    before: Sequence[Callable[[Job], None]] = ()
    judge: Callable[[Job], Judge] = spike_guard
    answers: Answering | None = None
    rows_check: Callable[[Setup, EncodedData], None] = refuse_changed_rows
    close: Callable[[], None] = lambda: None
    plan_check: Callable[[Plan], None] = lambda plan: None
    interrupt: Interrupt = field(default_factory=Interrupt)
    start_lines: Sequence[str] = ()
