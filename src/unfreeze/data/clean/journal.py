"""Journal: what was decided about each document, so that a killed run goes on where it was.

A rerun reads the input again and takes over these decisions instead of computing them; output and ledger are
written anew. So a resumed run writes the same bytes, and nothing half written counts.

    key.json          what the decisions depend on; another key begins anew
    decisions.jsonl   a line per document: [reason, why], or ["", number of shingles] if it stays
    shingles.u64, signatures.u32    of the documents that stay (duplicates.py)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unfreeze.core.whole_lines import appending, whole_lines

EVERY = 256  # decisions between two flushes: about 0.3 s of work


class Decision(NamedTuple):
    """reason: "" if the document stays; why: words for the ledger; shingles: of a document that stays."""

    reason: str
    why: str = ""
    shingles: int = 0


class Journal:
    """The decisions of an earlier run of the same command, then those of this one."""

    def __init__(self, folder: Path, key: Mapping[str, Any]):
        self.folder = folder
        wanted = json.dumps(key, sort_keys=True, ensure_ascii=False)
        key_file = folder / "key.json"
        if not key_file.is_file() or key_file.read_text(encoding="utf-8") != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            key_file.write_text(wanted, encoding="utf-8")
        self.earlier = [_decision(line) for line in whole_lines(folder / "decisions.jsonl")]
        self._file = appending(folder / "decisions.jsonl")
        self._next = self._waiting = 0

    @property
    def sizes(self) -> list[int]:
        """Number of shingles of each document that stayed in the earlier run."""
        return [decision.shingles for decision in self.earlier if not decision.reason]

    def next(self) -> Decision | None:
        """Return the earlier decision about the next document; None if there is none."""
        self._next += 1
        return self.earlier[self._next - 1] if self._next <= len(self.earlier) else None

    def add(self, decision: Decision) -> bool:
        """Add the decision about this document; True if `flush` is due."""
        content = [decision.reason, decision.why if decision.reason else decision.shingles]
        self._file.write(json.dumps(content, ensure_ascii=False) + "\n")
        self._waiting += 1
        return self._waiting >= EVERY

    def flush(self) -> None:
        """Write what is buffered; shingles and signatures have to be flushed before."""
        self._file.flush()
        self._waiting = 0

    def close(self) -> None:
        self._file.close()


def _decision(line: bytes) -> Decision:
    reason, rest = json.loads(line)
    return Decision(reason, rest) if reason else Decision("", "", rest)
