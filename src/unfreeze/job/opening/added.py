"""New tokens of a run, from lora.new_tokens or from the adapter that it continues, in its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.config.adapter import adapter_folder
from unfreeze.core.errors import ConfigError
from unfreeze.job.data import open_tokenizer
from unfreeze.job.trained import Adapters, Continued, Trained

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.config.tables import Data
    from unfreeze.data import Example, Tokenizer
    from unfreeze.train.run import Run

LOOKED_AT = 10_000  # rows; more of a large file are not read before training
FOLDER = "tokenizer"
"""Folder in a run with the tokenizer's files and the new tokens."""


def with_new_tokens(
    trained: Trained, tokenizer: Tokenizer, start: Manifest, run: Run, data: Data
) -> tuple[Tokenizer, Manifest]:
    """The tokenizer with the tokens that the run adds, and the manifest that names its folder.

    `trained` learns which rows of the embeddings train. Raises ConfigError, before any weight is read, for
    tokens that cannot be added, and for a resumed run whose file has changed.
    """
    if not isinstance(trained, Adapters):
        return tokenizer, start
    if isinstance(trained, Continued):
        from unfreeze.generate.source import with_tokens_of

        grown = with_tokens_of(start, adapter_folder(trained.source))
        if grown.tokenizer is None:
            return tokenizer, start
        from unfreeze.generate.new_tokens import copy_tokenizer

        copy_tokenizer(grown.tokenizer, start.path, run.path / FOLDER)
        grown = replace(start, tokenizer=run.path / FOLDER)
        return open_tokenizer(run, data, run.path / FOLDER), grown
    if not trained.lora.new_tokens:
        return tokenizer, start

    from unfreeze.generate.new_tokens import add_tokens, read_new_tokens

    tokens = read_new_tokens(Path(trained.lora.new_tokens))
    before = run.path / FOLDER / "tokenizer.json"
    old = before.read_bytes() if run.step and before.is_file() else None
    trained.added = add_tokens(start.path, tokenizer, tokens, run.path / FOLDER)
    if old is not None and old != before.read_bytes():
        raise ConfigError(
            f"lora.new_tokens = {trained.lora.new_tokens!r} has other tokens than when the run began",
            next="restore the file, or give another --out",
        )
    return open_tokenizer(run, data, run.path / FOLDER), replace(start, tokenizer=run.path / FOLDER)


def unused_tokens(trained: Trained, rows: Iterable[Example]) -> str:
    """A warning about new tokens that occur in none of the first rows, so that they do not train; or ""."""
    if not isinstance(trained, Adapters) or trained.added is None:
        return ""
    texts = (token.text for token in trained.added.tokens)
    left, rows_read = dict(zip(trained.added.ids, texts, strict=True)), 0
    for row in islice(rows, LOOKED_AT):
        rows_read += 1
        for token in left.keys() & set(row.tokens):
            del left[token]
        if not left:
            return ""
    first, count = next(iter(left.values())), len(trained.added.ids)
    return (
        f"{len(left)} of {count} new tokens are in none of {rows_read:,} rows; first: {first!r}. Without rows"
        " they stay as they began"
    )
