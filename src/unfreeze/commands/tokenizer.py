"""unfreeze tokenizer train FILES --vocab 8192 --out DIR: train a byte-level BPE tokenizer on text.

unfreeze tokenizer show DIR "text": the tokens of a text (tokenizer show --help).

DIR is a folder as Hugging Face has them: tokenizer.json, tokenizer_config.json with a chat template. With a
config.json in it, `unfreeze pretrain --model DIR` starts from it.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from rich.console import Console
from rich.text import Text
from tyro.conf import Positional, arg

from unfreeze.config.columns import Columns
from unfreeze.config.parse import Files, Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.draws import SEEDS
from unfreeze.core.errors import ConfigError, DataError, nearest
from unfreeze.core.field import about
from unfreeze.core.files import refuse_taken, write_folder
from unfreeze.core.units import format_bytes, plural
from unfreeze.tracking.console import PipeConsole
from unfreeze.tracking.live import TokenizerProgress

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

WORDS = ("train", "show")
SHOWN = 60  # tokens listed in the terminal; --json has all
KIND = "a tokenizer"
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # as SentencePiece spells a byte
SHADES = ("black on cyan", "black on green", "black on yellow")
NAMES = {"zh": "Chinese", "en": "English", "code": "code", "other": "other"}


class Config(Frozen):
    """Options of tokenizer train."""

    files: Annotated[Files, Positional, arg(metavar="FILES")] = Field(
        min_length=1,
        description="files with text or messages (.jsonl, .txt, .parquet, … and .gz), folders, patterns or"
        " hf:org/name",
    )
    vocab: int = Field(
        default=8192, ge=1, le=2**20, description="number of ids in all, special and reserved ones too"
    )
    out: Folder = Field(description="new folder for the tokenizer")
    reserved: int = Field(default=64, ge=0, le=4096, description="special tokens reserved for later use")
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )
    held_out: float = Field(
        default=0.02, ge=0, lt=1, description="share of documents that are only measured, by a hash of each"
    )
    seed: int = Field(
        default=0, ge=SEEDS[0], le=SEEDS[1], description="seed of the choice of held-out documents"
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="bad rows: stop at the first, or skip and count them",
        json_schema_extra=about("Options", name="data.on_bad_row", was="on_bad_row"),
    )


class ShowConfig(Frozen):
    """Options of tokenizer show."""

    model: Annotated[ModelName, Positional, arg(metavar="DIR")] = Field(
        description="folder of a tokenizer or model, or Hugging Face id org/name"
    )
    text: Annotated[str, Positional, arg(metavar="TEXT")] = Field(
        description="text to tokenize; -: standard input"
    )
    specials: bool = Field(
        default=False, description="read the text of a special token as that token, as in a chat template"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Train or show a tokenizer.

    train -> path, vocabulary (base, total, padded), merges, reserved, documents, bytes, bad_rows, seconds,
    sha256, held_out (kind -> documents, bytes, tokens, bytes_per_token).
    show -> tokens, bytes, bytes_per_token, pieces (id, text, bytes).
    """
    word = arguments[0] if arguments else ""
    if word in ("-h", "--help"):
        word, arguments = "train", ["train", *arguments]
    if word not in WORDS:
        got = f"{word!r}{nearest(word, WORDS)}" if word else "nothing"
        raise ConfigError(
            f"tokenizer takes train or show, got {got}",
            next="unfreeze tokenizer train corpus.jsonl --vocab 8192 --out tok",
        )
    read = partial(parse, command=f"tokenizer {word}", description=__doc__ or "", positional=True)
    if word == "show":
        return show(read(ShowConfig, arguments[1:]), common)
    return train(read(Config, arguments[1:]), common)


def train(config: Config, common: Common) -> dict[str, Any]:
    """Train a tokenizer and write its folder; results as for `main`."""
    from unfreeze.data.rows.sources import files_of
    from unfreeze.data.tokens import trained
    from unfreeze.data.tokens.corpus import Corpus

    out, began = Path(config.out), time.monotonic()
    say = partial(print, file=sys.stderr) if not common.quiet else lambda line: None
    trained.merges_in(config.vocab, config.reserved)
    with writing(out, "out"):
        refuse_taken(out, KIND)
    files = [path for name in config.files for path in files_of(name, "FILES", say)]
    corpus = Corpus(files, config.columns, config.held_out, config.seed, skip=config.on_bad_row == "skip")
    with TokenizerProgress(quiet=common.quiet) as progress:
        result = trained.train_bpe(
            corpus,
            config.vocab,
            config.reserved,
            progress=lambda corpus, read: progress(corpus.done, corpus.total, done=read),
        )
    facts: dict[str, Any] = {
        "vocabulary": result.sizes,
        "merges": result.merges,
        "reserved": config.reserved,
        "documents": corpus.documents,
        "bytes": corpus.nbytes,
        "bad_rows": len(corpus.bad),
        "held_out": {kind: count.as_dict() for kind, count in result.kinds.items()},
    }
    import tokenizers

    record = {"seed": config.seed, "held_out_share": config.held_out, "tokenizers": tokenizers.__version__}
    texts = result.files({**facts, **record})
    with writing(out, "out"):
        write_folder(out, texts, KIND)
    digest = hashlib.sha256("".join(texts.values()).encode()).hexdigest()
    facts = {"path": str(out), **facts, "seconds": time.monotonic() - began, "sha256": digest}
    if not common.quiet:
        _print_trained(facts, config, PipeConsole(stderr=common.json, highlight=False))
    return facts


def _print_trained(facts: dict[str, Any], config: Config, console: Console) -> None:
    say = partial(console.print, markup=False, soft_wrap=True)
    sizes, documents = facts["vocabulary"], plural(facts["documents"], "document")
    say(
        f"{facts['path']}: {sizes['total']:,} ids (256 bytes, {facts['merges']:,} merges,"
        f" {sizes['total'] - sizes['base']} special, {facts['reserved']} of them reserved), from"
        f" {documents}, {format_bytes(facts['bytes'])}, in {facts['seconds']:.1f} s",
        style="bold",
    )
    if facts["bad_rows"]:
        several = facts["bad_rows"] > 1
        say(f"warning: {facts['bad_rows']} bad row{'s were' if several else ' was'} skipped")
    if facts["held_out"]:
        say("held out     documents     bytes per token")
    else:
        say(
            f"nothing was held out (share {config.held_out:g} of {documents}) to measure"
            " bytes per token: --held-out 0.2"
        )
    for kind, row in facts["held_out"].items():
        say(f"  {NAMES[kind]:<10} {row['documents']:>9,}     {row['bytes_per_token']:.3f}")
    rows = f"vocab_size {sizes['total']}"
    if sizes["padded"] > sizes["total"]:
        rows += f", or {sizes['padded']} (a multiple of 64: faster on a GPU, the last rows are never sampled)"
    say(f"config.json of a model with this tokenizer needs {rows}")
    say(f'next: unfreeze tokenizer show {facts["path"]} "text"')


def show(config: ShowConfig, common: Common) -> dict[str, Any]:
    """Tokenize a text and show its pieces; results as for `main`."""
    from unfreeze.commands.data_show import model_folder
    from unfreeze.data.tokens.tokenizer import load_tokenizer

    text = _standard_input() if config.text == "-" else config.text
    if not text:
        raise ConfigError("the text is empty", next='unfreeze tokenizer show DIR "some text"')
    tokenizer = load_tokenizer(model_folder(config.model, "DIR"))
    ids = tokenizer.encode(text, specials=config.specials)
    pieces = pieces_of(tokenizer, ids)
    nbytes = len(text.encode("utf-8", "replace"))
    facts: dict[str, Any] = {
        "tokens": len(ids),
        "bytes": nbytes,
        "bytes_per_token": nbytes / len(ids),
        "pieces": pieces,
    }
    if not common.quiet:
        _print_pieces(facts, PipeConsole(stderr=common.json, highlight=False))
    return facts


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"standard input: byte {error.start + 1} is not UTF-8", next="iconv -t UTF-8 FILE | unfreeze …"
        ) from None


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[dict[str, Any]]:
    """Return id, text and bytes of each token. text: None if the token is part of a character.

    bytes: in hexadecimal; None if the tokenizer is not one of bytes, but for a token that stands for a byte.
    """
    pieces: list[dict[str, Any]] = []
    for id in ids:
        raw = tokenizer.bytes_of(id)
        if raw is None and (byte := BYTE.fullmatch(tokenizer.token_text(id))):
            raw = bytes.fromhex(byte[1])  # a vocabulary of characters, with a token for each byte
        try:
            text = tokenizer.decode([id], skip_specials=False) if raw is None else raw.decode()
        except UnicodeDecodeError:
            text = None
        pieces.append({"id": id, "text": text, "bytes": None if raw is None else raw.hex()})
    return pieces


def _print_pieces(facts: dict[str, Any], console: Console) -> None:
    shown = facts["pieces"][:SHOWN]
    line = Text()
    for i, piece in enumerate(shown):
        if i and not console.is_terminal:
            line.append("|")
        line.append(_visible(piece), style=SHADES[i % len(SHADES)] if console.is_terminal else "")
    console.print(line, soft_wrap=True)
    for piece in shown:
        size = "" if piece["bytes"] is None else f"{len(piece['bytes']) // 2:>3} B"
        console.print(f"{piece['id']:>8} {size}  {_visible(piece)}", markup=False, soft_wrap=True)
    if len(facts["pieces"]) > SHOWN:
        console.print(f"and {len(facts['pieces']) - SHOWN} more tokens; --json has all")
    rate = f"{facts['bytes_per_token']:.2f} bytes per token"
    console.print(f"{facts['tokens']:,} tokens, {facts['bytes']:,} bytes: {rate}", style="bold")


def _visible(piece: dict[str, Any]) -> str:
    """Return a token's text on one line; bytes of a part of a character as <e4>."""
    if piece["text"] is None:
        return "".join(f"<{byte:02x}>" for byte in bytes.fromhex(piece["bytes"]))
    text = piece["text"].replace("\n", "\u23ce").replace("\t", "\u21e5")
    return "".join(char if char.isprintable() else f"<{ord(char):04x}>" for char in text)
