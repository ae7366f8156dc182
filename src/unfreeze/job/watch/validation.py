"""Validation inside training: the held-out loss every N steps, as "eval" events.

The best save is kept, and prompts are answered in between. Gradients, random state and expert counts are
unchanged afterwards. The loss, perplexity and bits per byte are those of evaluate/perplexity.py
(docs/why/trust.md N8).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unfreeze.core.errors import ConfigError
from unfreeze.job.end.written import is_noted
from unfreeze.job.watch.best import Best, forget_validations

if TYPE_CHECKING:
    from unfreeze.config.tables import Data
    from unfreeze.core.batch import Batch
    from unfreeze.data import Dataset, Example, Examples, Tokenizer
    from unfreeze.evaluate.by_row import ByRow
    from unfreeze.job.watch.samples import Samples
    from unfreeze.models import Decoder
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import Objective, StepResult


class Measured(Protocol):
    """Result on held-out documents; `loss` decides which save is the best."""

    @property
    def loss(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def scores(self) -> Mapping[str, float | None]: ...
    @property
    def by_row(self) -> ByRow | None: ...


class Heldout(Protocol):
    """Measure the objective on held-out batches, which the group's processes share."""

    def __call__(
        self, model: Decoder, batches: Iterable[Batch], group: Group, *, objective: Objective
    ) -> Measured: ...


HeldoutOf = Callable[["Decoder", "Iterable[Batch]", "Group"], Measured]
"""(model, held-out batches, processes that share them) -> their measure."""


class Validation:
    """Hook of fit() that measures the held-out loss.

    It runs before the first step (through `first`), every `every` steps (0: never in between) and after the
    last.

    measure      -> the held-out loss of the current model
    keep         saves the state; called when the loss is the lowest so far. -> True if the save exists;
                 State.best then names it (best.py). None: something else chooses the best save
    between      called with the step between validations, for example to answer prompts
    patience     validations in a row without a lower loss after which the run stops (State.ended); 0: never
    agreed       True if any process says so: all must stop at the same step
    fingerprint  of the held-out documents, in every event
    anew         True if the run is under way but nothing was measured on these documents yet
    """

    def __init__(
        self,
        state: State,
        measure: Callable[[], Measured],
        *,
        every: int,
        keep: Callable[[State], bool] | None,
        between: Callable[[int], None] = lambda step: None,
        patience: int = 0,
        agreed: Callable[[bool], bool] = lambda value: value,
        fingerprint: str = "",
        anew: bool = False,
    ):
        self._state, self._measure, self._every, self._between = state, measure, every, between
        self._best = None if keep is None else Best(keep, patience=patience, agreed=agreed)
        self._fingerprint, self._anew = fingerprint, anew

    def first(self) -> None:
        """Measure the loss before training, as an event of step 0. A resumed run has it already.

        If a resumed run has other held-out documents now, measure again, for comparison with later losses.
        """
        if self._state.step == 0 or (self._anew and not self._state.finished):
            with self._state.model.looking():
                self._evaluate(self._state)

    def __call__(self, state: State, result: StepResult) -> None:
        last = state.step == state.schedule.steps
        if not last and not (self._every and state.step % self._every == 0):
            return
        with state.model.looking():
            loss = self._evaluate(state)
            if not last:
                self._between(state.step)
        if self._best is not None:
            self._best(state, loss, last=last)

    def _evaluate(self, state: State) -> float | None:
        """Measure and emit the event. -> the loss, None if it is not finite."""
        started = time.perf_counter()
        measured = self._measure()
        fields: dict[str, Any] = {name: _finite(value) for name, value in measured.scores.items()}
        if self._fingerprint:
            fields["fingerprint"] = self._fingerprint
        if measured.by_row is not None:
            changes = changes_since(measured.by_row, fields["loss"], state, self._fingerprint)
            fields |= {"rows": measured.by_row.rows, "changes": changes}
        state.run.events.emit(
            "eval", state.step, **fields, tokens=measured.tokens, seconds=time.perf_counter() - started
        )
        if fields["loss"] is None:
            state.run.events.emit("warning", state.step, message=f"the held-out loss is {measured.loss}")
        return fields["loss"]


def changes_since(
    now: ByRow, loss: float | None, state: State, fingerprint: str = ""
) -> list[dict[str, Any]]:
    """Changes for an eval event: of every measure since the first validation, of the loss since the lowest.

    State.heldout keeps both earlier validations, by row. If their rows differ (a save without a fingerprint
    cannot tell earlier), this validation becomes the first.
    """
    from unfreeze.evaluate.by_row import ByRow

    rows, earlier_by_name = now.record(), state.heldout
    first = earlier_by_name.get("first")
    others = first is not None and not now.same_rows(ByRow.of(first["rows"]))
    if others:
        forget_validations(state)
    if first is None or others:
        first = {"step": state.step, "loss": loss, "rows": rows}
        state.heldout = {"first": first, "fingerprint": fingerprint}
        return []
    rows_of_event: list[dict[str, Any]] = []
    for name, measures in (("first", list(now.sums)), ("lowest", ["loss"])):
        if name not in earlier_by_name:
            continue
        earlier, since = ByRow.of(earlier_by_name[name]["rows"]), earlier_by_name[name]["step"]
        changes = {measure: now.change(earlier, measure) for measure in measures}
        rows_of_event += [
            {"measure": measure, "since": since, "change": change[0], "error": change[1]}
            for measure, change in changes.items()
            if change is not None
        ]
    lowest = earlier_by_name.get("lowest", earlier_by_name.get("first"))  # step 0 is not stored twice
    if lowest and loss is not None and (lowest["loss"] is None or loss < lowest["loss"]):
        here = {"step": state.step, "loss": loss, "rows": {"loss": rows["loss"]}}
        state.heldout = {"first": earlier_by_name["first"], "lowest": here, "fingerprint": fingerprint}
    return rows_of_event


def refuse_other_rows(run: Run, held_out: Examples | None, data: Data) -> None:
    """Raise ConfigError if the save measured other held-out documents, unless that is allowed.

    Losses on different documents cannot be compared. Saves of earlier versions have no fingerprint.
    """
    saved: dict[str, Any] = (run.saved or {}).get("heldout") or {}
    before = saved.get("fingerprint")
    if not before or held_out is None or before == held_out.fingerprint():
        return
    if data.validation and "data.validation" in run.allow_changed:
        return
    what = (
        f"the rows of {data.validation}" if data.validation else "the rows that validation_fraction holds out"
    )
    allow = (
        f", or add {run.allowing('data.validation')}: the held-out loss is then compared from step"
        f" {run.step} on"
        if data.validation
        else ", or start a new run with another --out"
    )
    raise ConfigError(
        f"cannot resume: {what} differ from those of the saved held-out loss (fingerprint was"
        f" {before!r}, is {held_out.fingerprint()!r})",
        next=f"restore the file{allow}",
    )


def begin_anew(state: State, fingerprint: str) -> bool:
    """True if nothing was measured on these documents yet. Results on other documents are then dropped."""
    if state.heldout.get("fingerprint", fingerprint) != fingerprint:
        state.heldout = {}
        forget_validations(state)
    return not state.heldout and state.best is None


def validation_of(
    state: State,
    dataset: Dataset,
    tokenizer: Tokenizer,
    samples: Samples,
    group: Group,
    *,
    tokens: int,
    every: int,
    patience: int,
    keep: Callable[[State], bool] | None,
    heldout_of: HeldoutOf | None = None,
) -> list[Validation]:
    """Create the Validation, in batches of `tokens`; [] if nothing is held out.

    The processes share its batches. heldout_of: the measure to use instead of cross entropy.
    """
    from unfreeze.data import validation_batches
    from unfreeze.evaluate.perplexity import heldout

    if dataset.validation is None:
        return []
    examples = dataset.validation
    total = supervised_bytes(examples, tokenizer) if heldout_of is None else 0

    def measure() -> Measured:
        batches = validation_batches(examples, tokens)
        if heldout_of is not None:
            return heldout_of(state.model, batches, group)
        return heldout(state.model, batches, bytes_total=total, group=group)

    between = partial(samples.say, "during")
    fingerprint = examples.fingerprint()
    options: dict[str, Any] = {"every": every, "patience": patience, "fingerprint": fingerprint}
    options["anew"] = begin_anew(state, fingerprint)
    return [Validation(state, measure, keep=keep, between=between, agreed=group.any, **options)]


def supervised_bytes(examples: Sequence[Example], tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of the supervised text, after the shift. Special tokens count 0.

    Counted from the bytes of the tokens themselves, so that a character cut by the end of a piece is not
    counted as U+FFFD. A tokenizer that is not byte-level has no bytes of a token; its text is decoded.
    """
    lengths = _TokenLengths(tokenizer)
    total = 0
    for example in examples:
        for first, end in _spans(example.weights):
            tokens = example.tokens[first:end]
            counted = [lengths[token] for token in tokens]
            known = [count for count in counted if count is not None]
            whole = len(known) == len(counted)
            total += sum(known) if whole else _span_bytes(example.tokens, first, end, tokenizer)
    return total


class _TokenLengths(dict[int, "int | None"]):
    """Token -> its number of bytes; None if the tokenizer is not byte-level."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> int | None:
        stored = self._tokenizer.token_bytes(token)
        self[token] = None if stored is None else len(stored)
        return self[token]


def _spans(weights: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield [first, end) of each run of supervised targets. A document's first token is never a target."""
    first: int | None = None
    for i in range(1, len(weights) + 1):
        supervised = i < len(weights) and bool(weights[i])
        if supervised and first is None:
            first = i
        elif not supervised and first is not None:
            yield first, i
            first = None


def _span_bytes(tokens: Sequence[int], first: int, end: int, tokenizer: Tokenizer) -> int:
    """Bytes of tokens first to end: decode(up to end) minus decode(up to first).

    The difference is needed because some decoders strip a space at the start of a text.
    """
    return len(tokenizer.decode(tokens[:end]).encode()) - len(tokenizer.decode(tokens[:first]).encode())


def write_best(state: State, folder: Path, write: Callable[[Path, int], object]) -> None:
    """If an earlier save was better than the last step, load its weights and call write(folder, its step)."""
    from unfreeze.train.state import load_best

    if (step := load_best(state)) is not None:
        write(folder, step)


def best_is_written(run: Run, folder: Path) -> bool:
    """True if a finished run need not write its best save (any more)."""
    best = (run.saved or {}).get("best")
    there = folder.is_dir() and is_noted(run.path, folder)
    return best is None or best["step"] == run.step or there


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
