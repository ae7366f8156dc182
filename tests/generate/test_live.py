"""Answers that join and leave at any step: each is the one that Engine.stream gives to it alone."""

import functools
import random

import pytest
import torch
from exact import family

from unfreeze.core.errors import UserError
from unfreeze.generate import filling, places, room
from unfreeze.generate import live as live_file
from unfreeze.generate.engine import Engine
from unfreeze.generate.live import Live
from unfreeze.generate.request import Request
from unfreeze.generate.sampling import NotFinite, Sampling
from unfreeze.models.blocks.cache import Cache

STOP_IDS = frozenset(range(0, 89, 7))
MANY = 20
SLOW = functools.partial(pytest.param, marks=pytest.mark.nightly)
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
        prompt = begin[: dice.randint(0, len(begin))] + [
            dice.randrange(1, 89) for _ in range(dice.randint(1, 30))
        ]
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


def farthest(engine, every, expected=None, **how):
    """-> the largest difference of a log-probability to the answers alone; infinity if a token differs."""
    live = Live(engine, **how)
    ended = run(live, every)
    assert len(ended) == len(every) and all(each.error is None for each in ended.values())
    expected = expected or [alone(engine, request) for request in every]
    pairs = zip(every, expected, strict=True)
    return max(apart(ended[request].answers, answers) for request, answers in pairs), live


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


@pytest.fixture(scope="module")
def known(build):
    """known(kind) -> an engine, and the answers that each of requests(MANY) gets alone."""

    @functools.cache
    def of(kind):
        engine = Engine(build(kind, initializer_range=0.2), stop_ids=STOP_IDS)
        return engine, [alone(engine, request) for request in requests(MANY)]

    return of


@pytest.mark.parametrize(
    ("kind", "rows"), [("gqa", 1), ("gqa", None), ("mla-moe", 3), ("window", 3), ("longrope", None)]
)
def test_an_answer_is_that_of_the_engine_alone(known, small, kind, rows):
    engine, expected = known(kind)
    difference, live = farthest(engine, list(requests(MANY)), expected, max_rows=rows)
    assert difference <= 1e-5
    load = live.load
    assert load.answered == MANY and load.running == load.filling == load.waiting == 0
    if kind != "longrope":
        assert load.reused > load.prompt_tokens / 4


@pytest.mark.parametrize(
    "name", ["lfm2-moe", SLOW("deepseek-v32"), SLOW("deepseek-v4"), "gemma3-linear-softcap"]
)
def test_models_that_read_a_prompt_from_its_beginning_only(small, name):
    """States, chosen keys, entries of several tokens; and one that can begin behind cached positions."""
    _, model = family(name)
    every = [request for request in requests(8) if max(request.prompt) < model.shape.vocab_size]
    difference, live = farthest(Engine(model), every, max_rows=4)
    assert difference <= 1e-5 and live.load.most_running == 4
    assert live.extends == (name == "gemma3-linear-softcap")


def copies_one_too_many(patch):
    """A prompt that begins alike is taken for longer than that."""
    find = places.Places.longest_prefix

    def longer(self, prompt, version, routed):
        source, count = find(self, prompt, version, routed)
        return (source, min(count + 1, len(prompt) - 1, len(source.ids))) if source else (source, count)

    patch.setattr(places.Places, "longest_prefix", longer)


def leaves_keys_behind(patch):
    """A row that moves to another place leaves its positions."""
    patch.setattr(Cache, "exchange", lambda self, one, other, length: None)


def copies_nothing(patch):
    patch.setattr(Cache, "copy", lambda self, source, row, length: None)


def draws_with_the_first_seed(patch):
    uniform = places.Row.uniform
    patch.setattr(places.Row, "uniform", lambda self: uniform(_keyed(self)))


def _keyed(row):
    return type("Keyed", (), {"key": 7, "tokens": row.tokens})()


def forgets_rows_that_grow(patch):
    resize = Cache.resize
    patch.setattr(
        Cache,
        "resize",
        lambda self, rows, many, order, lengths: resize(self, rows, many, order[::-1], lengths),
    )


def samples_all_like_the_first(patch):
    choose = live_file.choose_each

    def alike(logits_SV, wishes):
        for wish in wishes:
            wish.alike = wishes[0].alike
        return choose(logits_SV, wishes)

    patch.setattr(live_file, "choose_each", alike)


@pytest.mark.parametrize(
    "fault",
    [
        copies_one_too_many,
        leaves_keys_behind,
        copies_nothing,
        draws_with_the_first_seed,
        forgets_rows_that_grow,
        samples_all_like_the_first,
    ],
)
def test_control_arm(known, small, monkeypatch, fault):
    engine, expected = known("gqa")
    fault(monkeypatch)
    assert farthest(engine, list(requests(MANY)), expected)[0] > 0.01


def test_nothing_is_shared_if_it_is_not_wanted(build, small):
    """Bit by bit: where nobody reads beside it, a prompt is read as the engine reads it alone."""
    engine = Engine(build("gqa"), stop_ids=STOP_IDS)
    live = Live(engine, shares_prefixes=False)
    for request in requests(8):
        ended = run(live, [request])
        assert ended[request].answers == alone(engine, request)
        for ours, theirs in zip(ended[request].answers, alone(engine, request), strict=True):
            assert ours.logprobs == theirs.logprobs
    assert live.load.reused == sum(2 * len(r.prompt) for r in requests(8) if r.sampling.n == 3)


class Versions:
    """Adapters that count who has which version."""

    def __init__(self):
        self.present, self.held, self.passes = {"a": 1, "b": 1}, [], []

    def version(self, name):
        if name not in self.present:
            raise UserError(f"no {name}")
        self.held.append((name, self.present[name]))
        return self.held[-1]

    def assign(self, versions):
        self.passes.append(list(versions))

    def leave(self, version):
        self.held.remove(version)


def test_an_answer_keeps_the_version_with_which_it_joined_and_shares_within_it(build, small):
    adapters = Versions()
    live = Live(Engine(build("gqa")), adapters=adapters, max_rows=3)
    prompt, sampling = list(range(1, 31)), Sampling(seeds=(1,))

    def ask(name):
        live.add(Request(prompt, sampling, 6, adapter=name))

    ask("a"), ask("a"), ask("b")
    live.turn()
    assert live.load.reused == 30  # the second "a" copies the first's; "b" does not
    adapters.present["a"] = 2
    ask("a"), ask("none")
    ended = []
    while live.busy:
        ended += live.turn()
    assert [str(each.error) for each in ended if each.error] == ["no none"]
    assert not adapters.held and len(ended) == 5
    assert live.load.reused == 30  # the new version has copied nothing
    versions = [version for each in adapters.passes for version in each]
    # where a prompt is read, once for the layers and once for the head
    assert versions.count(("a", 1)) == 2 + 2 * 5 and versions.count(("a", 2)) >= 1 + 5
    assert adapters.passes[0] == [("a", 1), ("b", 1)]


def test_a_mask_holds_for_its_answer_and_one_that_raises_fails_alone(build):
    engine, seen = Engine(build("gqa"), stop_ids=frozenset()), []

    def even(tokens):
        seen.append(tokens)
        return None if len(tokens) == 2 else torch.arange(89) % 2 == 0

    def raising(tokens):
        if len(tokens) == 3:
            raise ZeroDivisionError
        return None

    def nothing(tokens):
        return torch.zeros(89, dtype=torch.bool)

    hot = Sampling(temperature=1.0, seeds=(3,))
    every = [
        Request([1, 2, 3], hot, 8, allow=even),
        Request([1, 2, 3], Sampling(seeds=(3,)), 8, allow=even),
        Request([1, 2, 3], Sampling(temperature=1.0, n=2, seeds=(3, 4)), 8, allow=[None, raising]),
        Request([1, 2, 3], hot, 8, allow=nothing),
        Request([1, 2, 3], hot, 8),
    ]
    ended = run(Live(engine), every, turns=5)
    for request in every[:2]:
        (answer,) = ended[request].answers
        assert all(token % 2 == 0 for i, token in enumerate(answer.tokens) if i != 2)
        assert len(answer.tokens) == 8 and all(p <= 0 for p in answer.sampled_logprobs)
    assert [len(tokens) for tokens in seen[::2]] == list(range(8))
    assert isinstance(ended[every[2]].error, ZeroDivisionError)
    assert "no token may come next" in str(ended[every[3]].error)
    assert ended[every[4]].answers == alone(engine, every[4])


def test_a_step_reads_a_prompt_that_lacks_its_last_token(build, small, monkeypatch):
    """The first of them by a pass, which shows that the model can begin behind positions that are there."""
    model = build("gqa", initializer_range=0.2)
    engine, prompt = Engine(model), [(7 * i + 3) % 89 for i in range(22)]
    every = [Request(prompt, Sampling(seeds=(i,), temperature=1.0), 6) for i in range(5)]
    expected, live, passes = [alone(engine, request) for request in every], Live(engine), []
    fill = type(model).fill
    monkeypatch.setattr(
        type(model), "fill", lambda self, batch, *more: passes.append(batch) or fill(self, batch, *more)
    )

    def differences(requests):
        ended = run(live, requests, turns=1)
        return [apart(ended[each].answers, expected[every.index(each)]) for each in requests]

    assert max(differences(every[:1])) <= 1e-5 and len(passes) == 1
    assert max(differences(every[1:2])) <= 1e-5 and len(passes) == 2
    assert max(differences(every[2:4])) <= 1e-5 and len(passes) == 2
    # control arms: another token of the prompt; and without the rule there is a pass
    with monkeypatch.context() as patch:
        patch.setattr(places.Seat, "newest", property(lambda seat: [*prompt[:-2], *seat.row.tokens][-1]))
        assert max(differences(every[2:4])) == float("inf")
    monkeypatch.setattr(filling.Part, "steps", False)
    assert max(differences(every[4:])) <= 1e-5 and len(passes) == 3


def test_the_prompt_and_the_likeliest_are_scored_as_one_pass_scores_them(build, small):
    """Oracle: log softmax of the logits of the whole text."""
    model = build("mla-moe")
    engine, prompt = Engine(model), [(7 * i + 3) % 89 for i in range(50)]
    scored = Request(prompt, Sampling(seeds=(1,)), 5, top=3, prompt_logprobs=True, experts=True)
    none = Request(prompt, Sampling(), 0, prompt_logprobs=True)
    live = Live(engine)
    ended = run(live, [Request(prompt, Sampling(seeds=(1,)), 5), scored, none], turns=1)
    (answer,) = ended[scored].answers
    assert ended[none].answers[0].tokens == [] and ended[none].answers[0].stop_reason == "length"
    whole = [*prompt, *answer.tokens]
    with torch.no_grad():
        log_p = model.logits(model.hidden(live_file.batch_of([whole]))).double().log_softmax(-1)
    for request in (scored, none):
        expected = [float(log_p[i, id]) for i, id in enumerate(prompt[1:])]
        assert request.prompt_scores.logprobs == pytest.approx(expected, abs=1e-5)
    for i, listed in enumerate(scored.prompt_scores.top + ended[scored].tops[0]):
        values, ids = log_p[i].topk(3)
        assert [id for id, _ in listed] == ids.tolist()
        assert [value for _, value in listed] == pytest.approx(values.tolist(), abs=1e-5)
    assert i == len(whole) - 2 and none.prompt_scores.top == []
    (own,) = alone(engine, scored, experts=True)
    assert torch.equal(answer.experts, own.experts) and answer.experts.shape[0] == len(whole) - 1


def test_what_is_not_finite_fails_alone_and_leaves_nothing_behind(build, small, monkeypatch):
    engine = Engine(build("gqa"), stop_ids=STOP_IDS)
    every = list(requests(12, alike=0.0))
    expected = [alone(engine, request) for request in every]
    bad, fill = every[4].prompt, engine.model.fill

    def spoiled(batch, cache, rows, first=None):
        hidden_TD = fill(batch, cache, rows, first)
        begin = 0
        for row, length in zip(rows, batch.lengths(), strict=True):
            if batch.tokens_T[begin : begin + length].tolist() == bad[-length:]:
                hidden_TD[begin : begin + length] = torch.nan
                for store in cache._stores():
                    store[row] = torch.nan
            begin += length
        return hidden_TD

    monkeypatch.setattr(engine.model, "fill", spoiled)
    ended = run(Live(engine, max_rows=3), every)
    assert isinstance(ended[every[4]].error, NotFinite)
    for request, answers in zip(every, expected, strict=True):
        if request is not every[4]:
            assert apart(ended[request].answers, answers) <= 1e-5


def test_a_listener_that_raises_and_a_pass_that_fails(build, monkeypatch):
    """Each ends its own request. A step that fails ends those that run; the next request is answered."""
    model = build("gqa")
    engine, fill = Engine(model), model.fill

    def fails_on_five(batch, cache, rows, first=None):
        if 5 in batch.tokens_T.tolist():
            raise MemoryError("no")
        return fill(batch, cache, rows, first)

    monkeypatch.setattr(model, "fill", fails_on_five)
    how = Sampling(seeds=(1,))
    every = [Request([1, 2], how, 4), Request([1, 5], how, 4), Request([1, 5], how, 4)]
    every += [Request([1, 3], how, 4, heard=lambda piece: 1 / 0), Request([1, 2], how, 4)]
    live = Live(engine)
    ended = run(live, every, turns=5)
    assert [type(ended[request].error) for request in every] == [
        type(None), MemoryError, MemoryError, ZeroDivisionError, type(None),
    ]  # fmt: skip
    assert ended[every[0]].answers == ended[every[4]].answers == alone(engine, every[0])
    live._step = lambda tokens: 1 / 0
    ended = run(live, [Request([1, 2], how, 4), Request([3, 2], how, 4)])
    assert [type(each.error) for each in ended.values()] == [ZeroDivisionError] * 2
    assert run(live, [every[0]])[every[0]].answers == alone(engine, every[0])


def test_running_rows_get_a_token_between_the_parts_of_a_long_prompt(build, small):
    """And a long prompt is not overtaken by those that come after it."""
    live, order = Live(Engine(build("gqa"))), []
    how = Sampling(seeds=(1,))
    live.add(Request([1, 2, 3], how, 60, heard=lambda piece: order.append("runs")))
    live.turn()
    live.add(Request(list(range(1, 81)), how, 2, heard=lambda piece: order.append("long")))
    for number in range(40):
        live.add(Request([50 + number % 30] * 5, how, 1, heard=lambda piece: order.append("short")))
        live.turn()
    assert order.index("short") > order.index("long") >= 4
    assert order[: order.index("long")] == ["runs"] * order.index("long")


@pytest.mark.parametrize("turns", [1, 12])
def test_rows_are_given_in_the_order_of_arrival(build, turns):
    """12 prompts at once, and one with each turn, for two rows; the third has several answers."""
    live, began = Live(Engine(build("gqa"), stop_ids=frozenset()), max_rows=2), []
    every = [
        Request(
            [60 + i, i + 1], Sampling(seeds=(1, 2, 3)[: 3 if i == 2 else 1], n=3 if i == 2 else 1), 2 + i % 3
        )
        for i in range(12)
    ]
    for i, request in enumerate(every):
        request.heard = lambda piece, i=i: began.append(i)
    run(live, every, turns)
    assert list(dict.fromkeys(began)) == list(range(12))


def test_one_that_waits_for_memory_is_not_overtaken_and_comes(build, small, monkeypatch):
    """64 positions in all: the second needs them, and waits for the first; the others wait for the second."""
    monkeypatch.setattr(room.Room, "_fit", lambda self, capacity, held: max(1, 64 // capacity))
    live, began, how = Live(Engine(build("gqa"), stop_ids=frozenset())), [], Sampling(seeds=(1,))
    for i, most in enumerate((9, 50, 2, 2)):
        heard = lambda piece, i=i: began.append(i)  # noqa: E731
        live.add(Request([60 + i, i + 1], how, most, heard=heard))
    live.turn()
    while live.busy:
        live.turn()
    assert began == [0] * 9 + [1] * 50 + began[59:] and sorted(began[59:]) == [2, 2, 3, 3]


def test_weights_may_change_after_release_only(build):
    """Control arm: without it a prompt that is still in the cache is that of the old weights."""
    model, prompt, how = build("gqa"), list(range(1, 41)), Sampling(temperature=1.0, seeds=(1,))
    engine, live = Engine(model), Live(Engine(model))
    before = run(live, [request := Request(prompt, how, 8)])[request].answers
    live.add(Request(prompt, how, 8))
    live.turn()
    with pytest.raises(UserError, match="still sampling 1 answer:"):
        live.release()
    while live.busy:
        live.turn()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    kept = run(live, [request := Request(prompt, how, 8)])[request].answers
    live.release()
    assert live.load.cache == 0
    fresh = run(live, [request := Request(prompt, how, 8)])[request].answers
    assert apart(fresh, alone(engine, request)) <= 1e-5
    assert apart(fresh, before) > 1e-3 and apart(fresh, kept) > 1e-3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "is empty"),
        ({"prompt": [89]}, "outside the vocabulary"),
        ({"most": -1}, "at least 0"),
        ({"allow": [None, None]}, "2 allow for 1 answers"),
        ({"prompt": [1] * 600}, "none is left for an answer"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_work(build, fields, words):
    live = Live(Engine(build("gqa", max_position_embeddings=512)))
    with pytest.raises(UserError, match=words):
        live.add(Request(**{"prompt": [1], "sampling": Sampling(), "most": 4, **fields}))
    assert not live.busy
