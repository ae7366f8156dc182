"""When a run begins before its last row is encoded, and how the account of its data is completed then."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unfreeze.config.tables import Data, Training
from unfreeze.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from unfreeze.data import Stats
    from unfreeze.data.store.examples import Examples
    from unfreeze.data.store.handed import Taken
    from unfreeze.data.store.streamed import Stream
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

MANY_ROWS = 50_000
"""Files of more rows are read in windows where the run's steps are given. So many take 5 s on two cores, of
which the first window is one."""


def may_stream(data: Data, training: Training) -> bool:
    """Whether a run may begin before its last row is encoded; in_windows says why."""
    return training.steps is not None and not data.weights


def in_windows(run: Run, data: Data, training: Training) -> bool:
    """Whether large files are read in windows: what else a run needs to know before its first step is known.

    Epochs need the length of every document (number of steps, schedule), data_weights the documents of each
    file. A run goes on as it began.
    Raises ConfigError where it began in windows and cannot go on so.
    """
    may = may_stream(data, training)
    if run.cursor is None:
        return may
    began = "window" in run.cursor
    if began and not may:
        raise ConfigError(
            "cannot resume: this run reads its rows in windows, for a number of steps",
            next="go on with --steps",
        )
    return began


class Followed:
    """A hook that tells the account of all rows, as soon as the last is encoded beside training.

    stats   the account as it was told at the start
    tell    emits a "data" event with an account, at a step
    wrong   -> what there is to be said of an account
    leaked  -> what there is to be said of held-out rows that are also trained on, as far as rows are encoded
    """

    def __init__(
        self,
        stream: Stream | Taken,
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
        """The account of all rows; at the run's end of those that were encoded until then."""
        if not self._open:
            return
        self._open = False
        stats = self._stream.stats()
        stats.packing, stats.efficiency = self._first.packing, self._first.efficiency
        self._tell(stats, state.step)
        wrong = self._wrong(stats)
        # what was said of the first rows is not said again of all: the figures stand in the account
        for message in wrong if len(wrong) > self._said else ():
            state.run.events.emit("warning", state.step, message=message)
        if (leak := self._leaked()) != self._leak:
            state.run.events.emit("warning", state.step, message=leak)


def shared(opened: Callable[[], Stream | None], group: Group) -> Stream | Taken | None:
    """What `opened` gives in process 0, which encodes for all; the others take it (data/store/handed.py)."""
    from unfreeze.data.store.handed import Taken, handed, opening

    stream = group.on_rank0(opened)
    if group.size == 1:
        return stream
    first = group.of_first(opening(stream) if stream is not None else b"")
    if group.rank:
        return Taken(first, lambda: group.of_first(b"")) if first else None
    if stream is not None:

        def hand(found: Examples | DataError) -> None:
            group.of_first(handed(found))

        stream.hand = hand
    return stream


@contextmanager
def saved_before(state: State, keep: int, streamed: bool, group: Group) -> Generator[None]:
    """Where rows are encoded beside training, one that is found to be bad stops the run; it saves first.

    It is found by all processes in the same step.
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
            next="--data.on-bad-row skip --save.allow-changed data.on_bad_row continues from there; a mended"
            " file needs another --out",
        ) from error
