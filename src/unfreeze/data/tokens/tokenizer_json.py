"""tokenizer.json through the `tokenizers` library, with the differences between checkpoints evened out.

Padding and truncation stored in the file are switched off, because silent truncation would be an error here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders

from unfreeze.core.errors import CheckpointError

_ANCHORS = ("\n", "|", "0", "x")
"""Texts to encode before a continuation; the first that keeps its own tokens is used."""


class TokenizerJson:
    """Encodes and decodes with `tokenizers`.

    `added`: id -> (text, special) from tokenizer_config.json, for ids missing in the file.
    """

    library = f"tokenizers {tokenizers.__version__}"

    def __init__(self, path: Path, added: Mapping[int, tuple[str, bool]]):
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise CheckpointError(
                f"{path} cannot be read: {error}", next="download or copy this file again"
            ) from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self.base_size = self._backend.get_vocab_size(with_added_tokens=False)
        self._add_missing(added)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.named_size = self.vocab_size = max(vocab.values(), default=-1) + 1
        self.special_ids = frozenset(
            id for id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._added = frozenset(self._backend.get_added_tokens_decoder())
        self._bytes: dict[int, bytes | None] = {}
        self._lock = threading.Lock()
        with_post, without = (
            self._backend.encode("a").ids,
            self._backend.encode("a", add_special_tokens=False).ids,
        )
        self.adds_bos = (
            len(with_post) > len(without) and with_post[0] in self.special_ids and with_post[0] != without[0]
        )
        plain = self._ids("a", specials=False)
        self._adds_prefix = self._after("\n", "a", specials=False) != plain

    def _add_missing(self, added: Mapping[int, tuple[str, bool]]) -> None:
        present = self._backend.get_added_tokens_decoder()
        for id in sorted(added):
            text, special = added[id]
            if id in present or self._backend.token_to_id(text) == id:
                continue
            token = tokenizers.AddedToken(text, special=special, normalized=False)
            self._backend.add_tokens([token])  # pyright: ignore[reportUnknownMemberType]
            if self._backend.token_to_id(text) != id:
                raise CheckpointError(
                    f"tokenizer_config.json gives {text!r} the id {id}, tokenizer.json makes it"
                    f" {self._backend.token_to_id(text)}"
                )

    def encode(self, text: str, *, specials: bool, continues: bool = False) -> list[int]:
        """Return the ids of `text`.

        `continues`: other text precedes it, so no space is added in front (SentencePiece-style files add
        one).
        """
        if not text.isascii():
            # half a surrogate pair becomes U+FFFD, as in tiktoken
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if not (continues and self._adds_prefix and text):
            return self._ids(text, specials=specials)
        for anchor in _ANCHORS:
            ids = self._after(anchor, text, specials=specials)
            if ids is not None:
                return ids
        raise CheckpointError(
            f"this tokenizer merges {text[:20]!r} with any text before it, so a turn cannot be encoded on"
            " its own"
        )

    def _ids(self, text: str, *, specials: bool) -> list[int]:
        with self._lock:
            # True means: encode the text of special tokens as plain text
            self._backend.encode_special_tokens = not specials
            return self._backend.encode(text, add_special_tokens=False).ids

    def _after(self, anchor: str, text: str, *, specials: bool) -> list[int] | None:
        """Return the ids of `text` after `anchor`, or None if the two merge."""
        head, both = self._ids(anchor, specials=specials), self._ids(anchor + text, specials=specials)
        return both[len(head) :] if both[: len(head)] == head else None

    def decode(self, ids: Sequence[int], *, skip_specials: bool) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_specials)

    def stream(self, *, skip_specials: bool) -> TokenizerJsonStream:
        return TokenizerJsonStream(self, skip_specials)

    def token_id(self, text: str) -> int | None:
        """Return the id of a token given as text, or None."""
        return self._backend.token_to_id(text)

    def token_text(self, id: int) -> str:
        """Return the token as the vocabulary spells it; the text itself for special tokens."""
        return self._backend.id_to_token(id) or ""

    def as_json(self) -> str:
        """Return the content of tokenizer.json, with the tokens that were added here."""
        with self._lock:
            return self._backend.to_str()

    def bytes_of(self, id: int) -> bytes | None:
        """Return the bytes of a token; None if the vocabulary is not one of bytes."""
        if id not in self._bytes:
            text = self.token_text(id)
            spelled = isinstance(self._backend.decoder, decoders.ByteLevel)
            self._bytes[id] = text.encode() if id in self._added else spelled_bytes(text) if spelled else None
        return self._bytes[id]


class TokenizerJsonStream:
    """Decodes id by id.

    A decoder may look at neighbours (leading space, byte fallback). So the new text is the difference of two
    decodings that start at the same earlier id. It is held back while it ends in U+FFFD, the sign of an
    incomplete character.
    """

    def __init__(self, backend: TokenizerJson, skip_specials: bool):
        self._backend = backend
        self._skip = skip_specials
        self._ids: list[int] = []
        self._done = 0  # ids whose text was returned
        self._begin = 0  # where decoding starts: the first id of the last returned piece

    def push(self, id: int) -> str:
        self._ids.append(id)
        return self._take(final=False)

    def finish(self) -> str:
        """Return U+FFFD if the text ends inside a character, else ""."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._backend.decode(self._ids[self._begin : self._done], skip_specials=self._skip)
        now = self._backend.decode(self._ids[self._begin :], skip_specials=self._skip)
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        self._begin, self._done = self._done, len(self._ids)
        return now[len(before) :]


def spelled_bytes(spelling: str) -> bytes:
    """Return the bytes of a token in GPT-2's spelling, or the UTF-8 of one that is spelled otherwise."""
    if all(char in BYTE_OF for char in spelling):
        return bytes(BYTE_OF[char] for char in spelling)
    return spelling.encode()


def _byte_of() -> dict[str, int]:
    """GPT-2 spells visible Latin-1 bytes as themselves, and the other 68 as U+0100 and on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF: Mapping[str, int] = _byte_of()
"""Character -> the byte that it spells."""
