"""Ledger: documents and bytes, in and out, by reason. Unless it adds up to the byte, nothing is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

EXAMPLES = 3  # documents shown per reason
SHOWN = 160  # characters of each


class Ledger:
    """Counts of one run.

    in              rows, and bytes of the files before compression (of a table: of its rows as JSON lines)
    kept, dropped   the same of the rows that stay, and of those that each reason dropped
    between_rows    bytes that belong to no row: blank lines, separators, a header, a byte order mark
    rewritten       bytes by which the written lines are longer than their rows: another format, replacements
    written         documents and bytes of each output file, before compression
    """

    def __init__(self) -> None:
        self.inputs: list[dict[str, Any]] = []
        self.kept = {"documents": 0, "bytes": 0}
        self.dropped: dict[str, dict[str, Any]] = {}
        self.languages: dict[str, int] = {}
        self.replaced: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """Begin an input file."""
        self.inputs.append({"file": name, "documents": 0, "bytes": 0, "between_rows": 0})

    def keep(self, size: int, language: str, replaced: Mapping[str, int]) -> None:
        """Count a document that stays, and what was replaced in it."""
        self._read(size)
        self.kept["documents"] += 1
        self.kept["bytes"] += size
        self.languages[language] = self.languages.get(language, 0) + 1
        for kind, count in replaced.items():
            self.replaced[kind] = self.replaced.get(kind, 0) + count

    def drop(self, size: int, reason: str, why: str, row: int, text: str) -> None:
        """Count a document that is dropped; the first EXAMPLES of a reason are kept as examples."""
        self._read(size)
        entry = self.dropped.setdefault(reason, {"documents": 0, "bytes": 0, "examples": []})
        entry["documents"] += 1
        entry["bytes"] += size
        if len(entry["examples"]) < EXAMPLES:
            where = {"file": self.inputs[-1]["file"], "row": row, "why": why}
            entry["examples"].append({**where, "text": text[:SHOWN]})

    def end(self, size: int | None, between: int) -> None:
        """End an input file of `size` bytes before compression; None: its bytes are those of its rows."""
        entry = self.inputs[-1]
        entry["between_rows"] = between
        if size is not None:
            entry["bytes"] = size

    def _read(self, size: int) -> None:
        self.inputs[-1]["documents"] += 1
        self.inputs[-1]["bytes"] += size

    def as_dict(self, written: Sequence[Mapping[str, Any]], rewritten: int) -> dict[str, Any]:
        """Return the ledger as JSON values. written: file, documents, bytes, sha256 of each output file."""
        return {
            "in": {name: sum(entry[name] for entry in self.inputs) for name in ("documents", "bytes")},
            "kept": dict(self.kept),
            "dropped": dict(sorted(self.dropped.items())),
            "between_rows": sum(entry["between_rows"] for entry in self.inputs),
            "rewritten": rewritten,
            "written": {name: sum(entry[name] for entry in written) for name in ("documents", "bytes")},
            "languages": dict(sorted(self.languages.items(), key=lambda item: (-item[1], item[0]))),
            "replaced": dict(sorted(self.replaced.items())),
            "inputs": self.inputs,
            "files": list(written),
        }


def check(ledger: Mapping[str, Any]) -> None:
    """Raise RuntimeError unless in = kept + dropped + between rows, and written = kept + rewritten.

    in.bytes are the sizes of the input files, and written is counted in the output files, read again: neither
    comes from the counts of kept and dropped.
    """
    dropped = {
        name: sum(entry[name] for entry in ledger["dropped"].values()) for name in ("documents", "bytes")
    }
    sums = {
        "documents in": (ledger["in"]["documents"], ledger["kept"]["documents"] + dropped["documents"]),
        "bytes in": (
            ledger["in"]["bytes"],
            ledger["kept"]["bytes"] + dropped["bytes"] + ledger["between_rows"],
        ),
        "documents written": (ledger["written"]["documents"], ledger["kept"]["documents"]),
        "bytes written": (ledger["written"]["bytes"], ledger["kept"]["bytes"] + ledger["rewritten"]),
    }
    for what, (whole, parts) in sums.items():
        if whole != parts:
            raise RuntimeError(f"the ledger does not add up: {what} {whole:,}, its parts {parts:,}")
