"""Start a run before its last row is encoded, and complete the data statistics later."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unfreeze.config.tables import Data, Training
from unfreeze.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from unfreeze.data import Stats
    from unfreeze.data.packing.windows import InWindows
    from unfreeze.data.store.streamed import Stream
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

MANY_ROWS = 50_000
"""Files with more rows are read in windows if the run's steps are given. Encoding this many takes 5 s on two
cores; the first window takes 1 s."""


def in_windows(run: Run, data: Data, training: Training) -> bool:
    """True if large files are read in windows.

    That needs a given number of steps and no data.weights: epochs need the length of every document (for
    number of steps and schedule), and weights need the documents of each file. A resumed run keeps its mode.
    Raises ConfigError if the run started in windows and now cannot.
    """
    possible = training.steps is not None and not data.weights
    if run.cursor is None:
        return possible
    began = "window" in run.cursor
    if began and not possible:
        raise ConfigError(
            "cannot resume: this run reads its rows in windows, which needs a number of steps",
            next="resume with --steps",
        )
    return began


class Followed:
    """Hook that emits the statistics of all rows once the last is encoded during training.

    stats   statistics emitted at the start
    tell    emits a "data" event with statistics, at a step
    wrong   -> warnings about statistics
    leaked  -> warning about held-out rows that are also trained on, among the rows encoded so far
    """

    def __init__(
        self,
        stream: InWindows,
        stats: Stats,
        tell: Callable[[Stats, int], None],
        wrong: Callable[[Stats], list[str]],
        leaked: Callable[[], str] = lambda: "",
    ):
        self._stream, self._first, self._tell, self._wrong = stream, stats, tell, wrong
        self._open, self._said, self._warned = stream.whole is None, len(wrong(stats)), False
        self._leaked, self._leak = leaked, leaked()

    def __call__(self, state: State, result: StepResult) -> None:
        if self._stream.error is not None and not self._warned:
            self._warned = True
            later = f"{self._stream.error.message}; the run stops when it needs the rows from there on"
            state.run.events.emit("warning", state.step, message=later)
        if self._stream.whole is not None:
            self.end(state)

    def end(self, state: State) -> None:
        """Emit the statistics of all rows, or at the run's end those encoded until then."""
        if not self._open:
            return
        self._open = False
        stats = self._stream.stats()
        stats.packing, stats.efficiency = self._first.packing, self._first.efficiency
        self._tell(stats, state.step)
        wrong = self._wrong(stats)
        # do not repeat warnings about the first rows; the statistics have the new figures
        for message in wrong if len(wrong) > self._said else ():
            state.run.events.emit("warning", state.step, message=message)
        if (leak := self._leaked()) != self._leak:
            state.run.events.emit("warning", state.step, message=leak)


def shared(opened: Callable[[], Stream | None], group: Group) -> InWindows | None:
    """Share the stream of `opened`: process 0 encodes, the others receive (data/store/handed.py)."""
    from unfreeze.data.store.handed import Taken, handed, opening

    stream = group.on_rank0(opened)
    if group.size == 1:
        return stream
    first = group.of_first(opening(stream) if stream is not None else b"")
    if group.rank:
        return Taken(first, lambda: group.of_first(b"")) if first else None
    if stream is not None:
        stream.hand = lambda window: group.of_first(handed(window))
    return stream


@contextmanager
def saved_before(state: State, keep: int, streamed: bool, group: Group) -> Generator[None]:
    """Save before a bad row, found while encoding during training, stops the run.

    All processes find it in the same step.
    """
    from unfreeze.train.together import save_together

    try:
        yield
    except DataError as error:
        if not streamed or state.step == 0:
            raise
        save_together(state, keep, group=group)
        raise DataError(
            f"{error.message}; step {state.step} is saved",
            next="--data.on-bad-row skip --save.allow-changed data.on_bad_row continues from there; a"
            " corrected file needs another --out",
        ) from error
