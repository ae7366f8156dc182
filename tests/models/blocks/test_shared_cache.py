"""A cache whose rows share prompts holds what a plain one holds, in less memory. Oracle: Cache."""

import random

import pytest
import torch

from unfreeze.core.errors import UserError
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.shared_cache import SharedCache

ROWS, LONGEST, NEW, SLOTS = 5, 6, 4, 3


def both() -> tuple[SharedCache, Cache]:
    shared = SharedCache(ROWS, NEW, slots=SLOTS, longest=LONGEST, routes=True)
    plain = Cache(ROWS, LONGEST + NEW, routes=True)
    for cache in (shared, plain):
        cache.keep([])
    return shared, plain


def write(caches, rows, positions):
    values = torch.rand(len(rows), 2, 3)
    ids = torch.randint(0, 99, (len(rows), 2))
    for cache in caches:
        for layer in (0, 1):
            cache.write(layer, torch.tensor(rows), torch.tensor(positions), (values + layer, values * 2))
            cache.write_route(layer, torch.tensor(rows), torch.tensor(positions), ids + layer)


def fill(caches, row, length):
    for cache in caches:
        cache.begin([row], [length])
    write(caches, [row] * length, list(range(length)))
    for cache in caches:
        cache.lengths[row] = length


def differs(caches) -> bool:
    shared, plain = caches
    assert shared.lengths == plain.lengths
    running = range(len(plain.lengths))
    longest = max(plain.lengths)
    for layer in (0, 1):
        pairs = zip(
            shared.read(layer, len(running), longest), plain.read(layer, len(running), longest), strict=True
        )
        for ours, theirs in pairs:
            for row in running:
                if not torch.equal(ours[row, : plain.lengths[row]], theirs[row, : plain.lengths[row]]):
                    return True
    return any(not torch.equal(shared.route(row), plain.route(row)) for row in running)


def lived(seed: int, caches) -> bool:
    """A life of prompts, answers, steps and leaves; True if the caches differ anywhere."""
    draw = random.Random(seed)
    for _ in range(30):
        count = len(caches[0].lengths)
        if count + 2 <= ROWS and caches[0].room_for_prompts():
            length = draw.randint(1, LONGEST)
            answers = draw.randint(1, ROWS - count)
            for cache in caches:
                cache.more(answers)
            fill(caches, count, length)
            for cache in caches:
                cache.fork(count, list(range(count, count + answers)), length)
        elif max(map(caches[0].own, range(count))) < NEW and draw.random() < 0.7:
            write(caches, list(range(count)), list(caches[1].lengths))
            for cache in caches:
                cache.lengths = [length + 1 for length in cache.lengths]
        else:
            stay = [row for row in range(count) if draw.random() < 0.6 and caches[0].own(row) < NEW]
            assert caches[0].keep(stay) == caches[1].keep(stay)
        if caches[0].lengths and differs(caches):
            return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_what_a_plain_cache_holds(seed):
    assert not lived(seed, both())


def test_control_a_row_that_reads_another_prompt_is_seen(monkeypatch):
    monkeypatch.setattr(SharedCache, "keep", Cache.keep)  # the slots stay behind when rows move
    assert any(lived(seed, both()) for seed in range(20))


def test_a_prompt_is_kept_once():
    caches = both()
    for cache in caches:
        cache.more(ROWS)
    fill(caches, 0, LONGEST)
    before = caches[0].version
    caches[0].fork(0, list(range(ROWS)), LONGEST)
    number = 2 * (2 * 2 * 3) * 4 + 2 * 2 * 2  # bytes of a position: two layers, and their routes
    assert caches[0].nbytes == (ROWS * NEW + SLOTS * LONGEST) * number
    assert caches[1].nbytes == ROWS * (NEW + LONGEST) * number
    assert caches[0].version == before  # nothing is allocated


def test_prompts_without_a_slot_are_refused_and_leaving_rows_give_theirs_back():
    caches = both()
    (shared, _) = caches
    for cache in caches:
        cache.more(ROWS)
    for row in range(SLOTS):
        fill(caches, row, 2)
    assert shared.room_for_prompts() == 0
    with pytest.raises(UserError, match="1 prompts, the longest of 2 tokens; 0 of at most 6"):
        shared.begin([3], [2])
    shared.release([0])
    assert shared.room_for_prompts() == 1
    with pytest.raises(UserError, match="the longest of 7 tokens; 1 of at most 6"):
        shared.begin([3], [7])
    with pytest.raises(UserError, match="share the 2 positions of a prompt, not 1"):
        shared.fork(1, [2], 1)
    shared.lengths[1] = 2 + NEW
    with pytest.raises(UserError, match="holds 4 positions behind each prompt"):
        shared.require_room()
