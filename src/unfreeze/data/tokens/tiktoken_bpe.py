"""tiktoken.model: byte-pair ranks as published for Kimi-K2, read natively.

No code from a checkpoint is ever run (docs/why/trust.md L9).

A line of the file is `base64(token bytes) rank`. Ids 0 … n-1 are the ranks. The ids above them are named by
added_tokens_decoder in tokenizer_config.json; an unnamed one is `<|reserved_token_{id}|>`, up to vocab_size
in config.json.
Source: tokenization_kimi.py of the release (split pattern, reserved names, cutting of long runs).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unfreeze.core.errors import CheckpointError

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
MAX_RESERVED = 65_536  # ids above the ranks, each with an entry in tiktoken's tables; Kimi-K2 has 256
MAX_CHARS = 400_000
"""tiktoken's regex overflows its stack on longer texts; the release cuts here too."""
MAX_RUN = 25_000
"""Longest run of only blanks or only non-blanks passed to tiktoken at once (its pattern backtracks over a
run;
the release's number)."""
BEGINNING = 5
"""First characters shared by added tokens, searched together: 239 of Kimi-K2's share theirs."""
_RUN = re.compile(r"\s+|\S+")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read token bytes -> rank.

    Raises CheckpointError naming the line unless the ranks are 0 … n-1, once each, and include all 256 single
    bytes.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise CheckpointError(f"{path.name} line {number} is not `base64 rank`: {line[:60]!r}") from None
    if b"" in ranks:
        raise CheckpointError(f"{path.name}: the token of rank {ranks[b'']} has no bytes")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(
            f"{path.name}: {len(ranks)} different tokens, but their ranks are not 0 … {len(ranks) - 1} once"
            " each"
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise CheckpointError(
            f"{path.name}: {len(missing)} of 256 single bytes have no rank; first: 0x{missing[0]:02x}"
        )
    return ranks


class TiktokenBackend:
    """Encodes and decodes with tiktoken.

    `added`: id -> (text, special) from added_tokens_decoder; `vocab_size` from config.json, or 0.
    """

    def __init__(self, path: Path, added: Mapping[int, tuple[str, bool]], vocab_size: int):
        tiktoken = needs_tiktoken(path)
        self._version: str = tiktoken.__version__
        ranks = read_ranks(path)
        self.base_size = len(ranks)
        # added tokens come after the ranks
        below = [id for id in added if id < self.base_size]
        if below:
            raise CheckpointError(
                f"added token {added[below[0]][0]!r} has id {below[0]}, inside the {self.base_size} ranks of"
                f" {path.name}"
            )
        self.named_size = max([self.base_size, *(id + 1 for id in added)])
        # ids between them and config.json's vocab_size are reserved, each with a name
        self.vocab_size = max(self.named_size, vocab_size)
        if self.vocab_size - self.base_size > MAX_RESERVED:
            raise CheckpointError(
                f"{path.name} has {self.base_size:,} ranks, config.json and added tokens ask for"
                f" {self.vocab_size:,} ids: {self.vocab_size - self.base_size:,} reserved ones, the limit is"
                f" {MAX_RESERVED:,}",
                next="use the tokenizer files that were published with this model",
            )
        names = {
            id: added[id][0] if id in added else f"<|reserved_token_{id}|>"
            for id in range(self.base_size, self.vocab_size)
        }
        self._ids = {text: id for id, text in names.items()}
        if len(self._ids) != len(names):
            raise CheckpointError(
                f"tokenizer_config.json: two of the {len(added)} added tokens have the same text"
            )
        if "" in self._ids:  # tiktoken would match it everywhere until memory is full
            raise CheckpointError(
                f"tokenizer_config.json: the added token {self._ids['']} has no text",
                next="use the tokenizer files that were published with this model",
            )
        # reserved ids are special; an added token is special if its entry says so
        self.special_ids = frozenset(id for id in names if id not in added or added[id][1])
        self._ordinary_added = {names[id] for id in names if id not in self.special_ids}
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=self._ids
        )
        self.adds_bos = False
        # most texts contain few added tokens, and tiktoken copies the set at each call
        self._beginnings: dict[str, list[str]] = {}
        for text in self._ids:
            self._beginnings.setdefault(text[:BEGINNING], []).append(text)

    @property
    def library(self) -> str:
        return f"tiktoken {self._version}"

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Return the ids of `text`; with `specials`, the text of a special token becomes that token.

        Added tokens that are not marked special are always recognised.
        """
        allowed = self._ids.keys() if specials else self._ordinary_added
        if len(text) <= MAX_RUN:
            present = self._present(text).intersection(allowed) if allowed else set[str]()
            return self._encoding.encode(text, allowed_special=present, disallowed_special=())
        ids: list[int] = []
        present = sorted((added for added in allowed if added in text), key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, present)) + ")", text) if present else [text]
        for piece in pieces:  # added tokens first: they must not be cut
            if piece in allowed:
                ids.append(self._ids[piece])
            else:
                for part in cut_long_runs(piece):
                    ids.extend(self._encoding.encode_ordinary(part))
        return ids

    def _present(self, text: str) -> set[str]:
        """Return the added tokens whose text occurs in `text`."""
        present: set[str] = set()
        for beginning, texts in self._beginnings.items():
            if beginning in text:
                present.update([added for added in texts if added in text])
        return present

    def decode(self, ids: Sequence[int], *, skip_specials: bool) -> str:
        return b"".join(map(self.token_bytes, self._kept(ids, skip_specials))).decode(
            "utf-8", errors="replace"
        )

    def stream(self, *, skip_specials: bool) -> TiktokenStream:
        return TiktokenStream(self, skip_specials)

    def token_id(self, text: str) -> int | None:
        """Return the id of a token given as text, or None."""
        return self._ids.get(
            text, self._encoding._mergeable_ranks.get(text.encode("utf-8", errors="replace"))
        )

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode("utf-8", errors="replace")

    def _kept(self, ids: Sequence[int], skip_specials: bool) -> Sequence[int]:
        return [id for id in ids if id not in self.special_ids] if skip_specials else ids

    def token_bytes(self, id: int) -> bytes:
        return self._encoding.decode_single_token_bytes(id)


def needs_tiktoken(path: Path) -> Any:
    """Return the library, or say how to install it; a model with tokenizer.json does not need it."""
    try:
        import tiktoken
    except ImportError:
        raise CheckpointError(
            f"{path.name} is read with the library tiktoken, which is not installed",
            next="pip install tiktoken",
        ) from None
    return tiktoken


class TiktokenStream:
    """Decodes id by id; bytes of an incomplete character wait for the next id."""

    def __init__(self, backend: TiktokenBackend, skip_specials: bool):
        self._backend = backend
        self._skip = skip_specials
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        if self._skip and id in self._backend.special_ids:
            return ""
        return self._utf8.decode(self._backend.token_bytes(id))

    def finish(self) -> str:
        """Return U+FFFD if the text ends inside a character, else ""."""
        return self._utf8.decode(b"", final=True)


def cut_long_runs(text: str) -> Iterator[str]:
    """Cut a text like the release does.

    Every MAX_CHARS characters, and inside any run of blanks (or of non-blanks) every MAX_RUN characters.
    """
    for begin in range(0, len(text), MAX_CHARS):
        part = text[begin : begin + MAX_CHARS]
        cuts = [
            cut for run in _RUN.finditer(part) for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN)
        ]
        for start, end in zip([0, *cuts], [*cuts, len(part)], strict=True):
            yield part[start:end]
