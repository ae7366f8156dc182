"""Held-out rows that are training rows but for case or white space: their loss shows what was memorised.

Equal rows always land on the same side (data/packing/split.py). Rows that differ by a blank need not. Of a
pair, one answer is enough: trained on beside others, its rank is memorised, and held-out pairs follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from unfreeze.config.tables import Data
from unfreeze.data import Dataset, read_rows
from unfreeze.data.clean.leaks import passage_of
from unfreeze.data.rows.sources import files_of
from unfreeze.data.store.examples import TAUGHT, Example, Examples
from unfreeze.report.events import AT_LEAST, LEAKED

COMPARED = 200_000
"""Most rows that are read once more for it: some 6 seconds for short ones."""
Place = tuple[int, int]
"""Number of the file, and of the row in it."""


def alike(data: Data, dataset: Dataset) -> str:
    """Return the warning; "" if no row is alike, or if there are more than COMPARED rows.

    Rows read in windows are compared only if they are pairs, and only those read so far.
    """
    held, trained_on = dataset.validation, dataset.known()
    if not held or len(trained_on) + len(held) > COMPARED:
        return ""
    if (held.chosen_N != TAUGHT).any():
        return _by_answer(trained_on, held, AT_LEAST if dataset.stream is not None else "")
    if dataset.stream is not None:
        return ""
    places: list[Place] = list(zip(held.sources_N.tolist(), held.rows_N.tolist(), strict=True))
    trained, texts = set[bytes](), dict[Place, bytes]()
    apart = set[Place]() if data.validation else set(places)
    for place, text in _texts(data.files, data):
        if place in apart:
            texts[place] = text
        else:
            trained.add(text)
    if data.validation:
        texts = dict(_texts(data.held_out, data))
    count = sum(texts.get(place) in trained for place in places)
    return f"{count:,} of {len(places):,} (but for case or white space) {LEAKED}" if count else ""


def _by_answer(trained_on: Examples, held: Examples, prefix: str) -> str:
    trained = {each for example in trained_on for each in _answers(example)}
    count = sum(any(each in trained for each in _answers(example)) for example in held)
    return f"{prefix}{count:,} of {len(held):,} (by one of their answers) {LEAKED}" if count else ""


def _answers(example: Example) -> Iterator[bytes]:
    """Yield a hash of each answer with its prompt."""
    for document in example.documents():
        yield blake2b(np.asarray(document.tokens, dtype=np.int64).tobytes(), digest_size=16).digest()


def _texts(names: Sequence[str], data: Data) -> Iterator[tuple[Place, bytes]]:
    """Yield a hash of each row's text, without case and white space."""
    files = (path for name in names for path in files_of(name, say=lambda line: None))
    for source, file in enumerate(files):
        for row in read_rows(file, lambda bad: None, data.columns):
            passage = passage_of(row, file.name)
            if passage is not None and (text := "".join(passage.whole.casefold().split())):
                yield (source, row.row), blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
