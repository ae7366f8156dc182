"""A document as the filters look at it: letters by script, words, units, lines.

A unit is what n-grams are made of: a word, or one character of a script that is written without spaces (Han,
Kana, Thai, …). A Chinese sentence would otherwise be one "word".
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache, cached_property
from zlib import crc32

import numpy as np

_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_UNIT = re.compile(rf"[{_SPACELESS}]|[^\W_{_SPACELESS}]+(?:['’][^\W_{_SPACELESS}]+)*")

SCRIPTS: tuple[tuple[int, int, str], ...] = (
    (0x0041, 0x024F, "Latin"),
    (0x0370, 0x03FF, "Greek"),
    (0x0400, 0x052F, "Cyrillic"),
    (0x0590, 0x05FF, "Hebrew"),
    (0x0600, 0x077F, "Arabic"),
    (0x0900, 0x097F, "Devanagari"),
    (0x0980, 0x09FF, "Bengali"),
    (0x0B80, 0x0BFF, "Tamil"),
    (0x0E00, 0x0E7F, "Thai"),
    (0x0E80, 0x0EFF, "Lao"),
    (0x1000, 0x109F, "Myanmar"),
    (0x1100, 0x11FF, "Hangul"),
    (0x1780, 0x17FF, "Khmer"),
    (0x1E00, 0x1EFF, "Latin"),
    (0x1F00, 0x1FFF, "Greek"),
    (0x3040, 0x30FF, "Kana"),
    (0x31F0, 0x31FF, "Kana"),
    (0x3400, 0x4DBF, "Han"),
    (0x4E00, 0x9FFF, "Han"),
    (0xAC00, 0xD7AF, "Hangul"),
    (0xF900, 0xFAFF, "Han"),
    (0x20000, 0x3FFFF, "Han"),
)
"""Blocks of Unicode (first, last, script); a letter elsewhere is "other"."""
SPACELESS_SCRIPTS = ("Han", "Kana", "Thai", "Lao", "Myanmar", "Khmer")
CHARACTERS = 0.3
"""Share of letters of SPACELESS_SCRIPTS from which a document is counted in characters, not words.
ChineseWebText (arXiv 2311.01149) takes a page for Chinese from this share on."""


class Document:
    """One text. Every view is computed when a filter first asks for it."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def letters(self) -> dict[str, int]:
        """Number of letters by script, largest first."""
        codes_C = np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), np.uint32)
        codes_C = codes_C[_letter_table()[np.minimum(codes_C, 0x3FFFF)]]
        firsts, lasts, names = _blocks()
        block_C = np.searchsorted(firsts, codes_C, side="right").astype(np.int64) - 1
        inside = (block_C >= 0) & (codes_C <= lasts[np.maximum(block_C, 0)])
        counts = np.bincount(np.where(inside, block_C, len(names)), minlength=len(names) + 1)
        by_script: dict[str, int] = {}
        for name, count in zip([*names, "other"], counts.tolist(), strict=True):
            if count:
                by_script[name] = by_script.get(name, 0) + count
        return dict(sorted(by_script.items(), key=lambda item: (-item[1], item[0])))

    @cached_property
    def num_letters(self) -> int:
        return sum(self.letters.values())

    @cached_property
    def num_characters(self) -> int:
        """Number of characters that are not white space."""
        return len(self.text) - sum(map(str.isspace, self.text))

    @cached_property
    def by_characters(self) -> bool:
        """True if the length and n-grams of this document are counted in characters."""
        spaceless = sum(self.letters.get(script, 0) for script in SPACELESS_SCRIPTS)
        return spaceless >= CHARACTERS * max(1, self.num_letters)

    @cached_property
    def words(self) -> list[str]:
        """The text split at white space."""
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        """Lines without the blank ones, stripped."""
        return [line for line in map(str.strip, self.text.splitlines()) if line]

    @cached_property
    def paragraphs(self) -> list[str]:
        """Parts between blank lines, stripped."""
        return [part for part in map(str.strip, re.split(r"\n\s*\n", self.text)) if part]

    @cached_property
    def units(self) -> list[str]:
        return units_of(self.text)

    @cached_property
    def codes_U(self) -> np.ndarray:
        return codes_of(self.units)

    @cached_property
    def lengths_U(self) -> np.ndarray:
        """Characters of each unit."""
        return np.fromiter(map(len, self.units), np.int64, len(self.units))

    def grams(self, n: int) -> np.ndarray:
        """64-bit hash of each n-gram of units, in order: [max(0, U - n + 1)]."""
        return hashed_grams(self.codes_U, n)


def units_of(text: str) -> list[str]:
    """Units in lower case, compatibility forms unified (NFKC), without punctuation."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return _UNIT.findall(plain.lower())


def codes_of(units: list[str]) -> np.ndarray:
    """32-bit hash of each unit, as uint64; the same in every process."""
    hashes = (crc32(unit.encode("utf-8", "surrogatepass")) for unit in units)
    return np.fromiter(hashes, np.uint64, len(units))


_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def hashed_grams(codes_U: np.ndarray, n: int) -> np.ndarray:
    """h_i = mix(sum_k c_{i+k} f^{n-1-k} mod 2^64) of every n codes in a row; mix: MurmurHash3's finalizer.

    Two different grams among 10^6 have the same hash with a probability of 3e-8.
    """
    count = max(0, len(codes_U) - n + 1)
    hash_G = np.zeros(count, np.uint64)
    for k in range(n):
        hash_G = hash_G * _FACTOR + codes_U[k : k + count] + np.uint64(1)
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        hash_G = (hash_G ^ (hash_G >> np.uint64(shift))) * np.uint64(factor)
    return hash_G ^ (hash_G >> np.uint64(33))


@cache
def _letter_table() -> np.ndarray:
    """True for each code point that is a letter; planes above 3 have none."""
    return np.fromiter((chr(code).isalpha() for code in range(0x40000)), bool, 0x40000)


@cache
def _blocks() -> tuple[np.ndarray, np.ndarray, list[str]]:
    firsts = np.array([first for first, _, _ in SCRIPTS], np.uint32)
    lasts = np.array([last for _, last, _ in SCRIPTS], np.uint32)
    return firsts, lasts, [name for _, _, name in SCRIPTS]
