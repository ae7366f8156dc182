"""From data files to batches, and from the config to a schedule."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from unfreeze.config import sft
from unfreeze.config.recipes import read_resolved
from unfreeze.config.tables import Data, Optimizer, Training
from unfreeze.config.template import template_time, template_values
from unfreeze.config.training import TrainingConfig
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.job.opening.processes import others
from unfreeze.job.opening.streaming import MANY_ROWS, Followed, in_windows, shared
from unfreeze.report.events import AT_LEAST, ENOUGH_STEPS, FEW_STEPS, LEAKED
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
    """Load the checkpoint's tokenizer; its chat template gets the run's date."""
    from unfreeze.data import load_tokenizer

    date = read_resolved(run.path, ConfigError).get("data.template_date", "")
    return load_tokenizer(
        folder, now=template_time(date), template_variables=template_values(data.template_variables)
    )


def check_vocabulary(tokenizer: Tokenizer, shape: Shape, manifest: Manifest) -> None:
    """Raise if tokenizer, config.json and tensors disagree on the vocabulary (docs/why/trust.md N5).

    Reads no weight.
    """
    from unfreeze.data import check_vocab

    names = ("model.embed_tokens.weight", "lm_head.weight")
    rows = {
        name: info.shape[0] for name, info in manifest.by_model_name().items() if name in names and info.shape
    }
    check_vocab(tokenizer, shape.vocab_size, rows)


Packing = Literal["none", "first_fit", "best_fit"]


class Encoding(TypedDict, total=False):
    """Keyword arguments of data.encode_files: the conversion of rows to examples."""

    supervise: Supervise
    turns: Turns
    reasoning: Reasoning
    answers: Answers
    room: int
    by_columns: bool


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
    """Encode the data files and emit a "data" event with their statistics.

    Large files are read in windows if possible (streaming.py). Then only the first window is encoded here,
    and the returned hook emits the final statistics later. The model's positions and the `tokens` of a
    micro-batch limit an example's length. If that limit is below data.sequence_length, warn if it cut,
    dropped or split a row, or if the user set the length.
    """
    from unfreeze.data import Dataset, encoded_files, split_by_content
    from unfreeze.data.rows.scan import Repeated
    from unfreeze.data.store.remarks import labels, losses, mixture
    from unfreeze.job.alike import alike

    length = sequence_length(data, document_tokens(options, tokens), max_positions)
    options_of_rows: dict[str, Any] = {
        "tokenizer": tokenizer,
        "sequence_length": length,
        "truncation": data.truncation,
        "on_bad_row": data.on_bad_row,
        "columns": data.columns,
        **options,
    }
    encoded = partial(encoded_files, **options_of_rows)

    bounds = length, data.sequence_length, document_tokens(options, tokens)

    def read(files: Sequence[str]) -> Dataset:
        """Encode on one process per node, with all cores; the others read its store."""
        if group.size > 1 and not quiet:
            print(f"process 0 encodes the rows on all cores; {others(group)} for it", file=sys.stderr)
        with EncodeProgress(quiet=quiet) as progress, longer_by(*bounds):
            return group.in_turn(
                lambda first: encoded(files, progress=progress) if first else encoded(files, workers=0)
            )

    # training rows and held-out rows
    stream, look = None, None
    windows = options.get("answers") != "asked" and in_windows(run, data, training)
    if windows and data.validation:
        look = group.on_rank0(lambda: Repeated([Path(name) for name in data.held_out], data.columns))
    if windows:
        with EncodeProgress(quiet=quiet) as progress, longer_by(*bounds):
            stream = shared(
                lambda: stream_of(run, data, tokens, seed, progress, options_of_rows, look), group
            )
    dataset = (
        read(data.files)
        if stream is None
        else Dataset(stream.head, stream.stats(), stream.validation, stream)
    )
    stats = dataset.stats
    if run.step == 0 and stream is None and options.get("answers") != "asked":
        parts = training.tokens_per_step // document_tokens(options, tokens)
        _refuse_all_cut(stats, length, min(data.sequence_length, max_positions), parts)
    warnings: list[str] = []
    if data.validation:
        held_out = read(data.held_out)
        dataset = replace(dataset, validation=held_out.examples)
        leaked_N = dataset.leaked()
        if stream is not None:  # rows with the same bytes; others are found when they are encoded
            repeated = json.dumps(sorted(look.found) if look is not None else []).encode()
            leaked_N = held_out.examples.made_of(json.loads(group.of_first(repeated)))
        if leaked_N.any():
            dataset = replace(dataset, validation=_without(held_out.examples, leaked_N, data, run))
            warnings.append(f"{_of(leaked_N)}, so they are left out of validation")
        if held_out.stats.truncated + held_out.stats.dropped + held_out.stats.bad:
            warnings.append(f"validation file: {held_out.stats.summary()}")
    elif data.validation_fraction and stream is None:
        taught, validation = split_by_content(dataset.examples, data.validation_fraction, seed)
        dataset = replace(dataset, examples=taught, validation=validation)
    if run.step == 0 and (words := group.on_rank0(lambda: alike(data, dataset))):
        warnings.append(words)

    def emit(stats: Stats, step: int) -> None:
        """Emit the statistics. If they cover only some rows of the files, say so."""
        stats.held_out = len(dataset.validation or ())
        rows_in_files = 0 if stream is None or stream.whole is not None else stream.num_rows
        prefix = (
            f"the first rows of {rows_in_files:,} in the files, as many as training needs: "
            if rows_in_files
            else ""
        )
        counted = stats.as_dict()
        if not stats.room:
            del counted["room"]
        run.events.emit(
            "data",
            step,
            **counted,
            **({"mixture": mixed} if mixed else {}),
            **({"rows_in_files": rows_in_files} if rows_in_files else {}),
            summary="; ".join([prefix + stats.summary(), *mixed]),
        )

    def leaked() -> str:
        """Warn of held-out rows in the training data that only encoding reveals (same text, other JSON)."""
        leaked_N = dataset.leaked()
        return f"{AT_LEAST}{_of(leaked_N)}" if leaked_N.any() else ""

    def complaints(stats: Stats) -> list[str]:
        """Warnings about the data."""
        lines = losses(stats, length, max_positions) + labels(dataset.examples)
        set_by_user = data.sequence_length != Data.model_fields["sequence_length"].default
        shortened = (
            stats.truncated
            or stats.dropped
            or stats.examples_dropped
            or (data.truncation == "split" and stats.split_rows)
        )
        if length < data.sequence_length and (set_by_user or shortened):
            by = (
                "the model's positions"
                if length == max_positions
                else "tokens_per_step / micro_batches (a document is never split over micro-batches)"
                if options.get("answers", "taught") in ("taught", "asked")
                else "half of tokens_per_step / micro_batches (a micro-batch must hold both answers)"
            )
            lines.append(f"sequence_length {data.sequence_length} is limited to {length} by {by}")
        return lines

    # emit the statistics, then the warnings
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
    if stats.room:
        stats.packing, stats.efficiency = "", None
    mixed: list[str] = []
    if data.weights and (of_one := batches.len_batches(1)):
        passes = num_steps(training, batches) * micro_batches / of_one
        mixed = mixture(dataset.examples, data.names, data.weights, passes)
    emit(stats, run.step)
    if stream is not None and (later := leaked()):
        warnings.append(later)
    for message in [*warnings, *complaints(stats)] if run.step == 0 else ():
        run.events.emit("warning", 0, message=message)
    # process 0 emits the final statistics
    return dataset, [] if stream is None or group.rank else [
        Followed(stream, stats, emit, complaints, leaked)
    ]


def _refuse_all_cut(stats: Stats, length: int, most: int, parts: int) -> None:
    """Raise DataError if tokens_per_step cuts every row, so that no answer is learnt to its end.

    most: length that the user and the model allow. parts: documents of the limit's length in a step.
    """
    all_cut = stats.truncated > 0 and stats.truncated + stats.dropped == stats.rows - stats.bad
    reasons = " ".join(item.reason for item in (*stats.cuts, *stats.listed))
    longest = max(map(int, re.findall(r"(?:of|row has) (\d+)", reasons)), default=0)
    if not all_cut or not longest or length >= most or "text" in stats.shapes:
        return
    raise DataError(
        f"no row fits in {length:,} tokens (one has {longest:,}), so each would lose its end",
        next=f"--tokens-per-step {min(longest, most) * parts}",
    )


def _of(leaked_N: np.ndarray) -> str:
    return f"{leaked_N.sum():,} of {len(leaked_N):,} {LEAKED}"


def _without(examples: Examples, leaked_N: np.ndarray, data: Data, run: Run) -> Examples:
    """Drop held-out documents that are also trained on. Raises ConfigError if none is left."""
    if leaked_N.all():
        resumed = f" {run.allowing('validation')}" if run.step else ""
        raise ConfigError(
            f"{_of(leaked_N)} ({', '.join(data.held_out[:3])}), so none is held out",
            next=f"give other rows with --validation FILE{resumed}"
            + ("" if run.step else ", or use --validation-fraction 0.1 instead"),
        )
    return examples.part(~leaked_N)


def stream_of(
    run: Run,
    data: Data,
    tokens: int,
    seed: int,
    progress: EncodeProgress,
    encoding: dict[str, Any],
    look: Repeated | None = None,
) -> Stream | None:
    """Open large files in windows; None for files that are read whole. The stream is closed with the run.

    look: called with every row.
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
        **encoding,
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
    """Pack the documents into steps of `micro_batches` batches of `tokens`, starting at the cursor `start`.

    Order and mixture are those of [data].
    """
    from unfreeze.data import Batches, Mixed

    options: dict[str, Any] = {"packing": packing, "micro_batches": micro_batches}
    if dataset.stream is not None:
        return Batches(dataset.stream, tokens, dataset.stream.seed, start, **options)
    examples = dataset.examples
    order = Mixed(examples.sources_N, data.weights, seed) if data.weights else None
    return Batches(examples, tokens, seed, start, order=order, **options)


@contextmanager
def longer_by(length: int, configured: int, tokens: int) -> Generator[None]:
    """In an error about rows cut too short, name the actual limit.

    The limit is `configured`, the step's `tokens`, or the model's positions.
    """
    try:
        yield
    except DataError as error:
        if length == tokens:
            both = "--sequence-length and " if length == configured else ""
            remedy = f"{both}--tokens-per-step higher, if the model takes it"
        elif length < configured:
            remedy = f"another model: this one takes {length} tokens"
        else:
            raise
        longer = r"--sequence-length (higher|[\d,]+ or more), if the model takes it"
        raise DataError(error.message, next=re.sub(longer, remedy, error.next)) from None


def document_tokens(encoding: Encoding, tokens: int) -> int:
    """Longest document in tokens for a micro-batch of `tokens`; half of it for preference data.

    There a micro-batch must hold two answers: both of a pair, or a labelled one and another to compare with.
    """
    return tokens // 2 if encoding.get("answers", "taught") in ("pairs", "labels") else tokens


def sequence_length(data: Data, tokens: int, max_positions: int) -> int:
    """Longest document in tokens, limited by config, micro-batch (`tokens`) and model."""
    return min(data.sequence_length, max_positions, tokens)


def num_steps(training: Training, source: Source) -> int:
    """Number of optimizer steps: `steps` if given, else computed from `epochs`.

    Raises ConfigError if they are not given and the source has no known length.
    """
    if training.steps:
        return training.steps
    if (steps := source.len_steps(training.epochs)) is None:
        raise ConfigError(
            f"cannot resume with {training.epochs:g} epochs: this run reads its rows in windows, so its"
            " length must be given in steps",
            next="give --steps, with --save.allow-changed steps",
        )
    return max(1, steps)


def steps_of(config: TrainingConfig, examples: Sequence[Example]) -> tuple[int, int | None]:
    """Steps of a run on these documents and steps of an epoch, without the rows of validation_fraction."""
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


def few_steps(config: TrainingConfig, steps: int, in_one: int | None) -> tuple[str, str]:
    """Return (warning, remedy) if the epochs give fewer than ENOUGH_STEPS, else two empty texts.

    The warning is a forecast: a run can learn in few steps all the same.
    in_one: steps of one epoch. A part of an epoch still ends in a whole step, so `steps` does not tell.
    """
    training = config.training
    if training.steps is not None or steps >= ENOUGH_STEPS:
        return "", ""
    often = f"each row is seen {training.epochs:g} times"
    if training.epochs <= 1:
        often = f"{training.epochs:.0%} of the rows are seen once"
    epochs = f"--epochs {math.ceil(ENOUGH_STEPS / (in_one or steps / training.epochs))}"
    return (
        f"{FEW_STEPS}{steps} of {training.tokens_per_step:,} tokens; {often}",
        f"{init} fits them to the data, or {epochs}"
        if (init := _init_of(config))
        else f"{epochs}, or fewer --tokens-per-step",
    )


def _init_of(config: TrainingConfig) -> str:
    """'unfreeze init MODEL DATA' for a run that it writes files for, else ""."""
    if type(config) is not sft.Config or config.train == "all" or config.adapter:
        return ""
    files, model = config.data.written.files, Path(config.model)
    if len(files) != 1 or config.data.columns:
        return "unfreeze init MODEL DATA"
    names = [model.name if model == TINY_K2 else str(model), files[0]]
    return shlex.join(["unfreeze", "init", *(name.removeprefix(f"{Path.cwd()}/") for name in names)])


def both_given(training: Training) -> str:
    """Return a warning if the user gave both steps and epochs, else ""."""
    if training.steps is None or not {"steps", "epochs"} <= training.model_fields_set:
        return ""
    return f"steps {training.steps} and epochs {training.epochs:g} are both given; steps is used"


def schedule_of(optimizer: Optimizer, steps: int) -> Schedule:
    """Convert the config's shares of the run to steps."""
    from unfreeze.train.schedule import ONE_CYCLE_FINAL, Schedule

    warmup, kind = round(optimizer.warmup * steps), optimizer.schedule
    decay = min(round(optimizer.decay * steps), steps - warmup) if kind == "wsd" else 0
    usual = ONE_CYCLE_FINAL if kind == "one_cycle" else 0.0
    return Schedule(
        peak=optimizer.learning_rate,
        steps=steps,
        kind=kind,
        warmup_steps=warmup,
        decay_steps=decay,
        final=usual if optimizer.final is None else optimizer.final,
        start=optimizer.start,
    )


def describer(dataset: Dataset, tokenizer: Tokenizer) -> Describe:
    """Return a function that describes a document for suspects.jsonl: its rows and its text.

    rows: those of the data file with exactly these tokens; several are exact duplicates.
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
