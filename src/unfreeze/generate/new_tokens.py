"""New tokens of a tokenizer (`lora.new_tokens`): read from a file, and written into a tokenizer.json.

A token is an entry of `added_tokens`, as transformers' `add_tokens` makes it: matched in the text before the
tokenizer splits it. Its id is the next free one; rows that pad the embeddings are used first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tokenizers

from unfreeze.checkpoint.manifest import inside
from unfreeze.checkpoint.save import write_file
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import plural
from unfreeze.data.tokens.tokenizer import FILES, Tokenizer

MAX_BYTES = 10_000_000
MOST = 100_000


@dataclass(frozen=True)
class NewToken:
    """A token to add. special: skipped in decoded text, and never read from a user's text."""

    text: str
    special: bool = False


@dataclass(frozen=True)
class NewTokens:
    """Tokens that a tokenizer got.

    ids     of each
    parts   ids of the tokens that its text was before, without its own
    size    ids of the tokenizer with them
    folder  the tokenizer's files with them
    """

    tokens: tuple[NewToken, ...]
    ids: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    size: int
    folder: Path


def read_new_tokens(path: Path) -> list[NewToken]:
    """The tokens of a file: one per line, or a JSON list of texts and of {"content", "special"}.

    Raises ConfigError, one line each: no file, not UTF-8, empty, a token of spaces only, one given twice.
    """
    name = f"lora.new_tokens = {str(path)!r}"
    try:
        raw = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}", next="give a text file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{name} is not UTF-8", next="one token per line, in UTF-8") from None
    entries: list[Any] = [line.removesuffix("\r") for line in text.split("\n")]
    entries = [line for line in entries if line]
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except ValueError:
            pass  # a token may begin with a bracket
    tokens = [_token(entry, name) for entry in entries]
    if not tokens or len(tokens) > MOST:
        raise ConfigError(
            f"{name} has {len(tokens):,} tokens; 1 to {MOST:,} can be added", next="one token per line"
        )
    seen: set[str] = set()
    for token in tokens:
        if token.text in seen:
            raise ConfigError(f"{name} has {token.text!r:.80} twice", next="give each token once")
        seen.add(token.text)
    return tokens


def _token(entry: Any, name: str) -> NewToken:
    special: Any = False
    if isinstance(entry, dict):
        table = cast(dict[str, Any], entry)
        entry, special = table.get("content"), table.get("special", False)
    if not isinstance(entry, str) or not isinstance(special, bool):
        raise ConfigError(
            f"{name} holds {entry!r:.80}, which is no token",
            next='texts, or {"content": "…", "special": true}',
        )
    if not entry.strip():
        raise ConfigError(f"{name} has a token of spaces only: {entry!r:.40}", next="remove it")
    return NewToken(entry, special)


def add_tokens(source: Path, tokenizer: Tokenizer, tokens: Sequence[NewToken], folder: Path) -> NewTokens:
    """Write the tokenizer of `source` with these tokens into `folder`, complete with config.json.

    Raises ConfigError for a token that the tokenizer has already, and for one in tiktoken's format.
    """
    text = tokenizer.as_json()
    if text is None or not (source / "tokenizer.json").is_file():
        raise ConfigError(
            f"lora.new_tokens needs a tokenizer.json, and {source} has a tokenizer in tiktoken's format",
            next="in a copy DIR without config.json: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    if there := [token.text for token in tokens if tokenizer.token_id(token.text) is not None]:
        raise ConfigError(
            f"lora.new_tokens: the tokenizer has {len(there)} of {plural(len(tokens), 'token')} already;"
            f" first: {there[0]!r:.60}",
            next="remove them from the file",
        )
    parts = [tuple(tokenizer.encode(token.text, specials=False)) for token in tokens]
    backend = tokenizers.Tokenizer.from_str(text)
    normalized = [_normalized(backend, token) for token in tokens]
    for token, flag in zip(tokens, normalized, strict=True):
        own = tokenizers.AddedToken(token.text, special=token.special, normalized=flag)
        backend.add_tokens([own])  # pyright: ignore[reportUnknownMemberType]
    ids = [-1 if (id := backend.token_to_id(token.text)) is None else id for token in tokens]
    wanted = range(tokenizer.vocab_size, tokenizer.vocab_size + len(tokens))
    if ids != list(wanted):
        raise ConfigError(
            f"lora.new_tokens: the tokens get the ids {ids[:3]} …, but {wanted.start} is the next free one",
            next="the tokenizer has gaps between its ids: add the tokens with transformers",
        )
    copy_tokenizer(source, source, folder)
    write_file(folder / "tokenizer.json", backend.to_str(pretty=True))
    _note_in_settings(folder / "tokenizer_config.json", tokens, ids, normalized)
    return NewTokens(tuple(tokens), tuple(ids), tuple(parts), wanted.stop, folder)


def _normalized(backend: tokenizers.Tokenizer, token: NewToken) -> bool:
    """True, as in transformers' add_tokens, if the token is looked for in normalized text.

    Not if normalizing changes the token: Llama 2's puts a "▁" before it, so that it would be found at the
    start of a word alone. Special ones are looked for in the text as it is.
    """
    normalizer: Any = backend.normalizer
    return not token.special and (normalizer is None or normalizer.normalize_str(token.text) == token.text)


def _note_in_settings(
    path: Path, tokens: Sequence[NewToken], ids: Sequence[int], normalized: Sequence[bool]
) -> None:
    """Add the tokens to added_tokens_decoder of tokenizer_config.json, if it has that table."""
    settings: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    table = settings.get("added_tokens_decoder") if isinstance(settings, dict) else None
    if not isinstance(table, dict):
        return
    for token, id, flag in zip(tokens, ids, normalized, strict=True):
        flags = {"lstrip": False, "normalized": flag, "rstrip": False, "single_word": False}
        table[str(id)] = {"content": token.text, **flags, "special": token.special}
    write_file(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def copy_tokenizer(source: Path, base: Path, folder: Path) -> None:
    """Copy a tokenizer's files from `source`, and those that it doesn't have from `base`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        place = source if (source / name).is_file() else base
        if (place / name).is_file():
            write_file(folder / name, inside(place / name).read_bytes())
