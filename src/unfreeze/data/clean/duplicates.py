"""Duplicates: the same text, and similar text by MinHash.

    shingles     the set of 5-grams of units: words, or characters where those are counted (document.py)
    signature    bands * rows MinHash values by the library datasketch
    candidates   documents with an equal band: 1 - (1 - J^rows)^bands of the pairs of similarity J
    duplicate    a candidate whose shingles have J = |A and B| / |A or B| >= threshold, computed exactly

So a pair below the threshold is never dropped, and with 25 bands of 5 a pair of J = .7 is missed 1 time in
100, of J = .8 1 time in 20,000. A document is compared with those that stayed.
Per document that stays: 8 KB of memory (7,786 bytes in datasketch's tables, by tracemalloc), and on disk 8
bytes per shingle.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from unfreeze.config.clean import Duplicates
from unfreeze.core.errors import ConfigError
from unfreeze.data.clean.document import Document


class Exact:
    """Texts of the documents that stayed, by a 16-byte hash; white space around a text does not count."""

    def __init__(self) -> None:
        self._index: dict[bytes, int] = {}

    def before(self, text: str) -> int | None:
        """Return the index of the document with this text; None if there is none."""
        return self._index.get(_digest(text))

    def add(self, text: str, index: int) -> None:
        """Add a document that stays."""
        self._index[_digest(text)] = index


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.strip().encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Signature(NamedTuple):
    """shingle_S: sorted 64-bit hashes of the distinct shingles; values_P: the MinHash, uint32."""

    shingle_S: np.ndarray
    values_P: np.ndarray


def jaccard(a_S: np.ndarray, b_S: np.ndarray) -> float:
    """|A and B| / |A or B| of two sorted arrays without repeats."""
    shared = len(np.intersect1d(a_S, b_S, assume_unique=True))
    return shared / max(1, len(a_S) + len(b_S) - shared)


class Near:
    """Index of the documents that stayed. Shingles and signatures are in two files, to be read again.

    folder   gets shingles.u64 and signatures.u32
    sizes    number of shingles of each document that is already in these files (a resumed run)
    """

    def __init__(self, recipe: Duplicates, folder: Path, sizes: list[int] | None = None):
        try:
            import datasketch  # optional; 0.3 s  # pyright: ignore[reportMissingTypeStubs]
        except ImportError:
            raise ConfigError(
                "duplicates.near needs the library datasketch, which is not installed",
                next="pip install datasketch, or duplicates.near = false in a recipe",
            ) from None
        self.recipe = recipe
        self._num = recipe.bands * recipe.rows
        self._datasketch: Any = datasketch
        self._permutations: Any = self._datasketch.MinHash(self._num).permutations
        self._lsh: Any = datasketch.MinHashLSH(num_perm=self._num, params=(recipe.bands, recipe.rows))
        self._shingles = (folder / "shingles.u64").open("a+b")
        self._signatures = (folder / "signatures.u32").open("a+b")
        self._ends = array("q", [0])
        self._restore(sizes or [])

    def signature(self, document: Document) -> Signature:
        """Compute shingles and MinHash. A document shorter than a shingle is one shingle."""
        n = self.recipe.shingle_characters if document.by_characters else self.recipe.shingle_words
        shingle_S = np.unique(document.grams(max(1, min(n, len(document.units)))))
        minhash = self._minhash(None)
        minhash.update_batch((shingle_S & np.uint64(0xFFFFFFFF)).tolist())
        return Signature(shingle_S, np.asarray(minhash.hashvalues, np.uint32))

    def similar(self, signature: Signature) -> tuple[int, float] | None:
        """Return (index, Jaccard) of the most similar document; None if all are below the threshold."""
        best: tuple[int, float] | None = None
        if not len(signature.shingle_S):
            return None
        for index in sorted(self._lsh.query(self._minhash(signature.values_P))):
            similarity = jaccard(signature.shingle_S, self._stored(index))
            if similarity >= self.recipe.threshold and (best is None or similarity > best[1]):
                best = index, similarity
        return best

    def add(self, signature: Signature) -> None:
        """Add a document that stays; its index is the number of those before it."""
        self._shingles.write(signature.shingle_S.tobytes())
        self._signatures.write(signature.values_P.tobytes())
        self._insert(signature.values_P, len(signature.shingle_S))

    def flush(self) -> None:
        """Write what is buffered, so that a killed run can be resumed from here."""
        self._shingles.flush()
        self._signatures.flush()

    def close(self) -> None:
        self._shingles.close()
        self._signatures.close()

    def _insert(self, values_P: np.ndarray, size: int) -> None:
        index = len(self._ends) - 1
        self._ends.append(self._ends[-1] + size)
        if size:
            self._lsh.insert(index, self._minhash(values_P), check_duplication=False)

    def _minhash(self, values_P: np.ndarray | None) -> Any:
        """A MinHash of datasketch: empty, or with these values. Its items are hashes already."""
        return self._datasketch.MinHash(
            self._num, hashfunc=int, hashvalues=values_P, permutations=self._permutations, scheme="affine32"
        )

    def _stored(self, index: int) -> np.ndarray:
        self._shingles.flush()
        begin, end = self._ends[index], self._ends[index + 1]
        return np.frombuffer(os.pread(self._shingles.fileno(), 8 * (end - begin), 8 * begin), np.uint64)

    def _restore(self, sizes: list[int]) -> None:
        os.truncate(self._shingles.fileno(), 8 * sum(sizes))
        os.truncate(self._signatures.fileno(), 4 * self._num * len(sizes))
        for index, size in enumerate(sizes):
            raw = os.pread(self._signatures.fileno(), 4 * self._num, 4 * self._num * index)
            self._insert(np.frombuffer(raw, np.uint32), size)
