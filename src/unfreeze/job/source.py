"""Sources of training batches (Parts.source). The default packs the encoded documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from unfreeze.job.data import batches_in, num_steps
from unfreeze.job.opening.device import say
from unfreeze.parallel.answers import Answers
from unfreeze.teach.on_policy import OnPolicy, OwnAnswers
from unfreeze.teach.second import Beginning

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data import Batches, Cursor, Source
    from unfreeze.data.packing.growing import Growing
    from unfreeze.job.setup import EncodedData, Placed, Setup


def encoded_rows(setup: Setup, rows: EncodedData, at: Placed, start: Cursor | None) -> Batches:
    """Pack the documents of the data files, starting at the cursor `start`."""
    return _batches(setup, rows, start)


def growing_rows(
    shares: Sequence[tuple[int, float]], setup: Setup, rows: EncodedData, at: Placed, start: Cursor | None
) -> Growing:
    """Like encoded_rows, with shorter documents at first. shares: (length, share of the steps)."""
    from unfreeze.data.packing.growing import Growing, stages_of

    source = encoded_rows(setup, rows, at, start)
    return Growing(source, stages_of(shares, num_steps(setup.config.training, source)), start)


def refuse_changed_rows(setup: Setup, rows: EncodedData) -> None:
    """Raise ConfigError if the rows of a resumed run changed, before any weight is loaded.

    Rows read in windows are compared when the first window is opened.
    """
    if (cursor := setup.folder.cursor) and rows.dataset.stream is None:
        _batches(setup, rows, cursor)


def _batches(setup: Setup, rows: EncodedData, start: Cursor | None) -> Batches:
    config = setup.config
    return batches_in(
        config.data,
        rows.dataset,
        tokens=config.tokens_per_micro_batch,
        seed=config.seed,
        packing=config.training.packing,
        start=start,
        micro_batches=config.memory.micro_batches,
    )


def own_answers(
    on_policy: OnPolicy, setup: Setup, rows: EncodedData, at: Placed, start: Cursor | None
) -> OwnAnswers:
    """Like encoded_rows, with the student's own answers in a share of the steps."""

    def tell(step: int, fields: dict[str, float]) -> None:
        setup.folder.events.emit("on_policy", step, **fields)

    source, step = encoded_rows(setup, rows, at, start), setup.folder.step
    return OwnAnswers(source, on_policy, at.speaker.engine, step=step, group=setup.group, tell=tell)


def documents_answered(tokens: int, each: int, longest: int, documents: int) -> Answers:
    """A row of the cache for each document of a micro-batch, and at most its positions."""
    return Answers(max(1, tokens // max(1, each)), max(tokens, longest))


def with_second(setup: Setup, rows: EncodedData, at: Placed, source: Source, steps: int) -> Source:
    """Add the second model's outputs to the source."""
    config, second, dataset = setup.config, setup.parts.second, rows.dataset
    if second is None:
        return source
    count = steps * config.memory.micro_batches

    def batches() -> Iterator[Batch]:
        from unfreeze.data import validation_batches

        cursor = setup.folder.cursor
        behind = (
            {**cursor, "epoch": 0, "position": 0} if cursor else None
        )  # start of the epoch, in this run's order
        first = setup.parts.source(setup, rows, at, behind)
        micro_batches = chain.from_iterable(step for step, _ in first)
        held_out = validation_batches(dataset.validation or (), config.tokens_per_micro_batch)
        return chain(islice(micro_batches, count), held_out)

    beginning = Beginning(
        model=at.model,
        batches=batches,
        count=count,
        in_windows=dataset.stream is not None,
        data=dataset.examples.fingerprint(),
        dtype=config.memory.dtype,
        folder=setup.folder.path,
        group=setup.group,
        say=say(setup.common),
    )
    return second.source(source, beginning)
