"""The rows behind a run's prompts: what the reward function gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unfreeze.data.rows.files import read_rows
from unfreeze.data.rows.row import Conversation, Message
from unfreeze.data.store.examples import Example


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

    def __iter__(self):
        return iter(self._rows.values())

    def of(self, example: Example) -> Conversation:
        """Return the row that became this example."""
        return self._rows[example.source, example.row]


def text_of(message: Message) -> str:
    """Return the text of a message, such as the last one of a prompt."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")
