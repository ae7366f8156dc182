"""unfreeze data show F --model M: show the data as the model will see it. Trains nothing, reads no weights.

Shows samples with their loss mask, lengths, supervised share, truncations, exact duplicates, bad rows, and
how full packed batches are. For pairs and labelled answers (`unfreeze prefer`), each answer has its own mask.
Rows without an answer are prompts (`unfreeze grpo`): they are shown as the model reads them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from rich.console import Console
from rich.text import Text as Line
from tyro.conf import Positional, arg

from unfreeze.config.columns import Columns
from unfreeze.config.parse import Files, Frozen, ModelName, parse
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about
from unfreeze.core.units import plural
from unfreeze.job.data import document_tokens, longer_by
from unfreeze.tracking.console import PipeConsole
from unfreeze.tracking.live import EncodeProgress

if TYPE_CHECKING:
    from unfreeze.data import Dataset, Example, Examples, Tokenizer

PROMPTS = "the rows are prompts without answers, as unfreeze grpo takes them"
BAR = 40  # characters of the longest bar
BINS = 8
SHOWN_TOKENS = 400  # per sample in the terminal; --json has all
NEWLINE = "\u23ce"


class Config(Frozen):
    """Options of data show; a training run with the same flags sees the same data."""

    data: Annotated[Files, Positional, arg(metavar="F")] = Field(
        min_length=1, description="data files, folders, patterns or hf:org/name, as in sft"
    )
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )
    model: ModelName = Field(
        description="checkpoint folder, or Hugging Face id org/name: its tokenizer and chat template are used"
    )
    samples: int = Field(
        default=3, ge=0, description="documents to show token by token, from the start of the first file"
    )
    row: tuple[int, ...] = Field(
        default=(), description="show every example of these rows (line numbers of the file) instead"
    )
    sequence_length: int = Field(
        default=2048,
        ge=2,
        description="longest document in tokens",
        json_schema_extra=about("Options", name="data.sequence_length", alias="sequence_length"),
    )
    tokens_per_step: int = Field(
        default=4096,
        ge=2,
        description="tokens of a packed step; an upper limit for sequence_length",
        json_schema_extra=about("Options", name="training.tokens_per_step", alias="tokens_per_step"),
    )
    truncation: Literal["tail", "head", "error", "drop", "split"] = Field(
        default="tail",
        description=(
            "documents over sequence_length: cut the tail or head, stop with an error, drop the row, or"
            " split (texts)"
        ),
        json_schema_extra=about("Options", name="data.truncation", was="truncation"),
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="skip",
        description="bad rows: stop at the first (as sft does), or skip and list them",
        json_schema_extra=about("Options", name="data.on_bad_row", was="on_bad_row"),
    )
    packing: Literal["none", "first_fit", "best_fit"] = Field(
        default="first_fit",
        description="documents per step: one, or as many as fit (first or best fit)",
        json_schema_extra=about("Options", name="training.packing", was="packing"),
    )
    supervise: Literal["assistant", "all"] = Field(
        default="assistant", description="loss on the assistant's turns, or on every token"
    )
    answers: Literal["auto", "taught", "pairs", "labels", "asked"] = Field(
        default="auto",
        description=(
            "kind of rows: taught (sft), pairs (prefer), labels (prefer --loss kto), asked (grpo: prompts);"
            " auto: the kind of most of the first rows"
        ),
    )
    max_new_tokens: int = Field(
        default=128,
        ge=1,
        description="of prompts: room for an answer's tokens, as in grpo",
        json_schema_extra=about("Options", name="rollout.max_new_tokens", alias="max_new_tokens"),
    )
    turns: Literal["auto", "whole", "each", "last"] = Field(
        default="auto",
        description="how a conversation becomes examples, as in sft",
        json_schema_extra=about("Options", name="data.turns", was="turns"),
    )
    reasoning: Literal["auto", "inline", "drop"] = Field(
        default="auto",
        description="treatment of reasoning_content, as in sft",
        json_schema_extra=about("Options", name="data.reasoning", was="reasoning"),
    )
    template_variables: tuple[str, ...] = Field(
        default=(),
        description="NAME=VALUE for the chat template, as in sft",
        json_schema_extra=about("Options", name="data.template_variables", was="template_variables"),
    )
    template_date: str = Field(
        default="",
        description="date for the chat template, as in sft; default: now",
        json_schema_extra=about("Options", name="data.template_date", was="template_date"),
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Show a run's training data. -> stats, warnings, vocabulary, lengths, samples.

    vocabulary: base, total, padded. lengths: min, median, p95, max, histogram. samples: row, tokens, texts
    and weights of each; also side (chosen, rejected) for preference data.
    """
    config = parse(Config, arguments, command="data show", description=__doc__ or "", positional=True)
    say = partial(print, file=sys.stderr) if not common.quiet else lambda line: None
    facts = data_account(config, say, quiet=common.quiet)
    if not common.quiet:
        _print(facts, PipeConsole(stderr=common.json, highlight=False))
    return facts


def data_account(
    config: Config, say: Callable[[str], None] = lambda line: None, *, quiet: bool = True
) -> dict[str, Any]:
    """Statistics of the data as plain JSON. Bad rows are counted and listed, unless on_bad_row is "error".

    As in a run, tokens_per_step and the model's positions limit a document's length.
    """
    from unfreeze.config.template import template_time, template_values
    from unfreeze.data.rows.columns import renames_of
    from unfreeze.data.rows.kind import answers_in
    from unfreeze.data.rows.sources import files_of
    from unfreeze.data.store.remarks import losses

    renames_of(config.columns)
    files = [path for name in config.data for path in files_of(name, say=say)]
    folder = model_folder(config.model)
    from unfreeze.data import Batches, encoded_files, load_tokenizer

    now, variables = template_time(config.template_date), template_values(config.template_variables)
    tokenizer = load_tokenizer(folder, now=now, template_variables=variables)
    positions = positions_of(folder)
    answers = answers_in(files, config.columns) if config.answers == "auto" else config.answers
    prompts = [f"{PROMPTS}; for sft name the answers: --columns completion=NAME"] * (
        answers == "asked" and config.answers == "auto"
    )
    most = document_tokens({"answers": answers}, config.tokens_per_step)
    length = min(config.sequence_length, most, positions or config.sequence_length)
    room = config.max_new_tokens if answers == "asked" else 0
    with EncodeProgress(quiet=quiet) as progress, longer_by(length, config.sequence_length, most):
        dataset = encoded_files(
            files,
            tokenizer,
            length,
            truncation=config.truncation,
            supervise=config.supervise,
            turns=config.turns,
            reasoning=config.reasoning,
            on_bad_row=config.on_bad_row,
            columns=config.columns,
            answers=answers,
            room=room,
            progress=progress,
        )
    if not room:
        batches = Batches(dataset.examples, config.tokens_per_step, seed=0, packing=config.packing)
        dataset.stats.packing, dataset.stats.efficiency = config.packing, batches.efficiency()
    return {
        "stats": dataset.stats.as_dict(),
        "warnings": [*prompts, *losses(dataset.stats, length, positions, listed=True)],
        "summary": dataset.stats.summary(),
        "vocabulary": vocab_sizes(folder, tokenizer),
        "lengths": lengths(dataset.examples, room),
        "samples": [
            shown for example in chosen(dataset, config) for shown in samples_of(example, tokenizer, room)
        ],
    }


def model_folder(model: str, argument: str = "--model") -> Path:
    """Return the folder with the model's tokenizer. For a Hub id, only the small files are downloaded.

    argument: the flag or the place of it in the command. Raises ConfigError that names it.
    """
    from unfreeze.checkpoint import hub
    from unfreeze.data.rows.sources import near_path

    folder = Path(model)
    if folder.is_dir():
        return folder
    if model == TINY_K2.name:
        return TINY_K2
    if hub.is_id(model):
        return hub.download(model, partial(print, file=sys.stderr), allow=hub.TEXT_FILES)
    raise ConfigError(
        f"{argument.removeprefix('--')} = {model!r} is neither a folder nor a Hugging Face id"
        f"{near_path(Path(model))}",
        next=f"{argument} FOLDER, or {argument} org/name"
        if argument.startswith("--")
        else f"give the folder of a tokenizer or model as {argument}, or an id org/name",
    )


def positions_of(folder: Path) -> int | None:
    """Longest document in tokens that the model takes; None if config.json does not say."""
    from unfreeze.checkpoint.manifest import read_json

    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    positions = config.get("text_config", config).get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 1 else None


def vocab_sizes(folder: Path, tokenizer: Tokenizer) -> dict[str, int] | None:
    """VocabSpec {base, total, padded} of tokenizer and config.json.

    None if the folder has no config.json to compare with.
    """
    from unfreeze.checkpoint.manifest import read_json
    from unfreeze.data import check_vocab

    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    return asdict(check_vocab(tokenizer, config.get("text_config", config)["vocab_size"]))


def lengths(examples: Examples, room: int = 0) -> dict[str, Any]:
    """Tokens per document that is used, before truncation, without room: min, median, p95, max, a histogram.

    Dropped ones are in no figure. The histogram has at most BINS bins [from, to, documents].
    """
    import numpy as np

    whole_N = examples.lengths_N + examples.cuts_N - room
    low, high = int(whole_N.min()), int(whole_N.max())
    width = (high - low) // BINS + 1
    counts = np.bincount((whole_N - low) // width)
    bins = [[low + i * width, low + (i + 1) * width - 1, int(count)] for i, count in enumerate(counts)]
    median, p95 = (int(np.percentile(whole_N, share, method="higher")) for share in (50, 95))
    return {"min": low, "median": median, "p95": p95, "max": high, "histogram": bins}


def chosen(dataset: Dataset, config: Config) -> list[Example]:
    """Choose the documents to show. Raises ConfigError if a requested row has none."""
    examples = dataset.examples
    if not config.row:
        return examples[: config.samples]
    rows = examples.rows_N.tolist()
    absent = next((row for row in config.row if row not in rows), None)
    if absent is not None:
        why = next((f": {item.reason}" for item in dataset.stats.listed if item.row == absent), "")
        raise ConfigError(
            f"row {absent} is not among the documents{why}",
            next=f"rows {examples.rows_N[0]} to {examples.rows_N[-1]}",
        )
    return [examples[i] for row in config.row for i, other in enumerate(rows) if other == row]


def samples_of(example: Example, tokenizer: Tokenizer, room: int = 0) -> list[dict[str, Any]]:
    """Documents of an example: the conversation, the labelled answer, both answers of a pair, or the prompt.

    room: last tokens that only stand for an answer.
    """
    from unfreeze.data.store.examples import TAUGHT

    if room:
        prompt = replace(example, tokens=example.tokens[:-room], weights=example.weights[:-room])
        return [sample_document(prompt, tokenizer)]
    if example.chosen == TAUGHT:
        return [sample_document(example, tokenizer)]
    sides = ("chosen" if example.chosen else "rejected",) if example.has_label else ("chosen", "rejected")
    return [
        {"side": side, **sample_document(document, tokenizer)}
        for side, document in zip(sides, example.documents(), strict=True)
    ]


def sample_document(example: Example, tokenizer: Tokenizer) -> dict[str, Any]:
    """One document token by token. The joined texts are the document.

    A character that takes several tokens is in the text of its last token.
    """
    decoder = tokenizer.stream_decoder(skip_specials=False)
    texts = [decoder.push(token) for token in example.tokens]
    texts[-1] += decoder.finish()
    return {
        "row": example.row,
        "tokens": list(example.tokens),
        "texts": texts,
        "weights": [float(weight) for weight in example.weights],
        "supervised": example.num_supervised,
        "cut": example.cut,
    }


def pieces_by_weight(texts: Sequence[str], weights: Sequence[float]) -> list[tuple[str, bool]]:
    """Join neighbouring tokens that are alike in supervision: (text, supervised)."""
    joined: list[tuple[str, bool]] = []
    for text, weight in zip(texts, weights, strict=True):
        if joined and joined[-1][1] == bool(weight):
            joined[-1] = (joined[-1][0] + text, joined[-1][1])
        else:
            joined.append((text, bool(weight)))
    return joined


def coloured(shown: dict[str, Any], *, colour: bool) -> Line:
    """A sample as one text: supervised tokens in green, in two shades to show where tokens start.

    Without colours, supervised tokens are in [[ ]].
    """
    line = Line()
    texts, weights = shown["texts"][:SHOWN_TOKENS], shown["weights"][:SHOWN_TOKENS]
    if not colour:
        for text, supervised in pieces_by_weight(texts, weights):
            line.append(f"[[{text}]]" if supervised else text)
    else:
        for i, (text, weight) in enumerate(zip(texts, weights, strict=True)):
            line.append(
                text.replace("\n", NEWLINE + "\n"),
                style=("bold green", "green")[i % 2] if weight else ("dim", "")[i % 2],
            )
    if len(shown["texts"]) > SHOWN_TOKENS:
        line.append(f" ... {len(shown['texts']) - SHOWN_TOKENS} more tokens")
    return line


def _print(facts: dict[str, Any], console: Console) -> None:
    def say(text: str | Line, style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    # summary, warnings, and lengths with a bar per bin
    say(facts["summary"], style="bold")
    for warning in facts["warnings"]:
        say(f"warning: {warning}")
    sizes, stats = facts["lengths"], facts["stats"]
    used = " of the rows that are used," if stats["dropped"] or stats["examples_dropped"] else ""
    say(
        f"lengths in tokens{used} before truncation: min {sizes['min']}, median {sizes['median']}, p95"
        f" {sizes['p95']}, max {sizes['max']}"
    )
    most = max(count for _, _, count in sizes["histogram"])
    for low, high, count in sizes["histogram"]:
        say(f"  {low:>7} to {high:<7} {'#' * -(-BAR * count // most)} {count}")
    # lost or repeated rows: the count and the first of them
    lists = {
        "dropped or bad": ("listed", stats["dropped"] + stats["bad"]),
        "truncated": ("cuts", stats["truncated"]),
    }
    for title, (name, total) in {**lists, "duplicates": ("repeats", stats["duplicates"])}.items():
        if total:
            say(
                f"{title}: {plural(total, 'row')}"
                + (f", the first {len(stats[name])}" if total > len(stats[name]) else "")
            )
        for item in stats[name]:
            say(f"  {item['file'] + ', ' if item['file'] else ''}{item['reason']}")
    # samples, with supervised tokens in colour or in brackets
    legend = "green: supervised" if console.is_terminal else "[[ ]]: supervised"
    for shown in facts["samples"]:
        cut = f", {shown['cut']} cut" if shown["cut"] else ""
        side = f", {shown['side']}" if "side" in shown else ""
        taught = f"{plural(len(shown['tokens']), 'token')}, {shown['supervised']} supervised{cut}"
        say(f"\nrow {shown['row']}{side}: {taught} ({legend})", style="bold")
        say(coloured(shown, colour=console.is_terminal))
