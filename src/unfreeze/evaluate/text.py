"""Task ppl:FILE: how well a model predicts a text, as bits per byte and as perplexity.

bits per byte = Σ -log2 p / bytes of UTF-8        does not depend on the tokenizer
perplexity    = exp(Σ -ln p / tokens)             does

A text longer than a window of L tokens is read in windows, each L/2 tokens on: a window scores the tokens
that no window before it has scored, so every token has at least L/2 before it, or all there are. The first
token of a text counts only if the tokenizer starts texts with a token of its own: otherwise nothing is before
it, and its bytes don't count either.

An item is a piece of about a hundredth of the file, the same bytes for every tokenizer; a token belongs to
the piece in which it begins.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import is_data, read_rows
from unfreeze.data.rows.row import Text
from unfreeze.data.tokens.masks import encode_prompt
from unfreeze.data.tokens.tokenizer import Tokenizer
from unfreeze.evaluate.forced import forced
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.rows import needs_tokenizer
from unfreeze.evaluate.tasks import Scores, Settings, Shown, unseen
from unfreeze.generate.model import Model

PIECES, SMALLEST, LARGEST = 100, 256, 4096
"""Pieces of a file, and the bytes of one."""


@dataclass(frozen=True)
class Document:
    """Tokens of one text, and the bytes of each; 0 for one that the tokenizer adds."""

    tokens: list[int]
    sizes: list[float]


class TextTask:
    """Perplexity and bits per byte of a file.

    A text file is one text; of a data file (.jsonl, .csv, …) each row's "text" is one.
    """

    counts = "window"

    def __init__(self, name: str, file: Path, settings: Settings):
        self.name, self.file, self.settings = name, file, settings
        self.texts: list[str] = []
        self.piece = SMALLEST
        self.digest = ""

    def check(self) -> None:
        """Read the file. Raises DataError if it is no text, or has none."""
        self.texts = texts_of(self.file, self.settings)
        total = sum(len(text.encode()) for text in self.texts)
        if not total:
            raise DataError(f"{self.file} has no text", next="give a file with text")
        self.piece = max(SMALLEST, min(LARGEST, total // PIECES))
        if self.settings.limit is not None:
            self.texts = first_bytes(self.texts, self.settings.limit * self.piece)
        hashed = hashlib.blake2b(str(self.piece).encode(), digest_size=16)
        for text in self.texts:
            hashed.update(hashlib.blake2b(text.encode()).digest())
        self.digest = hashed.hexdigest()

    def score(self, model: Model, kept: Kept, shown: Shown = unseen) -> list[Scores]:
        """Score every token once, in windows of the model's positions, or of fewer."""
        tokenizer = needs_tokenizer(model)
        window = min(self.settings.window, model.decoder.shape.max_positions)
        documents = [document_of(text, tokenizer) for text in self.texts]
        questions = [each for document in documents for each in windows(document, window)]
        scored = forced(model, questions, kept, shown, most=self.settings.batch)
        nats: dict[str, float] = {}
        tokens: dict[str, int] = {}
        sizes: dict[str, float] = {}
        of_window = iter(scored)
        for number, document in enumerate(documents):
            log_p = [each for _ in windows(document, window) for each in next(of_window).log_p]
            starts = accumulate(document.sizes)
            for each, at, size in zip(log_p, starts, document.sizes[1:], strict=False):
                name = f"text {number + 1}, piece {int(at // self.piece) + 1}"
                nats[name] = nats.get(name, 0.0) - each
                tokens[name] = tokens.get(name, 0) + 1
                sizes[name] = sizes.get(name, 0.0) + size
        if not tokens:
            raise DataError(f"{self.file} has no two tokens", next="give a longer text")
        names = [name for name in tokens if sizes[name]]
        return [
            Scores(
                "bits per byte",
                names,
                [nats[name] / math.log(2) / sizes[name] for name in names],
                [sizes[name] for name in names],
                unit="",
                higher_is_better=False,
            ),
            Scores(
                "perplexity",
                list(tokens),
                [nats[name] / tokens[name] for name in tokens],
                list(map(float, tokens.values())),
                unit="",
                higher_is_better=False,
                exponent=True,
                basis=tokenizer.identity,
            ),
        ]


def texts_of(file: Path, settings: Settings) -> list[str]:
    """Return the texts of a file. Raises DataError if it is not UTF-8, or has other rows."""
    if file.is_file() and (file.suffix.lower() in ("", ".txt", ".md") or not is_data(file)):
        try:
            return [file.read_bytes().decode("utf-8-sig")]
        except UnicodeDecodeError as fault:
            raise DataError(
                f"{file} is not UTF-8: byte {fault.start + 1} is 0x{fault.object[fault.start]:02x}",
                next=f"iconv -t utf-8 {file} > text.txt",
            ) from None
    rows = list(read_rows(file, columns=settings.columns))
    if other := next((row for row in rows if not isinstance(row, Text)), None):
        raise DataError(
            f"{file}: row {other.row} is a conversation; ppl scores texts", next=f"rows:{file} grades answers"
        )
    return [row.text for row in rows if row.text]


def first_bytes(texts: Sequence[str], most: int) -> list[str]:
    """Return the beginning of the texts: at most so many bytes, and no part of a character."""
    kept: list[str] = []
    for text in texts:
        raw = text.encode()[:most]
        if cut := raw.decode(errors="ignore"):
            kept.append(cut)
        most -= len(raw)
        if most <= 0:
            break
    return kept


def document_of(text: str, tokenizer: Tokenizer) -> Document:
    """Return the tokens of a text, with the bytes of each; together they are the text's bytes exactly.

    A tokenizer whose tokens are not bytes of the text (it normalises, or has a space of its own in front)
    gets the file's bytes shared out by the length of its tokens.
    """
    tokens = encode_prompt(tokenizer, text)
    added = int(tokenizer.add_bos and tokenizer.bos_id is not None)
    own = [tokenizer.token_bytes(token) for token in tokens[added:]]
    total = len(text.encode())
    sizes = [
        float(len(tokenizer.token_text(token)) if raw is None else len(raw))
        for token, raw in zip(tokens[added:], own, strict=True)
    ]
    whole = sum(sizes)
    if whole and whole != total:
        sizes = [size * total / whole for size in sizes]
    return Document(tokens, [0.0] * added + sizes)


def windows(document: Document, window: int) -> list[tuple[list[int], list[int]]]:
    """Return (tokens before, tokens to score) of each window. Every token but the first is scored once.

    The first window scores all that it has, each other one the window/2 tokens after the one before.
    """
    tokens, stride = document.tokens, max(1, window // 2)
    parts: list[tuple[list[int], list[int]]] = []
    first, end = 1, min(window, len(tokens))
    while first < len(tokens):
        begin = max(0, first - (window - stride))
        parts.append((tokens[begin:first], tokens[first:end]))
        first, end = end, min(end + stride, len(tokens))
    return parts
