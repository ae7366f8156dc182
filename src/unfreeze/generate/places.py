"""The rows of a cache that lives as long as its server: which run, which are being filled, which are kept.

The first S rows run. Behind them lie rows that read their prompt, rows of answers that have ended and whose
positions a later prompt may begin with, and empty ones. R rows, P positions of a prompt.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from unfreeze.generate.answer import Row
from unfreeze.generate.choosing import Wish
from unfreeze.generate.request import Allow, Request
from unfreeze.models.blocks.cache import Cache

SHORTEST = 16  # equal positions that are worth a copy: fewer are computed with the rest of the prompt


@dataclass(eq=False)
class Seat:
    """One answer of a request: its Row once it has joined.

    number    of the answer in its request
    wish      how its next token is chosen; allow: what masks it
    """

    request: Request
    number: int
    row: Row
    wish: Wish
    allow: Allow | None = None
    version: Hashable = ""

    @property
    def need(self) -> int:
        """Positions that its row may take."""
        return len(self.request.prompt) + self.row.limit

    @property
    def newest(self) -> int:
        """Return the token that its next step reads: of a prompt that lacks only its last one, that one."""
        return self.row.tokens[-1] if self.row.tokens else self.request.prompt[-1]


@dataclass(eq=False)
class Held:
    """A row of the cache.

    ids       the tokens at its filled positions
    seat      who has it; None: kept for later prompts
    routed    the experts of its positions are kept too
    used      when it was last of use; the oldest is overwritten first
    running   it gets a token each step; else it is being filled, or kept
    """

    ids: list[int]
    version: Hashable
    routed: bool = False
    seat: Seat | None = None
    used: int = 0
    running: bool = False

    @property
    def free(self) -> bool:
        return self.seat is None


@dataclass(eq=False)
class Places:
    """The rows of `cache`. keeps: rows of ended answers are kept, for prompts that begin as they do."""

    cache: Cache
    keeps: bool
    held: list[Held | None] = field(default_factory=list["Held | None"])
    clock: int = 0

    def __post_init__(self) -> None:
        self.held = [None] * self.cache.rows

    @property
    def running(self) -> int:
        """Return S; rows that have ended and wait for a successor count."""
        return len(self.cache.lengths)

    def of(self, seat: Seat) -> int:
        """Return the place of a seat."""
        return next(place for place, held in enumerate(self.held) if held is not None and held.seat is seat)

    def taken(self) -> int:
        """Return the rows of answers that have not ended."""
        return sum(held is not None and not held.free for held in self.held)

    def now(self) -> int:
        self.clock += 1
        return self.clock

    # --- prefixes

    def longest_prefix(self, prompt: list[int], version: Hashable, routed: bool) -> tuple[Held | None, int]:
        """-> the row that holds most of a prompt's first tokens, and how many: all but the last at most."""
        best, most, head = None, SHORTEST - 1, prompt[:-1]
        for held in self.held:
            if held is None or held.version != version or (routed and not held.routed):
                continue
            first = held.ids[: most + 1]
            if len(first) <= most or first != head[: most + 1]:
                continue  # not longer than the best so far
            best, most = held, common(held.ids, head)
        return (None, 0) if best is None else (best, most)

    # --- who sits where

    def place_for(self, whole: bool, source: Held | None, reused: int) -> int | None:
        """Return a free place for a newcomer; None if there is none.

        whole    its prompt is read in the next pass: then it can follow an answer that has just ended
        source   the row that it begins like, by `reused` tokens; it is taken itself if little else is lost
        """
        ended = [p for p in range(self.running) if (held := self.held[p]) is not None and held.free]
        behind = [p for p in range(self.running, self.cache.rows) if (h := self.held[p]) is None or h.free]
        if source is not None and source.free and 2 * reused >= len(source.ids):
            place = next(p for p, held in enumerate(self.held) if held is source)
            if place in behind or whole:
                return place
        if whole and ended:
            place = ended[0]
            self.keep_elsewhere(place, source)
            return place
        if not behind:
            return None
        others = [p for p in behind if source is None or self.held[p] is not source] or behind
        return min(others, key=self._age)

    def _age(self, place: int) -> int:
        held = self.held[place]
        return -1 if held is None else held.used

    def keep_elsewhere(self, place: int, spare: Held | None = None) -> None:
        """Copy a row that has ended behind the running ones, in place of the oldest there; `spare` stays."""
        held = self.held[place]
        if not self.keeps or held is None or len(held.ids) < SHORTEST:
            return
        behind = [
            p
            for p in range(self.running, self.cache.rows)
            if (h := self.held[p]) is None or (h.free and h is not spare and h.used < held.used)
        ]
        if behind:
            to = min(behind, key=self._age)
            self.cache.copy(place, to, len(held.ids))
            self.held[to], self.held[place] = held, None

    def sit(self, place: int, seat: Seat, source: Held | None, reused: int) -> None:
        """Give a place to a seat, with the first `reused` positions of a row."""
        if source is not None:
            source.used = self.now()
            if (at := self.held.index(source)) != place:
                self.cache.copy(at, place, reused)
        ids = seat.request.prompt[:reused]
        self.held[place] = Held(ids, seat.version, self.cache.routes is not None, seat, self.now())

    def run(self, seat: Seat) -> None:
        """Let a seat whose prompt is read take part in the steps."""
        place = self.of(seat)
        held = self.held[place]
        assert held is not None
        if place >= self.running:
            to = self.running
            self.move(place, to)
            self.cache.lengths = [*self.cache.lengths, 0]
            place = to
        self.cache.lengths[place] = len(held.ids)
        held.running = True

    def move(self, place: int, to: int) -> None:
        """Exchange two rows; an empty one takes nothing."""
        if place == to:
            return
        here, there = self.held[place], self.held[to]
        if there is None or not (there.ids or there.seat):
            self.cache.copy(place, to, 0 if here is None else len(here.ids))
        elif here is not None:
            self.cache.exchange(place, to, max(len(here.ids), len(there.ids)))
        self.held[place], self.held[to] = there, here

    def leave(self, seat: Seat, *, spoiled: bool = False) -> None:
        """Take a seat from its place. spoiled: its positions are not good, and are set to 0."""
        place = self.of(seat)
        held = self.held[place]
        assert held is not None
        held.seat, held.running, held.used = None, False, self.now()
        if spoiled:
            self.cache.clear(place)
            held.ids = []
        if place >= self.running and not (self.keeps and len(held.ids) >= SHORTEST):
            self.held[place] = None

    def close_ranks(self) -> None:
        """Let running rows fill the places of those that have ended, which are kept behind if they fit."""
        for place in reversed(range(self.running)):
            held = self.held[place]
            if held is not None and not held.free:
                continue
            last = self.running - 1
            if place != last:
                self.keep_elsewhere(place)
                moved = self.held[last]
                assert moved is not None
                self.cache.copy(last, place, len(moved.ids))
                self.cache.lengths[place] = self.cache.lengths[last]
                self.held[place] = moved
            stays = self.held[place] if place == last else None
            self.held[last] = stays if self.keeps and stays is not None and stays.ids else None
            self.cache.lengths = self.cache.lengths[:-1]

    def resize(self, rows: int, capacity: int) -> None:
        """Give the cache other sizes. Running rows keep their order; the oldest that are kept may go."""
        self.close_ranks()
        running = range(self.running)
        behind = [
            p for p in range(self.running, self.cache.rows) if (h := self.held[p]) is not None and h.ids
        ]
        filling = [
            p for p in range(self.running, self.cache.rows) if (h := self.held[p]) is not None and not h.free
        ]
        kept = sorted((p for p in behind if p not in filling), key=self._age, reverse=True)
        order = [*running, *filling, *kept][:rows]
        order = [p for p in order if p < self.running or p in filling or len(self.ids(p)) <= capacity]
        lengths = [len(self.ids(p)) for p in order]
        held = [self.held[p] for p in order]
        self.cache.resize(rows, capacity, order, lengths)
        self.held = [*held, *[None] * (rows - len(held))]

    def ids(self, place: int) -> list[int]:
        held = self.held[place]
        return [] if held is None else held.ids


def common(one: list[int], other: list[int]) -> int:
    """Return the number of equal first items."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while low + 1 < high:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
