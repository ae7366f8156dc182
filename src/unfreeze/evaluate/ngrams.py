"""Byte n-grams: what counting alone predicts of held-out text, as a scale for a model's bits per byte.

Interpolated, by Witten and Bell (IEEE Trans. Information Theory 37(4), 1991, method C). With c(h) times that
the context h was seen, T(h) different bytes after it, and h' the context without its first byte:

    p_k(w | h) = (c(h w) + T(h) p_{k-1}(w | h')) / (c(h) + T(h)),    p_0 = 1 / 257

A context that was never seen leaves p_{k-1}. No weight is fitted, so nothing is held out for it. A context
never reaches beyond its document, as the attention of a model does not.

    T symbols of a text: bytes 0 to 255, END once where a document ends with a special token, START before it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

END, START = 256, 257
SYMBOLS = 258
"""Base of the integer that holds an n-gram. 258^7 < 2^63, so n is at most 7."""
MOST_ORDER = 7


@dataclass(frozen=True)
class Text:
    """Documents as symbols, with what counts.

    symbols_T  int64; `order - 1` times START before each document
    counted_T  True where a symbol's bits count
    bytes      of the counted symbols: those below END
    """

    symbols_T: np.ndarray
    counted_T: np.ndarray

    @property
    def bytes(self) -> int:
        return int((self.counted_T & (self.symbols_T < END)).sum())


def text_of(documents: Iterable[tuple[np.ndarray, np.ndarray]], order: int) -> Text:
    """Join documents, each (symbols, counted), for n-grams up to `order`."""
    before = np.full(order - 1, START, dtype=np.int64)
    silent = np.zeros(order - 1, dtype=bool)
    symbols: list[np.ndarray] = []
    counted: list[np.ndarray] = []
    for symbols_T, counted_T in documents:
        symbols += [before, symbols_T]
        counted += [silent, counted_T]
    if not symbols:
        return Text(np.empty(0, dtype=np.int64), np.empty(0, dtype=bool))
    return Text(np.concatenate(symbols), np.concatenate(counted))


def bits_per_byte(train: Text, held_out: Text, orders: Sequence[int]) -> dict[int, float]:
    """Return order n -> bits per byte of the counted symbols of `held_out`, counted on all of `train`.

    Σ -log2 p_n / bytes. Both texts were joined for the highest order. Memory: about 60 bytes per symbol of
    `train`; time: one sort per order. Raises ValueError for an order that does not fit, or without a byte.
    """
    highest = max(orders)
    if not 1 <= min(orders) <= highest <= MOST_ORDER:
        raise ValueError(f"orders {list(orders)} are not within 1 to {MOST_ORDER}")
    if not held_out.bytes:
        raise ValueError("no byte is counted")
    # places of real symbols: START is context, never predicted
    real_T = np.flatnonzero(train.symbols_T != START)
    here_T = np.flatnonzero(held_out.counted_T)
    p_T = np.full(len(here_T), 1 / (SYMBOLS - 1))
    bits: dict[int, float] = {}
    for n in range(1, highest + 1):
        keys, counts = np.unique(_grams(train.symbols_T, real_T, n), return_counts=True)
        asked_T = _grams(held_out.symbols_T, here_T, n)
        # keys are sorted, so the continuations of a context are neighbours
        contexts, first = np.unique(keys // SYMBOLS, return_index=True)
        times = np.add.reduceat(counts, first) if len(keys) else counts
        kinds = np.diff(np.append(first, len(keys)))
        total_T, kinds_T = (_looked_up(contexts, of, asked_T // SYMBOLS) for of in (times, kinds))
        count_T = _looked_up(keys, counts, asked_T)
        seen_T = total_T > 0
        mixed_T = (count_T + kinds_T * p_T) / np.maximum(total_T + kinds_T, 1)
        p_T = np.where(seen_T, mixed_T, p_T)
        if n in orders:
            bits[n] = float(-np.log2(p_T).sum()) / held_out.bytes
    return bits


def _grams(symbols_T: np.ndarray, places_P: np.ndarray, n: int) -> np.ndarray:
    """Return the n symbols that end at each place, as one integer [P]."""
    key_P = np.zeros(len(places_P), dtype=np.int64)
    for back in range(n - 1, -1, -1):
        key_P *= SYMBOLS
        key_P += symbols_T[places_P - back]
    return key_P


def _looked_up(keys: np.ndarray, values: np.ndarray, asked_P: np.ndarray) -> np.ndarray:
    """Return the value of each key asked for; 0 for one that is not there. `keys` are sorted."""
    if not len(keys):
        return np.zeros(len(asked_P), dtype=np.int64)
    place_P = np.minimum(np.searchsorted(keys, asked_P), len(keys) - 1)
    return np.where(keys[place_P] == asked_P, values[place_P], 0)
