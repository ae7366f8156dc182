"""Repetition within a document, by the measures of Gopher (arXiv 2112.11446, table A1).

    duplicate lines, paragraphs   share of them, and of their characters, that occurred before
    top n-gram                    count * characters of the most frequent n-gram, n = 2, 3, 4
    duplicate n-grams             characters of units in an n-gram that occurred before, n = 5 … 10

All but the first are shares of the document's characters. In documents that are counted in characters, n
words are 2n characters: a Chinese word has 1.5 to 2, and shorter n-grams repeat in any good text.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unfreeze.config.clean import Repetition
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.reason import Reason

PER_WORD = 2
"""Characters in place of one word, in n-grams of scripts without spaces."""


def duplicate_parts(parts: list[str]) -> tuple[float, float]:
    """Share of the parts that occurred before, and share of their characters."""
    seen: set[str] = set()
    again = size = 0
    for part in parts:
        if part in seen:
            again, size = again + 1, size + len(part)
        seen.add(part)
    return again / max(1, len(parts)), size / max(1, sum(map(len, parts)))


def top_gram(document: Document, n: int) -> float:
    """Share of the characters in the most frequent n-gram; 0 if each occurs once. Ties: the longest."""
    gram_G = document.grams(n)
    if not len(gram_G):
        return 0.0
    _, first, counts = np.unique(gram_G, return_index=True, return_counts=True)
    most = int(counts.max())
    if most < 2:
        return 0.0
    ends = np.concatenate([[0], np.cumsum(document.lengths_U)])
    at = first[counts == most]
    longest = int((ends[at + n] - ends[at]).max())
    return most * longest / int(ends[-1])


def duplicate_grams(document: Document, n: int) -> float:
    """Share of the characters in n-grams that occurred before; overlaps count once."""
    gram_G = document.grams(n)
    if not len(gram_G):
        return 0.0
    _, first = np.unique(gram_G, return_index=True)
    again_G = np.ones(len(gram_G), np.int64)
    again_G[first] = 0
    # +1 where a repeated gram begins, -1 where it ends: a unit is covered where the sum is positive
    edges = np.zeros(len(document.units) + 1, np.int64)
    edges[: len(gram_G)] += again_G
    edges[n : n + len(gram_G)] -= again_G
    covered_U = np.cumsum(edges)[:-1] > 0
    return int(document.lengths_U[covered_U].sum()) / int(document.lengths_U.sum())


class RepetitionFilter:
    """Drop documents that repeat themselves more than table A1 allows."""

    def __init__(self, recipe: Repetition):
        self.recipe = recipe

    def __call__(self, document: Document) -> Reason | None:
        for name, share, most in self._measured(document):
            if share > most:
                return Reason(f"repetition.{name}", f"{share:.3f}, at most {most:g}")
        return None

    def _measured(self, document: Document) -> Iterator[tuple[str, float, float]]:
        """Yield (name, share, limit); the cheap ones first."""
        recipe = self.recipe
        lines, line_characters = duplicate_parts(document.lines)
        yield "lines", lines, recipe.lines
        yield "line_characters", line_characters, recipe.line_characters
        paragraphs, paragraph_characters = duplicate_parts(document.paragraphs)
        yield "paragraphs", paragraphs, recipe.paragraphs
        yield "paragraph_characters", paragraph_characters, recipe.paragraph_characters
        times = PER_WORD if document.by_characters else 1
        for n, most in zip((2, 3, 4), recipe.top_ngrams, strict=True):
            yield f"top_{n}_gram", top_gram(document, times * n), most
        for n, most in zip(range(5, 11), recipe.duplicate_ngrams, strict=True):
            yield f"duplicate_{n}_grams", duplicate_grams(document, times * n), most
