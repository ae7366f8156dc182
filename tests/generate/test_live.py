"""Answers that join and leave at any step: each is the one that Engine.stream gives to it alone."""

import random

import pytest

from unfreeze.generate import filling, places, room
from unfreeze.generate import live as live_file
from unfreeze.generate.engine import Engine
from unfreeze.generate.live import Live
from unfreeze.generate.request import Request
from unfreeze.generate.sampling import Sampling

STOP_IDS = frozenset(range(0, 89, 7))
HOW = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "n": 3},
)


def requests(count, seed=0, alike=0.7):
    """Prompts of 1 to 60 tokens, most of which begin as others do; each sampled in its own way."""
    dice, kept = random.Random(seed), [[]]
    for number in range(count):
        begin = dice.choice(kept) if dice.random() < alike else []
        prompt = begin[: dice.randint(0, len(begin))] + [dice.randrange(1, 89) for _ in range(dice.randint(1, 30))]
        if dice.random() < 0.2 and len(kept) > 1:
            prompt = dice.choice(kept[1:])
        kept.append(prompt[:60])
        how = HOW[number % len(HOW)]
        seeds = tuple(100 * number + i for i in range(how.get("n", 1)))
        yield Request(prompt[:60], Sampling(seeds=seeds, **how), dice.randint(1, 24))


def alone(engine, request, **how):
    sampling = request.sampling
    return engine.generate([request.prompt], sampling, limits=[request.most], **how)


def run(live, every, turns=2):
    """Two requests come with each turn. -> request -> how it ended."""
    ended, coming = {}, list(every)
    while coming or live.busy:
        for request in coming[:turns]:
            live.add(request)
        del coming[:turns]
        for each in live.turn():
            assert each.request not in ended
            ended[each.request] = each
    return ended


def apart(ours, theirs):
    if [each.tokens for each in ours] != [each.tokens for each in theirs]:
        return float("inf")
    pairs = [
        (a, b)
        for x, y in zip(ours, theirs, strict=True)
        for name in ("logprobs", "sampled_logprobs")
        for a, b in zip(getattr(x, name), getattr(y, name), strict=True)
    ]
    assert [each.stop_reason for each in ours] == [each.stop_reason for each in theirs]
    return max(abs(a - b) for a, b in pairs)


def farthest(engine, every, **how):
    """-> the largest difference of a log-probability to the answers alone; infinity if a token differs."""
    live = Live(engine, **how)
    ended = run(live, every)
    assert len(ended) == len(every) and all(each.error is None for each in ended.values())
    return max(apart(each.answers, alone(engine, request)) for request, each in ended.items()), live


@pytest.fixture
def small(monkeypatch):
    """Sizes at which everything happens among 60 tokens."""
    monkeypatch.setattr(filling, "BESIDE", 24)
    monkeypatch.setattr(live_file, "BESIDE", 24)
    monkeypatch.setattr(live_file, "ALONE", 40)
    monkeypatch.setattr(filling, "SMALLEST", 4)
    monkeypatch.setattr(filling, "WORTH_WAITING", 6)
    monkeypatch.setattr(places, "SHORTEST", 3)
    monkeypatch.setattr(room, "FEW_ROWS", 2)
    monkeypatch.setattr(room, "FEW_POSITIONS", 16)


@pytest.mark.parametrize("rows", [1, 3, None])
@pytest.mark.parametrize("kind", ["gqa", "mla-moe", "window", "longrope"])
def test_an_answer_is_that_of_the_engine_alone(build, small, kind, rows):
    engine = Engine(build(kind, initializer_range=0.2), stop_ids=STOP_IDS)
    difference, live = farthest(engine, list(requests(30)), max_rows=rows)
    assert difference <= 1e-5
    load = live.load()
    assert load.answered == 30 and load.running == load.filling == load.waiting == 0
    if kind != "longrope":
        assert load.reused > load.prompt_tokens / 4
