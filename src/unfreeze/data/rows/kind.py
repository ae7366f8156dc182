"""Detect from the first rows what data files are for: sft, pairs of answers, labelled answers, or prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from unfreeze.core.errors import DataError
from unfreeze.data.rows.files import parser, raw_rows
from unfreeze.data.rows.row import Answers
from unfreeze.data.rows.shapes import OtherTraining

LOOKED = 100  # rows per file; a few bad rows should not decide


def answers_in(files: Sequence[Path], columns: Sequence[str] = ()) -> Answers:
    """Return how most of the first rows can be read; "taught" if none can (its error then says why).

    Raises DataError for a missing file or an unknown format.
    """
    votes = Counter(answers for file in files for answers in _votes(file, columns))
    order: tuple[Answers, ...] = ("taught", "pairs", "labels", "asked")
    return max(order, key=lambda answers: votes[answers])


def _votes(file: Path, columns: Sequence[str]) -> Iterator[Answers]:
    """Yield how each of the first rows can be read or, for a bad row, how its fields suggest to read it."""
    taught, judged, prompt = (parser(file, columns, answers) for answers in ("taught", "labels", "asked"))
    for place, raw in islice(raw_rows(file, columns), LOOKED):
        meant: Answers | None = None
        try:
            taught(raw, place)
            meant = "taught"
        except OtherTraining as error:
            meant = error.answers
        except DataError:
            with suppress(DataError):
                prompt(raw, place)
                meant = "asked"
            with suppress(DataError):
                meant = "pairs" if len(judged(raw, place).answers) == 2 else "labels"
        if meant is not None:
            yield meant
