"""Clean data files: rows in, rows that stay out, and a ledger of every document and byte.

A document goes through these in order; the first that refuses it is its reason in the ledger:

    a bad row                                            rows.py
    personal data (off by default): replaced             personal.py
    language, length, repetition, quality                language.py repetition.py quality.py
    n-grams of evaluation files                          contamination.py
    exact and near duplicates of what stayed before      duplicates.py

One document is in memory at a time, and what duplicates.py and contamination.py say they hold.
The work is in OUT.partial until all is written and added up; then one rename makes it OUT.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import unfreeze
from unfreeze.config.clean import Recipe
from unfreeze.config.tables import HUB
from unfreeze.core.errors import ConfigError, DataError, nearest
from unfreeze.data.clean import ledger as ledgers
from unfreeze.data.clean.contamination import Evaluation
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.duplicates import Exact, Near
from unfreeze.data.clean.journal import Decision, Journal
from unfreeze.data.clean.language import LanguageFilter, LengthFilter, language_of
from unfreeze.data.clean.ledger import Ledger
from unfreeze.data.clean.personal import replaced
from unfreeze.data.clean.quality import QualityFilter
from unfreeze.data.clean.reason import Filter, first_reason
from unfreeze.data.clean.repetition import RepetitionFilter
from unfreeze.data.clean.rows import Item, changed, every_text, items, json_line, path_is_table
from unfreeze.data.clean.shards import Shards
from unfreeze.data.rows.files import text_bytes
from unfreeze.data.rows.packed import PACKINGS, unpacked_size
from unfreeze.data.rows.sources import files_of

Progress = Callable[[int, int, int], None]
"""Called with (documents, bytes read, bytes in all, approximately)."""

FORMAT = 1  # of decisions; another number begins anew


class Input(NamedTuple):
    """A file, and its name in the ledger."""

    name: str
    path: Path


def inputs_of(written: Sequence[str], field: str, say: Callable[[str], None]) -> list[Input]:
    """Return the files that names, patterns, folders and hf:… stand for. Errors as in files_of."""
    files: list[Input] = []
    for name in written:
        of_hub = name.startswith(HUB)
        for path in files_of(name, field, say):
            files.append(Input(f"{name}/{path.name}" if of_hub else os.fspath(path), path))
    return files


def clean(
    written: Sequence[str],
    out: Path,
    recipe: Recipe,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda documents, done, total: None,
) -> dict[str, Any]:
    """Clean the files and return the ledger, which is also in out/ledger.json.

    Raises ConfigError if `out` is not an empty folder or a library is missing, DataError for a bad row or no
    row at all, RuntimeError if the ledger does not add up. Killed and called again, it goes on.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT_DIR = {str(out)!r} exists and is not empty", next="name a new folder")
    files = inputs_of(written, "IN", say)
    against = inputs_of(recipe.contamination.against, "contamination.against", say)
    evaluation = _evaluation(recipe, against)
    partial = out.absolute().with_name(f"{out.absolute().name}.partial")
    with _alone(partial):
        journal = Journal(partial / "journal", _key(files, against, recipe))
        if journal.earlier:
            say(f"{len(journal.earlier):,} documents are decided already; going on")
        cleaner = Cleaner(recipe, journal, evaluation)
        rows = partial / "rows"
        shutil.rmtree(rows, ignore_errors=True)
        rows.mkdir()
        try:
            ledger = _rows(cleaner, files, rows, progress)
        finally:
            cleaner.close()
            if not cleaner.ledger.kept["documents"] and not cleaner.ledger.dropped:  # nothing to go on with
                shutil.rmtree(partial, ignore_errors=True)
        looked = {"texts": evaluation.texts, "too_short": evaluation.too_short} if evaluation else None
        record = {"version": 1, **ledger, "evaluation": looked, "recipe": recipe.model_dump(mode="json")}
        text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
        (rows / "ledger.json").write_text(text, encoding="utf-8")
        os.replace(rows, out)
    shutil.rmtree(partial, ignore_errors=True)
    return record


def _rows(cleaner: Cleaner, files: Sequence[Input], folder: Path, progress: Progress) -> dict[str, Any]:
    """Clean every row of every file into `folder`; return the ledger, added up."""
    total = sum(text_bytes(file.path) for file in files)
    shards = Shards(folder, _compression(cleaner.recipe, files), cleaner.recipe.output.shard_bytes)
    done = documents = rewritten = 0
    for file in files:
        cleaner.ledger.begin(file.name)
        end = between = 0
        for item in items(file.path):
            documents += 1
            line = cleaner(file.name, item)
            if line:
                shards.write(line)
                rewritten += len(line) - item.bytes
            between += max(0, item.place.offset - end)
            end = item.place.offset + item.place.size
            progress(documents, done + item.place.offset, total)
        size = None if path_is_table(file.path) else unpacked_size(file.path)
        cleaner.ledger.end(size, between + (size - end if size is not None else 0))
        done += text_bytes(file.path)
    if not documents:
        raise DataError(f"{files[0].name} holds no row", next="name files with rows")
    ledger = cleaner.ledger.as_dict(shards.read_again(), rewritten)
    ledgers.check(ledger)
    return ledger


class Cleaner:
    """Decides about one document after another and counts them."""

    def __init__(self, recipe: Recipe, journal: Journal, evaluation: Evaluation | None):
        self.recipe, self.ledger = recipe, Ledger()
        self._journal, self._evaluation = journal, evaluation
        self._filters: list[Filter] = []
        if recipe.language.enabled:
            self._filters.append(LanguageFilter(recipe.language))
        if recipe.length.enabled:
            self._filters.append(LengthFilter(recipe.length))
        if recipe.repetition.enabled:
            self._filters.append(RepetitionFilter(recipe.repetition))
        if recipe.quality.enabled:
            self._filters.append(QualityFilter(recipe.quality))
        if evaluation is not None:
            self._filters.append(evaluation)
        duplicates = recipe.duplicates
        self._exact = Exact() if duplicates.exact else None
        self._near = Near(duplicates, journal.folder, journal.sizes) if duplicates.near else None
        self._files: list[str] = []
        self._places = array("q")  # (file, row) of each document that stays

    def __call__(self, name: str, item: Item) -> bytes:
        """Return the line to write; b"" if the document is dropped. Raises DataError for a bad row."""
        counts: dict[str, int] = {}
        texts: list[str] = []
        fields, wrong = item.fields, item.wrong
        if not wrong:
            try:
                fields = changed(fields, self.recipe.data.text, item.place.row, self._change(counts, texts))
            except DataError as error:
                wrong, item = error.message, item._replace(next=error.next)
        if wrong and self.recipe.data.on_bad_row == "error":
            raise DataError(
                f"{name}, {wrong}", next=item.next or "correct the row, or --data.on-bad-row skip"
            )
        document = Document("\n".join(texts))
        decision = self._journal.next()
        if decision is None:
            decision = Decision("bad_row", wrong) if wrong else self._decided(document, counts)
            if self._journal.add(decision):
                self.flush()
        elif not decision.reason and self._exact is not None:
            self._exact.add(document.text, self._kept)
        if decision.reason:
            self.ledger.drop(item.bytes, decision.reason, decision.why, item.place.row, document.text)
            return b""
        if not self._files or self._files[-1] != name:
            self._files.append(name)
        self._places.extend((len(self._files) - 1, item.place.row))
        self.ledger.keep(item.bytes, language_of(document)[0], counts)
        return json_line(fields, item.place.row) if counts else item.line

    @property
    def _kept(self) -> int:
        """Number of documents that stay so far."""
        return len(self._places) // 2

    def _change(self, counts: dict[str, int], texts: list[str]) -> Callable[[str], str]:
        """Replace personal data if the recipe says so; collect the counts and the texts."""

        def change(text: str) -> str:
            if self.recipe.personal.enabled:
                text, own = replaced(text)
                for kind, count in own.items():
                    counts[kind] = counts.get(kind, 0) + count
            texts.append(text)
            return text

        return change

    def _decided(self, document: Document, counts: dict[str, int]) -> Decision:
        if counts and self.recipe.personal.action == "drop":
            return Decision(
                "personal", ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
            )
        if (reason := first_reason(document, self._filters)) is not None:
            return Decision(*reason)
        if self._exact is not None and (first := self._exact.before(document.text)) is not None:
            return Decision("duplicate.exact", f"the same as {self._place(first)}")
        shingles = 0
        if self._near is not None:
            signature = self._near.signature(document)
            if (near := self._near.similar(signature)) is not None:
                return Decision("duplicate.near", f"Jaccard {near[1]:.3f} with {self._place(near[0])}")
            self._near.add(signature)
            shingles = len(signature.shingle_S)
        if self._exact is not None:
            self._exact.add(document.text, self._kept)
        return Decision("", "", shingles)

    def _place(self, index: int) -> str:
        file, row = self._places[2 * index : 2 * index + 2]
        return f"{self._files[file]} row {row}"

    def flush(self) -> None:
        """Write decisions to the disk; a killed run goes on from here."""
        if self._near is not None:
            self._near.flush()
        self._journal.flush()

    def close(self) -> None:
        """Write what is buffered, also when a run is interrupted."""
        self.flush()
        if self._near is not None:
            self._near.close()
        self._journal.close()


def _evaluation(recipe: Recipe, against: Sequence[Input]) -> Evaluation | None:
    """Read the evaluation files. Raises DataError if none of their texts is long enough to look for."""
    if not recipe.contamination.enabled or not against:
        return None
    contamination = recipe.contamination
    evaluation = Evaluation(contamination)
    for file in against:
        for item in items(file.path):
            if item.wrong:
                raise DataError(f"{file.name}, {item.wrong}", next=item.next or "correct the row")
            if contamination.columns and not any(name in item.fields for name in contamination.columns):
                raise DataError(
                    f"{file.name}, row {item.place.row}: no column {contamination.columns[0]!r}"
                    f"{nearest(contamination.columns[0], item.fields)}",
                    next="correct contamination.columns",
                )
            picked = {name: value for name, value in item.fields.items() if name in contamination.columns}
            evaluation.add(every_text(picked or item.fields), f"{file.name} row {item.place.row}")
    if not evaluation.texts:
        raise DataError(
            f"contamination.against: no text of {against[0].name} has {contamination.least_words} words or"
            f" {contamination.least_characters} characters",
            next="name files with longer texts, or lower contamination.least_words",
        )
    return evaluation


def _compression(recipe: Recipe, files: Sequence[Input]) -> str:
    """Return "none", "gz" or "zst"."""
    if recipe.output.compression != "same":
        return recipe.output.compression
    endings = {file.path.suffix.lower() for file in files}
    ending = endings.pop()
    return ending[1:] if not endings and ending in PACKINGS else "none"


def _key(files: Sequence[Input], against: Sequence[Input], recipe: Recipe) -> dict[str, Any]:
    """All that decisions depend on: code, recipe, and name, size and time of every file that is read."""
    stats = [(file.name, file.path.stat()) for file in (*files, *against)]
    facts = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    code = [FORMAT, unfreeze.__version__, _version_of("datasketch")]
    return {"code": code, "recipe": recipe.model_dump(mode="json"), "inputs": len(files), "files": facts}


def _version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold the lock of a work folder. Raises ConfigError if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process writes {folder}", next="wait for it, or name another OUT_DIR"
            ) from None
        yield
