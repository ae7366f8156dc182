"""A task of `unfreeze eval`: items, a score for each, and what the scores mean.

Whoever makes tasks (rows, texts, needles, lm-eval) follows `Task`; whoever runs them (`unfreeze eval`, the
--eval of a training run) knows nothing else about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from unfreeze.evaluate.kept import Kept
    from unfreeze.generate.model import Model

Shown = Callable[[int, int], None]
"""(done, all) of what a task counts (`Task.counts`), called after each batch."""


def unseen(done: int, total: int) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Settings:
    """Settings of all tasks.

    limit           most items of a task; None: all. The first ones, in order
    max_new_tokens  of a greedy answer
    batch           answers at once; None: as many as memory allows
    seed            of items that are drawn (needle, recall)
    lengths         tokens of the texts of needle and recall; (): chosen by the model's positions
    columns         FIELD=COLUMN of rows, as for sft
    window          tokens of a window of ppl
    chat            tasks of lm-eval are asked as a user's message, by the model's chat template
    """

    limit: int | None = None
    max_new_tokens: int = 256
    batch: int | None = None
    seed: int = 0
    lengths: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()
    window: int = 2048
    chat: bool = False


@dataclass(frozen=True)
class Scores:
    """One measure of one task: the score of each of R items.

    score = Σ w_r v_r / Σ w_r over the items with a value, or exp of that

    measure           "exact", "acc_norm", "bits per byte"
    items             names of the items, the same for every model: by them two models are paired
    values            v_r; None: this item has no score (its metric failed)
    weights           w_r; (): each 1. Bytes for bits per byte, tokens for a perplexity
    unit              "share", "nats", …; "" if the measure says it
    higher_is_better  False for losses and perplexities
    exponent          True: the score is exp(mean), as a perplexity is
    failed            reason -> items without a score for it
    grid              rows (name -> item numbers by column) of a table of parts, as needle has; {} for none
    contents          what each item asks; (): all differ. Items of one content are drawn together, as one
                      weighted by their number: copies of a row say nothing new of the model
    notes             sentences for the user
    """

    measure: str
    items: Sequence[str]
    values: Sequence[float | None]
    weights: Sequence[float] = ()
    unit: str = "share"
    higher_is_better: bool = True
    exponent: bool = False
    basis: str = ""
    failed: Mapping[str, int] = field(default_factory=dict[str, int])
    grid: Mapping[str, Mapping[str, Sequence[int]]] = field(
        default_factory=dict[str, Mapping[str, Sequence[int]]]
    )
    contents: Sequence[str] = ()
    notes: Sequence[str] = ()


class Task(Protocol):
    """A task.

    name    as the user wrote it: "rows:test.jsonl:exact", "hellaswag"
    digest  hash of all that decides a score beside the model: items, metric, sampling. Known after `check`
    counts  one of what it computes and `shown` counts, such as "window": an item may need several, or a part
    """

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def counts(self) -> str: ...

    def check(self) -> None:
        """Read what can be read before a model is loaded. Raises UserError for what is missing or wrong."""
        ...

    def score(self, model: Model, kept: Kept, shown: Shown = unseen) -> list[Scores]:
        """Score every item with this model: one Scores for each measure, its items in a fixed order.

        kept  what this model computed before an interrupt; look there first, put new results there. Ctrl-C
              (KeyboardInterrupt) may come anywhere, and loses only what is not there
        Raises UserError if the task cannot be scored; the other tasks go on.
        """
        ...
