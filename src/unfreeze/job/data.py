"""From data files to batches and to a schedule, as the config says."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from unfreeze.config.recipes import read_resolved
from unfreeze.config.tables import Data, Optimizer, Training
from unfreeze.config.template import template_time, template_values
from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.job.opening.processes import others
from unfreeze.job.opening.streaming import MANY_ROWS, Followed, in_windows, shared
from unfreeze.report.events import AT_LEAST, ENOUGH_STEPS, LEAKED, TEACH_LITTLE
from unfreeze.tracking.live import EncodeProgress

if TYPE_CHECKING:
    import numpy as np

    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Batches, Dataset, Example, Examples, Stats, Tokenizer
    from unfreeze.data.packing.source import Cursor, Source
    from unfreeze.data.rows.row import Answers
    from unfreeze.data.rows.scan import Repeated
    from unfreeze.data.store.streamed import Stream
    from unfreeze.data.tokens.forms import Reasoning
    from unfreeze.data.tokens.masks import Supervise
    from unfreeze.data.tokens.turns import Turns
    from unfreeze.models.shape import Shape
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run
    from unfreeze.train.schedule import Schedule
    from unfreeze.train.suspects import Describe


def open_tokenizer(run: Run, data: Data, folder: Path) -> Tokenizer:
    """The checkpoint's tokenizer, its chat template at the run's own date."""
    from unfreeze.data import load_tokenizer

    date = read_resolved(run.path, ConfigError).get("data.template_date", "")
    return load_tokenizer(
        folder, now=template_time(date), template_variables=template_values(data.template_variables)
    )


def check_vocabulary(tokenizer: Tokenizer, shape: Shape, manifest: Manifest) -> None:
    """Refuse a vocabulary on which tokenizer, config.json and tensors disagree (docs/why/trust.md N5).

    Before any weight is read.
    """
    from unfreeze.data import check_vocab

    names = ("model.embed_tokens.weight", "lm_head.weight")
    rows = {
        name: info.shape[0] for name, info in manifest.by_model_name().items() if name in names and info.shape
    }
    check_vocab(tokenizer, shape.vocab_size, rows)


Packing = Literal["none", "first_fit", "best_fit"]


class Encoding(TypedDict, total=False):
    """How rows become examples: keyword arguments of data.encode_files."""

    supervise: Supervise
    turns: Turns
    reasoning: Reasoning
    answers: Answers


def encode(
    run: Run,
    data: Data,
    tokenizer: Tokenizer,
    max_positions: int,
    tokens: int,
    seed: int,
    training: Training,
    group: Group,
    *,
    quiet: bool = True,
    **options: Unpack[Encoding],
) -> tuple[Dataset, list[Followed]]:
    """The data files as examples, and a "data" event that accounts for them.

    Of large files, where that can be (streaming.py), the first; and what tells the account of all later.

    An example is no longer than the model's positions and the `tokens` of a micro-batch allow.
    A bound below data.sequence_length is a warning where it cut, dropped or split a row, or where the
    length was asked for.
    """
    from unfreeze.data import Dataset, encoded_files, split_by_content
    from unfreeze.data.rows.scan import Repeated
    from unfreeze.data.store.remarks import labels, losses, mixture

    length = sequence_length(data, document_tokens(options, tokens), max_positions)
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "sequence_length": length,
        "truncation": data.truncation,
        "on_bad_row": data.on_bad_row,
        "columns": data.columns,
        **options,
    }
    encoded = partial(encoded_files, **given)

    bounds = length, data.sequence_length, document_tokens(options, tokens)

    def read(files: Sequence[str]) -> Dataset:
        """Of the processes of a node one encodes, on all cores, and the others read its store."""
        if group.size > 1 and not quiet:
            print(f"process 0 encodes the rows on all cores; {others(group)} for it", file=sys.stderr)
        with EncodeProgress(quiet=quiet) as progress, longer_by(*bounds):
            return group.in_turn(
                lambda first: encoded(files, progress=progress) if first else encoded(files, workers=0)
            )

    # training rows, and what is held out of them or beside them
    stream, look = None, None
    windows = in_windows(run, data, training)
    if windows and data.validation:
        look = group.on_rank0(lambda: Repeated([Path(name) for name in data.held_out], data.columns))
    if windows:
        with EncodeProgress(quiet=quiet) as progress, longer_by(*bounds):
            stream = shared(lambda: stream_of(run, data, tokens, seed, progress, given, look), group)
    dataset = (
        read(data.files)
        if stream is None
        else Dataset(stream.head, stream.stats(), stream.validation, stream)
    )
    stats = dataset.stats
    warnings: list[str] = []
    if data.validation:
        held_out = read(data.held_out)
        dataset = replace(dataset, validation=held_out.examples)
        leaked_N = dataset.leaked()
        if stream is not None:  # rows of the same bytes; in other words of JSON they are found as they come
            found = json.dumps(sorted(look.found) if look is not None else []).encode()
            leaked_N = held_out.examples.made_of(json.loads(group.of_first(found)))
        if leaked_N.any():
            dataset = replace(dataset, validation=_without(held_out.examples, leaked_N, data, run))
            warnings.append(f"{_of(leaked_N)}, so validation leaves them out")
        if held_out.stats.truncated + held_out.stats.dropped + held_out.stats.bad:
            warnings.append(f"validation file: {held_out.stats.summary()}")
    elif data.validation_fraction and stream is None:
        taught, validation = split_by_content(dataset.examples, data.validation_fraction, seed)
        dataset = replace(dataset, examples=taught, validation=validation)

    def tell(stats: Stats, step: int) -> None:
        """The account, with how much of the files it is of where that is not all."""
        stats.held_out = len(dataset.validation or ())
        left = 0 if stream is None or stream.whole is not None else stream.num_rows
        beside = f"of {left:,} rows in the files the first that training needs: " if left else ""
        run.events.emit(
            "data",
            step,
            **stats.as_dict(),
            **({"mixture": mixed} if mixed else {}),
            **({"rows_in_files": left} if left else {}),
            summary="; ".join([beside + stats.summary(), *mixed]),
        )

    def leaked() -> str:
        """What is found only as rows are encoded: a row that stands in the data in other words of JSON."""
        leaked_N = dataset.leaked()
        return f"{AT_LEAST}{_of(leaked_N)}" if leaked_N.any() else ""

    def wrong(stats: Stats) -> list[str]:
        """What is wrong with the data."""
        said = losses(stats, length, max_positions) + labels(dataset.examples)
        asked = data.sequence_length != Data.model_fields["sequence_length"].default
        affected = (
            stats.truncated
            or stats.dropped
            or stats.examples_dropped
            or (data.truncation == "split" and stats.split_rows)
        )
        if length < data.sequence_length and (asked or affected):
            by = (
                "the model's positions"
                if length == max_positions
                else "tokens_per_step / micro_batches (a document is never cut in two)"
                if options.get("answers", "taught") == "taught"
                else "half of tokens_per_step / micro_batches (two answers lie side by side in one)"
            )
            said.append(f"sequence_length {data.sequence_length} is bounded to {length} by {by}")
        return said

    # the account, then what is wrong with the data
    start = run.cursor if stream is not None else None
    micro_batches = training.tokens_per_step // tokens
    batches = batches_in(
        data,
        dataset,
        tokens=tokens,
        seed=seed,
        packing=training.packing,
        start=start,
        micro_batches=micro_batches,
    )
    stats.packing, stats.efficiency = training.packing, batches.efficiency()
    mixed: list[str] = []
    if data.weights and (of_one := batches.len_batches(1)):
        passes = num_steps(training, batches) * micro_batches / of_one
        mixed = mixture(dataset.examples, data.names, data.weights, passes)
    tell(stats, run.step)
    if stream is not None and (later := leaked()):
        warnings.append(later)
    for message in [*warnings, *wrong(stats)] if run.step == 0 else ():
        run.events.emit("warning", 0, message=message)
    # process 0 tells the account of all rows
    return dataset, [] if stream is None or group.rank else [Followed(stream, stats, tell, wrong, leaked)]


def _of(leaked_N: np.ndarray) -> str:
    return f"{leaked_N.sum():,} of {len(leaked_N):,} {LEAKED}"


def _without(examples: Examples, leaked_N: np.ndarray, data: Data, run: Run) -> Examples:
    """What proves something: documents that are not trained on."""
    if leaked_N.all():
        resumed = f" {run.allowing('validation')}" if run.step else ""
        raise ConfigError(
            f"{_of(leaked_N)} ({', '.join(data.held_out[:3])}), so none is held out",
            next=f"--validation FILE of other rows{resumed}"
            + ("" if run.step else ", or in its place --validation-fraction 0.1"),
        )
    return examples.part(~leaked_N)


def stream_of(
    run: Run,
    data: Data,
    tokens: int,
    seed: int,
    progress: EncodeProgress,
    given: dict[str, Any],
    look: Repeated | None = None,
) -> Stream | None:
    """Large files in windows, closed with the run; None for files that are read whole.

    look: is shown every row.
    """
    from unfreeze.data.store.streamed import streamed_files

    stream = streamed_files(
        data.files,
        least=MANY_ROWS if run.cursor is None else 0,
        tokens_per_step=tokens,
        seed=seed,
        validation_fraction=data.validation_fraction,
        start=run.cursor,
        progress=progress,
        look=look,
        **given,
    )
    if stream is not None:
        run.leaving.callback(stream.close)
    return stream


def batches_in(
    data: Data,
    dataset: Dataset,
    *,
    tokens: int,
    seed: int,
    packing: Packing,
    start: Cursor | None = None,
    micro_batches: int = 1,
) -> Batches:
    """Steps of `micro_batches` batches of `tokens`, packed, as [data] mixes and shuffles the documents.

    From the cursor `start` on.
    """
    from unfreeze.data import Batches, Mixed

    options: dict[str, Any] = {"packing": packing, "micro_batches": micro_batches}
    if dataset.stream is not None:
        return Batches(dataset.stream, tokens, dataset.stream.seed, start, **options)
    examples = dataset.examples
    order = Mixed(examples.sources_N, data.weights, seed) if data.weights else None
    return Batches(examples, tokens, seed, start, order=order, **options)


@contextmanager
def longer_by(length: int, asked: int, tokens: int) -> Generator[None]:
    """Rows that are cut too short are told what bounds them: `asked`, the step's `tokens`, or the model."""
    try:
        yield
    except DataError as error:
        if length == tokens:
            also = "--sequence-length and " if length == asked else ""
            right = f"{also}--tokens-per-step higher, if the model takes it"
        elif length < asked:
            right = f"another model: this one takes {length} tokens"
        else:
            raise
        longer = r"--sequence-length (higher|[\d,]+ or more), if the model takes it"
        raise DataError(error.message, next=re.sub(longer, right, error.next)) from None


def document_tokens(encoding: Encoding, tokens: int) -> int:
    """Tokens of the longest document that a micro-batch takes: half of it where two answers are compared.

    The two lie side by side in one; an answer with a label, too, is joined by another.
    """
    return tokens if encoding.get("answers", "taught") == "taught" else tokens // 2


def sequence_length(data: Data, tokens: int, max_positions: int) -> int:
    """Tokens of the longest document that a micro-batch of `tokens` and this model take."""
    return min(data.sequence_length, max_positions, tokens)


def num_steps(training: Training, source: Source) -> int:
    """Optimizer steps: as given, or as many as `epochs` need.

    Raises ConfigError where they are not given and the source has no length.
    """
    if training.steps:
        return training.steps
    if (steps := source.len_steps(training.epochs)) is None:
        raise ConfigError(
            f"cannot go on for {training.epochs:g} epochs: this run reads its rows in windows, for a number"
            " of steps",
            next="--steps, with --save.allow-changed steps",
        )
    return max(1, steps)


def steps_of(config: TrainingConfig, examples: Sequence[Example]) -> tuple[int, int | None]:
    """Steps of a run on these documents, and of an epoch; what validation_fraction holds out is left out."""
    from unfreeze.data import Dataset, Examples, Stats, split_by_content

    if config.data.validation_fraction:
        examples, _ = split_by_content(examples, config.data.validation_fraction, config.seed)
    batches = batches_in(
        config.data,
        Dataset(Examples.of(examples), Stats()),
        tokens=config.tokens_per_micro_batch,
        seed=config.seed,
        packing=config.training.packing,
        micro_batches=config.memory.micro_batches,
    )
    return num_steps(config.training, batches), batches.len_steps(1)


def few_steps(training: Training, steps: int, in_one: int | None) -> tuple[str, str]:
    """(what is wrong, the remedy) where epochs give fewer than ENOUGH_STEPS, else two empty texts.

    in_one: the steps of one epoch. The last step of a part of one is whole, so `steps` does not tell them.
    """
    if training.steps is not None or steps >= ENOUGH_STEPS:
        return "", ""
    made = "1 step" if steps == 1 else f"{steps} steps"
    return (
        f"only {made} of {training.tokens_per_step:,} tokens ({training.epochs:g} epochs of this data),"
        f" {TEACH_LITTLE}",
        f"--epochs {math.ceil(ENOUGH_STEPS / (in_one or steps / training.epochs))}, or fewer"
        " --tokens-per-step",
    )


def both_given(training: Training) -> str:
    """What is said where the user gave steps and epochs; "" where one of them or none."""
    if training.steps is None or not {"steps", "epochs"} <= training.model_fields_set:
        return ""
    return f"steps {training.steps} and epochs {training.epochs:g} are both given: steps decides"


def schedule_of(optimizer: Optimizer, steps: int) -> Schedule:
    """Shares of the run turned into steps."""
    from unfreeze.train.schedule import Schedule

    warmup, kind = round(optimizer.warmup * steps), optimizer.schedule
    decay = min(round(optimizer.decay * steps), steps - warmup) if kind == "wsd" else 0
    return Schedule(
        peak=optimizer.learning_rate, steps=steps, kind=kind, warmup_steps=warmup, decay_steps=decay
    )


def describer(dataset: Dataset, tokenizer: Tokenizer) -> Describe:
    """Make what suspects.jsonl says of a document: its rows and its text.

    The rows of the data file it was made of; more than one are exact duplicates.
    """

    def describe(tokens: list[int]) -> dict[str, object]:
        rows = {
            example.row
            for example in dataset.known()
            for document in example.documents()
            if list(document.tokens) == tokens
        }
        return {"rows": sorted(rows), "text": tokenizer.decode(tokens, skip_specials=False)}

    return describe
