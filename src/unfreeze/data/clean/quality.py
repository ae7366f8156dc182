"""Quality by simple counts. Which measure is from where: docs/howto/clean_data.md.

both                 lines that end in punctuation, with an ellipsis, or start with a bullet
words                mean length, symbols per word, words with a letter, function words of English
characters           letters among the characters, function words of Chinese
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from unfreeze.config.clean import Quality
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.language import language_of
from unfreeze.data.clean.reason import Reason

ENDS = tuple(".?!;:…\"'”’)]}»*" + "。！？；：」』）】》〉．｡" + "।॥؟۔។။")
"""Last characters of a finished line, full-width and Indic ones too."""
BULLETS = tuple("•●○■□▪◦‣-*–·・")
ELLIPSES = ("...", "…", "。。。")
SYMBOLS = re.compile(r"#|\.\.\.|…|。。。")
ENGLISH = frozenset("the be to of and that have with".split())
"""Gopher's list; two of them must occur."""
CHINESE = frozenset("的是在了不和有我这为")
"""The same for Chinese: the most frequent characters of running text (own choice)."""
OVER, UNDER = "at most", "at least"


class QualityFilter:
    """Drop documents that do not look like running text."""

    def __init__(self, recipe: Quality):
        self.recipe = recipe

    def __call__(self, document: Document) -> Reason | None:
        for name, value, side, limit in self._measured(document):
            if (value > limit) if side == OVER else (value < limit):
                return Reason(f"quality.{name}", f"{value:.3g}, {side} {limit:g}")
        return None

    def _measured(self, document: Document) -> Iterator[tuple[str, float, str, float]]:
        yield from (self._characters if document.by_characters else self._words)(document)
        limits, lines = self.recipe, document.lines
        count = max(1, len(lines))
        yield (
            "bullets",
            sum(line.startswith(BULLETS) for line in lines) / count,
            OVER,
            limits.max_bullet_lines,
        )
        # a sentence of Chinese prose may end in ……; a snippet that was cut ends in one … or three dots
        cut = [line for line in lines if not (document.by_characters and line.endswith("……"))]
        ellipses = sum(line.endswith(ELLIPSES) for line in cut) / count
        yield "ellipses", ellipses, OVER, limits.max_ellipsis_lines
        ended = sum(line.endswith(ENDS) for line in lines) / count
        yield "punctuation", ended, UNDER, limits.min_ended_lines

    def _words(self, document: Document) -> Iterator[tuple[str, float, str, float]]:
        limits, words = self.recipe, document.words
        count = max(1, len(words))
        mean = sum(map(len, words)) / count
        yield "word_length", mean, UNDER, limits.min_word_length
        yield "word_length", mean, OVER, limits.max_word_length
        symbols = len(SYMBOLS.findall(document.text)) / count
        yield "symbols", symbols, OVER, limits.max_symbols_per_word
        with_letter = sum(any(map(str.isalpha, word)) for word in words) / count
        yield "letters", with_letter, UNDER, limits.min_words_with_letter
        if language_of(document)[0] in ("en", "latin"):
            yield (
                "function_words",
                len(ENGLISH.intersection(document.units)),
                UNDER,
                limits.min_function_words,
            )

    def _characters(self, document: Document) -> Iterator[tuple[str, float, str, float]]:
        limits, count = self.recipe, max(1, document.num_characters)
        symbols = len(SYMBOLS.findall(document.text)) / count
        yield "symbols", symbols, OVER, limits.max_symbols_per_word
        yield "letters", document.num_letters / count, UNDER, limits.min_letters
        yield "line_length", count / max(1, len(document.lines)), UNDER, limits.min_line_length
        if language_of(document)[0] == "zh":
            yield "function_words", len(CHINESE.intersection(document.text)), UNDER, limits.min_function_words
