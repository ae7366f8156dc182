"""What rows of data files are for, by most of the first: taught, compared in pairs, or judged by a label."""

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

LOOKED = 100  # rows of each file: one bad row, or ten, say nothing of the others


def answers_in(files: Sequence[Path], columns: Sequence[str] = ()) -> Answers:
    """How most of the first rows can be read; "taught" where none can, whose error says why.

    Raises DataError for a file that is absent or of no known form.
    """
    votes = Counter(answers for file in files for answers in _votes(file, columns))
    order: tuple[Answers, ...] = ("taught", "pairs", "labels")
    return max(order, key=lambda answers: votes[answers])


def _votes(file: Path, columns: Sequence[str]) -> Iterator[Answers]:
    """What each of the first rows can be read for, or, if it is bad, what its fields are meant for."""
    taught, judged = (parser(file, columns, answers) for answers in ("taught", "labels"))
    for place, raw in islice(raw_rows(file, columns), LOOKED):
        meant: Answers | None = None
        try:
            taught(raw, place)
            meant = "taught"
        except OtherTraining as error:
            meant = error.answers
        except DataError:
            with suppress(DataError):
                meant = "pairs" if len(judged(raw, place).answers) == 2 else "labels"
        if meant is not None:
            yield meant
