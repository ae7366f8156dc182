"""Faults of a checkpoint, collected and then raised as one CheckpointError.

The error counts them by kind, and has the first one, the cause and the next command. A folder with one
missing shard of 62 has tens of thousands of missing tensors; a person needs one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from unfreeze.core.errors import CheckpointError

ONE = {"files": "file", "tensors": "tensor", "weights": "weight", "entries": "entry"}
OF_ONE = {
    "are": "is",
    "have": "has",
    "do": "does",
    "overlap": "overlaps",
    "leave": "leaves",
    "disagree": "disagrees",
    "their": "its",
    "them": "it",
}


@dataclass
class Faults:
    """Collects (kind, detail). `kind` is a phrase that follows a count: "tensors are missing"."""

    where: Path
    total: int = 0  # number of tensors checked
    counts: Counter[str] = field(default_factory=Counter)
    first: str = ""
    cause: str = ""

    def add(self, kind: str, detail: str, *, cause: str = "") -> None:
        """Add one fault. The first detail and the first cause are shown."""
        self.counts[kind] += 1
        self.first = self.first or detail
        self.cause = self.cause or cause

    def __bool__(self) -> bool:
        return bool(self.counts)

    def raise_if_any(self, *, next: str) -> None:
        """Raise one CheckpointError for all of them, if there are any."""
        if not self:
            return
        of_total = f" of {self.total:,}" if self.total else ""
        kinds = {kind: count > 1 or bool(of_total) for kind, count in self.counts.items()}
        counted = "; ".join(
            f"{self.counts[kind]:,}{of_total} {kind if several else _of_one(kind)}"
            for kind, several in kinds.items()
        )
        cause = f". Likely cause: {self.cause}" if self.cause else ""
        raise CheckpointError(f"{self.where}: {counted}; first: {self.first}{cause}", next=next)


def _of_one(kind: str) -> str:
    """'files are truncated' -> 'file is truncated'. The first noun is what is counted."""
    words = [OF_ONE.get(word, word) for word in kind.split()]
    at = next(at for at, word in enumerate(words) if word in ONE)
    words[at] = ONE[words[at]]
    return " ".join(words)


def refuse_twice(folder: Path, names: Sequence[str], single: str, index: str) -> None:
    """Raise CheckpointError where weights are in `single` and also in `names`, the files of the index."""
    if single not in names and (folder / single).is_file():
        raise CheckpointError(
            f"{folder} holds weights twice: {single}, and the files that {index} names. One may be of an"
            " earlier save; transformers reads the first",
            next=f"move {single} out of the folder, or {index}, whichever is not the one you mean",
        )
