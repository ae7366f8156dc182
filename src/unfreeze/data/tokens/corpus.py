"""Texts of data files to train a tokenizer on, with a seeded share held out to measure it.

A document is a row: a text, or all that a conversation says. Its hash decides its side (held_out.py), so
equal documents are on the same side. Only the first document is always trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import read_places, text_bytes
from unfreeze.data.rows.held_out import is_held_out
from unfreeze.data.rows.row import BadRow, Conversation, Message, Row, Tool, content_digest

PIECE = 2**16
"""Characters of a document that the library gets at once: it takes some 100 bytes of memory for each."""

Kind = Literal["zh", "en", "code", "other"]
KINDS: tuple[Kind, ...] = ("zh", "en", "code", "other")

_HAN, _KANA = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"), re.compile(r"[\u3041-\u30ff]")
_SYMBOL = re.compile(r"[{}()\[\];=<>_/\\#*&|+$@]")
LOOKED = 20_000
"""Characters of a document by which its kind is decided."""


def kind_of(text: str) -> Kind:
    """Classify a document by its characters.

    zh     at least 30 % of its letters are Han (a Han letter is a syllable, so more than half of the words),
           and fewer than a tenth as many are kana
    en     otherwise, at least 90 % of its letters are ASCII
    code   the same, and at least 8 % of its visible characters are those of _SYMBOL; English prose has 1 %
    other  the rest
    """
    text = text[:LOOKED]
    letters, han = sum(map(str.isalpha, text)), len(_HAN.findall(text))
    if han and han >= 0.3 * letters and len(_KANA.findall(text)) < 0.1 * han:
        return "zh"
    visible, symbols = len("".join(text.split())), len(_SYMBOL.findall(text))
    if sum(char.isascii() and char.isalpha() for char in text) < 0.9 * letters:
        return "other"
    return "code" if symbols >= 0.08 * visible else "en" if letters else "other"


def text_of_row(row: Row) -> str:
    """Return a row's text; of a conversation all that its messages and tools say, a line each."""
    if not isinstance(row, Conversation):
        return row.text
    tools = [json.dumps(tool, ensure_ascii=False) for tool in row.tools or []]
    return "\n".join(filter(None, [*tools, *(text for message in row.messages for text in _texts(message))]))


def _texts(message: Message) -> Iterator[str]:
    content: Any = message.get("content")
    calls: list[Tool] = message.get("tool_calls") or []
    yield message.get("reasoning_content") or ""
    if isinstance(content, str):
        yield content
    elif content:
        yield from (part.get("text", "") for part in content)
    yield from (json.dumps(call.get("function"), ensure_ascii=False) for call in calls)


class Corpus:
    """Texts of data files, read once.

    held       held-out documents; they stay in memory
    documents  training documents read so far; nbytes: bytes of their UTF-8
    done       bytes of the files read so far, of about `total`
    bad        rows that were skipped; without `skip` the first one raises DataError
    """

    def __init__(
        self, paths: Sequence[Path], columns: Sequence[str], held_out: float, seed: int, *, skip: bool = False
    ):
        self._paths, self._columns, self._fraction, self._seed = paths, columns, held_out, seed
        self._skip = skip
        self.held: list[str] = []
        self.bad: list[BadRow] = []
        self.documents = self.nbytes = self.done = 0
        self.total = sum(map(text_bytes, paths))

    def texts(self) -> Iterator[str]:
        """Yield the training documents, long ones in pieces. Raises DataError for a bad row."""
        for path in self._paths:
            before = self.done
            for place, row in read_places(path, self._on_bad(path), self._columns):
                self.done += place.size
                text = text_of_row(row)
                if self.documents and is_held_out(content_digest(row), self._fraction, self._seed):
                    self.held.append(text)
                    continue
                self.documents += 1
                self.nbytes += len(text.encode())
                yield from cut_long(text)
            self.done = before + text_bytes(path)

    def _on_bad(self, path: Path) -> Callable[[BadRow], None] | None:
        name = path.name if len(self._paths) > 1 else ""

        def add(bad: BadRow) -> None:
            self.bad.append(BadRow(bad.row, bad.reason, name))

        return add if self._skip else None

    def measured(self) -> list[str]:
        """Return the held-out documents, in an order that does not depend on that of the files."""
        return sorted(self.held)

    def refuse_empty(self) -> None:
        """Raise DataError if no document was read."""
        if not self.documents:
            names = ", ".join(path.name for path in self._paths[:3])
            raise DataError(f"there is no text in {names}", next="give files with text")


def cut_long(text: str) -> Iterator[str]:
    """Cut a long text into pieces of about PIECE characters, behind a line break if there is one."""
    begin = 0
    while len(text) - begin > PIECE:
        end = text.rfind("\n", begin, begin + PIECE) + 1
        end = end if end > begin else begin + PIECE
        yield text[begin:end]
        begin = end
    yield text[begin:]
