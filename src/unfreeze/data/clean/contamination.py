"""Decontamination: documents that share an n-gram with an evaluation text are dropped.

An n-gram has 13 words (GPT-3, arXiv 2005.14165, appendix C), or 20 characters where those are counted: a
Chinese word has about 1.5. A shorter evaluation text counts as a whole, from 8 words or 12 characters on;
what is shorter still would match by chance, and is counted as not looked for.
Matching ignores case, punctuation and white space.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from unfreeze.config.clean import Contamination
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.reason import Reason


class Evaluation:
    """The n-grams of evaluation texts: 16 bytes each.

    texts         number of texts whose n-grams are looked for
    too_short     number of texts that are not looked for
    """

    def __init__(self, recipe: Contamination):
        self.recipe = recipe
        self.texts = self.too_short = 0
        self._sources: list[str] = []
        self._added: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # n -> [(n-grams, their sources)]
        self._grams: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, texts: Iterable[str], source: str) -> None:
        """Add evaluation texts. source: their name in reasons, such as "eval.jsonl row 3"."""
        for text in texts:
            document = Document(text)
            recipe = self.recipe
            n, least = (
                (recipe.characters, recipe.least_characters)
                if document.by_characters
                else (recipe.words, recipe.least_words)
            )
            n = min(n, len(document.units))
            if n < least and n < (recipe.characters if document.by_characters else recipe.words):
                self.too_short += bool(document.units)
                continue
            self.texts += 1
            if not self._sources or self._sources[-1] != source:
                self._sources.append(source)
            gram_G = np.unique(document.grams(n))
            source_G = np.full(len(gram_G), len(self._sources) - 1)
            self._added.setdefault(n, []).append((gram_G, source_G))
            self._grams.clear()

    def __call__(self, document: Document) -> Reason | None:
        """Reason "contamination.ngram" with the shared units and their source."""
        for n, (gram_G, source_G) in self._sorted().items():
            own_G = document.grams(n)
            if not len(own_G):
                continue
            at = np.minimum(np.searchsorted(gram_G, own_G), len(gram_G) - 1)
            shared = np.flatnonzero(gram_G[at] == own_G)
            if len(shared):
                begin = int(shared[0])
                between = "" if document.by_characters else " "
                words = between.join(document.units[begin : begin + n])
                return Reason(
                    "contamination.ngram", f"{self._sources[int(source_G[at[begin]])]}: {words:.120}"
                )
        return None

    def _sorted(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """n -> (its n-grams in order, the first source of each)."""
        if not self._grams:
            for n, parts in sorted(self._added.items()):
                gram_G, first = np.unique(np.concatenate([grams for grams, _ in parts]), return_index=True)
                source_G = np.concatenate([sources for _, sources in parts])[first]
                self._grams[n] = gram_G, source_G
                self._added[n] = [(gram_G, source_G)]  # once in memory
        return self._grams
