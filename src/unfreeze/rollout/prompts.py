"""The rows behind a run's prompts: what the reward function gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unfreeze.data.rows.files import read_rows
from unfreeze.data.rows.row import Conversation, Message
from unfreeze.data.store.examples import Example
from unfreeze.untrusted.json_object import is_list, is_object


class Rows:
    """The rows of the data files by (file, line), in memory."""

    def __init__(self, files: Sequence[str], columns: Sequence[str] = ()):
        self.files = files
        self._rows: dict[tuple[int, int], Conversation] = {
            (source, row.row): row
            for source, path in enumerate(files)
            # bad rows are counted where the rows are encoded, not here
            for row in read_rows(Path(path), lambda bad: None, columns, "asked")
        }

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._rows.values())

    def of(self, example: Example) -> Conversation:
        """Return the row that became this example."""
        return self._rows[example.source, example.row]


def text_of(message: Message) -> str:
    """Return the text of a message, such as the last one of a prompt."""
    content: Any = message.get("content")
    if is_list(content):
        return "".join(str(part.get("text", "")) for part in content if is_object(part))
    return str(content or "")
