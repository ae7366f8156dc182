"""From data files to batches and to a schedule, as the config says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.template import template_time, template_values
from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Batches, Dataset, Example, Tokenizer
    from unfreeze.models.shape import Shape
    from unfreeze.train.run import Run
    from unfreeze.train.schedule import Schedule
    from unfreeze.train.suspects import Describe


def open_tokenizer(run: Run, config: TrainingConfig, folder: Path) -> Tokenizer:
    """The checkpoint's tokenizer, its chat template at the run's own date."""
    from unfreeze.data import load_tokenizer

    date = read_object(run.path / RESOLVED, ConfigError).get("template_date", "")
    return load_tokenizer(folder, now=template_time(date), template_variables=template_values(config.template_variables))


def check_vocabulary(tokenizer: Tokenizer, shape: Shape, manifest: Manifest) -> None:
    """Refuse, before any weight is read, a vocabulary on which tokenizer, config.json and tensors disagree
    (docs/trust.md N5)."""
    from unfreeze.data import check_vocab

    names = ("model.embed_tokens.weight", "lm_head.weight")
    rows = {name: info.shape[0] for name, info in manifest.by_model_name().items() if name in names and info.shape}
    check_vocab(tokenizer, shape.vocab_size, rows)


def encode(run: Run, config: TrainingConfig, tokenizer: Tokenizer, max_positions: int, **options: Any) -> Dataset:
    """The data files as examples no longer than the model's positions and a micro-batch allow; their account as a "data" event.
    `options` (supervise, turns, reasoning) are encode_files'.

    A bound below config.sequence_length is a warning where it cut, dropped or split a row, or where the length was asked for.
    """
    from unfreeze.data import encode_files, split_by_content

    length = sequence_length(config, max_positions)
    read = partial(encode_files, tokenizer=tokenizer, sequence_length=length, truncation=config.truncation,
                   on_bad_row=config.on_bad_row, **options)  # fmt: skip
    dataset = read(config.data)
    stats = dataset.stats
    warnings: list[str] = []
    if config.validation:
        held_out = read([config.validation])
        dataset = replace(dataset, validation=held_out.examples)
        if held_out.stats.truncated + held_out.stats.dropped + held_out.stats.bad:
            warnings.append(f"validation file: {held_out.stats.summary()}")
    elif config.validation_fraction:
        training, validation = split_by_content(dataset.examples, config.validation_fraction, config.seed)
        dataset = replace(dataset, examples=training, validation=validation)
    stats.held_out = len(dataset.validation or ())
    stats.packing, stats.efficiency = config.packing, batches_of(config, dataset.examples).efficiency()
    run.events.emit("data", run.step, **stats.as_dict(), summary=stats.summary())
    if leaked := dataset.leaked():
        warnings.append(f"{leaked} of {stats.held_out} validation documents are also in the training data")
    for message in warnings if run.step == 0 else ():
        run.events.emit("warning", 0, message=message)
    asked = config.sequence_length != TrainingConfig.model_fields["sequence_length"].default
    affected = stats.truncated or stats.dropped or stats.examples_dropped or (config.truncation == "split" and stats.split_rows)
    if run.step == 0 and length < config.sequence_length and (asked or affected):
        by = "the model's positions" if length == max_positions else "tokens_per_step / micro_batches (a document is never cut in two)"
        run.events.emit("warning", 0, message=f"sequence_length {config.sequence_length} is bounded to {length} by {by}")
    return dataset


def batches_of(config: TrainingConfig, examples: Sequence[Example], start: dict[str, Any] | None = None) -> Batches:
    """Micro-batches as the config packs, mixes and shuffles them, from the cursor `start` on."""
    from unfreeze.data import Batches, Examples, Mixed

    examples = Examples.of(examples)
    order = Mixed(examples.sources_N, config.data_weights, config.seed) if config.data_weights else None
    return Batches(examples, config.tokens_per_micro_batch, config.seed, start, packing=config.packing, order=order)


def sequence_length(config: TrainingConfig, max_positions: int) -> int:
    """Tokens of the longest document that this model and these settings take."""
    return min(config.sequence_length, max_positions, config.tokens_per_micro_batch)


def num_steps(config: TrainingConfig, batches: Batches) -> int:
    """Optimizer steps: as given, or as many as `epochs` need."""
    return config.steps or max(1, -(-batches.len_steps(config.epochs) // config.micro_batches))


def schedule_of(config: TrainingConfig, steps: int) -> Schedule:
    """Shares of the run turned into steps."""
    from unfreeze.train.schedule import Schedule

    warmup = round(config.warmup * steps)
    decay = min(round(config.decay * steps), steps - warmup) if config.schedule == "wsd" else 0
    return Schedule(peak=config.learning_rate, steps=steps, kind=config.schedule, warmup_steps=warmup, decay_steps=decay)


def describer(dataset: Dataset, tokenizer: Tokenizer) -> Describe:
    """What suspects.jsonl says of a document: the rows of the data file it was made of (more than one: exact duplicates), and its text."""

    def describe(tokens: list[int]) -> dict[str, Any]:
        rows = sorted({example.row for example in dataset.examples if list(example.tokens) == tokens})
        return {"rows": rows, "text": tokenizer.decode(tokens, skip_specials=False)}

    return describe
