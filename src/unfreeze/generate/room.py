"""Rows and positions of a cache that grows with what is asked of it, in the bounds of memory.

It begins with few rows of few positions. It doubles its rows when all are taken, and its positions for a
longer request; each time the step is recorded anew. Where long rows leave no place for more, and no request
needs them any longer, it gets short ones again.
"""

from __future__ import annotations

from collections.abc import Callable

from unfreeze.generate.engine import CACHE_SHARE, Engine
from unfreeze.generate.places import Places
from unfreeze.models.blocks.cache import Cache
from unfreeze.parallel.answers import Answers
from unfreeze.parallel.machine import hardware

MOST_ROWS = 256
FEW_ROWS, FEW_POSITIONS = 8, 256  # to begin with


class Room:
    """Sizes of an engine's cache. max_rows: most rows; None: MOST_ROWS, or fewer that fit in memory."""

    def __init__(self, engine: Engine, max_rows: int | None):
        self.engine, self.max_rows = engine, max_rows
        # a cache with recurrent states gets another size only when nobody runs
        self.begin = MOST_ROWS if engine.model.state_bytes() else FEW_ROWS
        self._empties = False  # until nobody runs

    def make(
        self, places: Places | None, need: int, routes: bool, keeps: bool, before: Callable[[], None]
    ) -> Places | None:
        """Return places of which one is free for an answer of `need` positions; None: it has to wait.

        They are the same, of other sizes, or new if nobody has a seat. before: called if tensors change.
        """
        if places is not None and routes and places.cache.routes is None:
            before()
            places.cache.routes = {}
        taken, cache = (0, None) if places is None else (places.taken(), places.cache)
        fits = cache is not None and need <= cache.capacity and taken < cache.rows
        if fits and not (self._empties and taken):
            return places
        sizes = self._sizes(places, need)
        if sizes is None or sizes[0] <= taken:
            return None
        rows, capacity = sizes
        if places is None or (not taken and not places.cache.resizes()):
            self._empties = False
            before()
            routes |= cache is not None and cache.routes is not None
            return Places(self._new(rows, capacity, routes), keeps)
        if not places.cache.resizes():  # what it holds has no place per position
            self.begin, self._empties = MOST_ROWS, True
            return None
        before()
        places.resize(rows, capacity)
        return places

    def _new(self, rows: int, capacity: int, routes: bool) -> Cache:
        cache = self.engine.model.new_cache(rows, capacity, routes=routes)
        cache.keep([])
        return cache

    def _sizes(self, places: Places | None, need: int) -> tuple[int, int] | None:
        """Return rows and positions with a free row for `need`; None if they are no others."""
        most = self.engine.model.shape.max_positions
        if places is None:
            capacity = _rounded(need, most)
            return min(self.begin, self._fit(capacity, 0)), capacity
        cache = places.cache
        capacity = max(cache.capacity, _rounded(need, most))
        fit = self._fit(capacity, cache.nbytes)
        longer = need > cache.capacity and places.taken() < cache.rows
        rows = min(fit, max(self.begin, cache.rows if longer else 2 * cache.rows))
        if rows <= places.taken():
            # long rows that nobody needs any longer may be what stands in the way
            needs = [held.seat.need for held in places.held if held is not None and held.seat is not None]
            shorter = _rounded(max([need, *needs]), most)
            if shorter < capacity:
                capacity, rows = shorter, min(self._fit(shorter, cache.nbytes), 2 * cache.rows)
        return None if (rows, capacity) == (cache.rows, cache.capacity) else (rows, capacity)

    def _fit(self, capacity: int, held: int) -> int:
        """Return the rows of that capacity that fit in memory; `held`: bytes of the cache that there is."""
        if self.max_rows is not None:
            return self.max_rows
        model, row = self.engine.model, Answers(1, capacity)
        bytes = row.cache(model.cache_bytes(), model.state_bytes()) + row.logits(self.engine.num_ids)
        free = CACHE_SHARE * (hardware(model.device).available + held)
        return max(1, min(MOST_ROWS, int(free) // bytes))


def _rounded(need: int, most: int) -> int:
    """Return the power of two at or above `need`, in the bounds of the model."""
    return min(most, max(FEW_POSITIONS, 1 << (need - 1).bit_length()))
