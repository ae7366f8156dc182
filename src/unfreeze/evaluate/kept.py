"""Results of a model for each item, kept on disk: an interrupted evaluation continues where it stopped.

One JSON object a line: {"key": hash, "value": anything}. A key hashes the model and all that was asked of it,
so a value is never that of another model, prompt or sampling. Results of the model are kept (answers,
log-probabilities), never scores: another metric needs no new answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from unfreeze.core.errors import UserError
from unfreeze.core.whole_lines import appending, whole_lines
from unfreeze.untrusted.json_object import parse_object


class Kept:
    """Results by key. path: file of the results; None: memory alone. model: hash of the model.

    with Kept(path, model) as kept:
        if (value := kept.get(key := kept.key("answer", ids, 64))) is None:
            kept.put(key, value := compute())
    """

    def __init__(self, path: Path | None = None, model: str = ""):
        self.path, self.model = path, model
        self._values: dict[str, Any] = dict(_read(path)) if path is not None else {}
        self._file: TextIO | None = None

    def __len__(self) -> int:
        return len(self._values)

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def key(self, *questions: Any) -> str:
        """Return the key of a question to this model. questions: plain values, as JSON has them."""
        text = json.dumps([self.model, *questions], ensure_ascii=False)
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def get(self, key: str) -> Any:
        """Return the value; None if it is not there."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value, in memory and on disk: it survives a kill once this has returned."""
        self._values[key] = value
        if self.path is not None:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = appending(self.path)
            self._file.write(json.dumps({"key": key, "value": value}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the results of a file. A damaged line is none: its item is computed again."""
    for line in whole_lines(path):
        try:
            record = parse_object(line, path.name, UserError)
        except UserError:
            continue
        if isinstance(record.get("key"), str) and "value" in record:
            yield record["key"], record["value"]
