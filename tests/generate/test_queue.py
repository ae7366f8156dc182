"""Answers that wait, join, share a prompt and leave: each is the one that it would be alone."""

import pytest
import torch

from unfreeze import models
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.generate import engine as engine_file
from unfreeze.generate.answer import Row
from unfreeze.generate.engine import Engine
from unfreeze.generate.recorded import Recorded
from unfreeze.generate.sampling import Sampling
from unfreeze.kernels.decode_step.program import Program
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.routers import Router
from unfreeze.models.blocks.shared_cache import SharedCache
from unfreeze.parallel.answers import LOGIT_BYTES

KINDS = ("gqa", "mla-moe", "window")  # of conftest.py: grouped, latent with experts, a window of 9
PROMPTS = [[(7 * place + 13 * prompt) % 89 for place in range(1 + 5 * prompt % 23)] for prompt in range(10)]
N, NEW = 4, 8
SEEDS = tuple(range(100, 100 + N * len(PROMPTS)))
STOP_IDS = frozenset(range(0, 89, 7))  # answers end at different steps


def together(model, max_rows, **how):
    sampling = Sampling(max_new_tokens=NEW, temperature=1.0, n=N, seeds=SEEDS)
    return Engine(model, stop_ids=STOP_IDS).generate(PROMPTS, sampling, max_rows=max_rows, **how)


def alone(model):
    """Each of the 40 answers by itself."""
    engine = Engine(model, stop_ids=STOP_IDS)
    return [
        engine.generate([PROMPTS[index // N]], Sampling(max_new_tokens=NEW, temperature=1.0, seeds=(seed,)))[
            0
        ]
        for index, seed in enumerate(SEEDS)
    ]


def apart(ours, theirs):
    """The largest difference of a log-probability; infinity if any token differs."""
    if ours != theirs:
        return float("inf")
    pairs = [
        (a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)
    ]
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(build, kind):
    """float32, widths 1 to 40: the tokens of the answer alone, and its log-probabilities within 1e-5."""
    model = build(kind, initializer_range=0.2)  # logits up to 6: alone they are 4e-6 from float64
    expected = alone(model)
    assert len({len(done.tokens) for done in expected}) > 5  # rows leave, and others join, at many steps
    for width in (1, 2, 5, 16, 40):
        assert apart(together(model, width), expected) <= 1e-5


def drawn_per_batch(patch):
    """Random numbers in the order of the batch's rows."""
    generator = torch.Generator().manual_seed(0)
    patch.setattr(Row, "uniform", lambda self: float(torch.rand(1, generator=generator)))


def joins_another_row(patch):
    """The prefill of two joiners fills each other's rows."""
    prefill = models.Decoder.prefill
    patch.setattr(
        models.Decoder, "prefill", lambda self, batch, cache, rows: prefill(self, batch, cache, rows[::-1])
    )


def forks_another_row(patch):
    fork = Cache.fork
    patch.setattr(
        Cache,
        "fork",
        lambda self, source, rows, length: fork(self, (source + 1) % len(self.lengths), rows, length),
    )


def forgets_one_position(patch):
    fork = Cache.fork
    patch.setattr(Cache, "fork", lambda self, source, rows, length: fork(self, source, rows, length - 1))


def keeps_what_is_moved_over(patch):
    """A row that moves into a freed place leaves its keys behind."""

    def keep(self, rows):
        self.lengths = [self.lengths[row] for row in rows]
        return rows

    patch.setattr(Cache, "keep", keep)


def shares_another_prompt(patch):
    place = Program.place

    def other(self, shared, rows):
        slots, lengths = shared.unbind(1)
        place(self, torch.stack([(slots + 1) % 4, lengths], 1), rows)  # 5 rows of 4 answers: 4 slots

    patch.setattr(Program, "place", other)


def leaves_slots_behind(patch):
    patch.setattr(SharedCache, "keep", Cache.keep)


def reads_its_prompt_one_place_late(patch):
    """Each row begins one position early in its own part: it reads its own new key twice, a prompt's never."""
    table = SharedCache.table
    patch.setattr(SharedCache, "table", lambda self: table(self) - torch.tensor([0, 1]))


FAULTS = (
    drawn_per_batch,
    joins_another_row,
    forks_another_row,
    forgets_one_position,
    keeps_what_is_moved_over,
)
SHARED_FAULTS = (drawn_per_batch, shares_another_prompt, leaves_slots_behind, reads_its_prompt_one_place_late)


@pytest.mark.parametrize("fault", FAULTS)
def test_control_arm_answers_that_depend_on_the_batch_are_seen(build, monkeypatch, fault):
    """In a cache where each row has a copy of its prompt."""
    model = build("gqa")
    monkeypatch.setattr(engine_file, "shares_prompts", lambda *_: False)
    expected = together(model, 40)
    fault(monkeypatch)
    assert apart(together(model, 5), expected) > 0.01


@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_control_arm_of_shared_prompts(build, monkeypatch, fault):
    model = build("gqa")
    expected = together(model, 40)
    fault(monkeypatch)
    try:
        assert apart(together(model, 5), expected) > 0.01
    except UserError as error:  # rows seem to be full
        assert fault is leaves_slots_behind and "all are filled" in error.message


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_where_each_row_has_a_copy_of_its_prompt(build, monkeypatch, kind):
    model = build(kind, initializer_range=0.2)
    shared = together(model, 5)
    monkeypatch.setattr(engine_file, "shares_prompts", lambda *_: False)
    assert apart(shared, together(model, 5)) <= 1e-5


def test_a_prompt_is_filled_once_and_free_rows_are_taken_at_once(build, monkeypatch):
    model = build("gqa")
    filled, widths, caches = [], [], []
    prefill, step, new = models.Decoder.prefill, Recorded.__call__, models.Decoder.shared_cache

    def counted_step(self, tokens):
        widths.append(len(tokens))
        return step(self, tokens)

    def counted(self, batch, cache, rows):
        filled.append(batch.num_tokens)
        return prefill(self, batch, cache, rows)

    def kept(self, *size, **how):
        caches.append(new(self, *size, **how))
        return caches[-1]

    monkeypatch.setattr(models.Decoder, "prefill", counted)
    monkeypatch.setattr(Recorded, "__call__", counted_step)
    monkeypatch.setattr(models.Decoder, "shared_cache", kept)
    answers = together(model, 5)
    assert sum(filled) == sum(map(len, PROMPTS))
    assert sum(widths) == sum(len(done.tokens) - 1 for done in answers)
    assert widths == sorted(widths, reverse=True) and widths[0] == 5  # full while anybody waits
    # and the cache was allocated once
    (cache,) = caches
    assert cache.version == 4 * model.shape.num_layers
    assert all(store.shape[:2] == (5, NEW) for stores in cache.layers.values() for store in stores)
    assert all(store.shape[:2] == (4, 23) for stores in cache.prompts.values() for store in stores)


def test_a_packed_prefill_is_bounded(build, monkeypatch):
    from unfreeze.generate import queue

    model, lengths, prefill = build("gqa"), [], models.Decoder.prefill

    def counted(self, batch, cache, rows):
        lengths.append(batch.lengths())
        return prefill(self, batch, cache, rows)

    expected = together(model, 40)
    monkeypatch.setattr(models.Decoder, "prefill", counted)
    monkeypatch.setattr(queue, "PREFILL_TOKENS", 20)
    assert apart(together(model, 40), expected) <= 1e-5
    assert [length for together in lengths for length in together] == [len(prompt) for prompt in PROMPTS]
    assert all(sum(together) <= 20 or len(together) == 1 for together in lengths) and len(lengths) > 5


def longrope(model):
    """Answers that outgrow the short context of 16, and answers that don't, to prompts that don't yet."""
    prompts, seeds = [[5, 6, 7, 8, 9], list(range(20, 35))], tuple(range(12))
    stops = frozenset(range(0, 89, 11))
    sampling = {"max_new_tokens": 24, "temperature": 1.0}
    engine = Engine(model, stop_ids=stops)
    batched = engine.generate(prompts, Sampling(**sampling, n=6, seeds=seeds), max_rows=2)
    single = [engine.generate([prompts[i // 6]], Sampling(**sampling, seeds=(i,)))[0] for i in seeds]
    assert any(len(done.tokens) > 12 for done in single[:6])
    return apart(batched, single)


def test_a_prompt_whose_keys_have_turned_is_filled_again(build, monkeypatch):
    """Past 16 tokens longrope turns all cached keys of a row; another answer to the prompt needs the first
    ones."""
    model = build("longrope")
    assert longrope(model) <= 1e-5
    monkeypatch.setattr(models.Decoder, "holds", lambda self, prompt, length: True)
    assert longrope(model) > 0.01


@pytest.mark.parametrize("kind", ["mla-moe", "gqa"])
def test_chosen_experts_are_those_of_one_packed_pass(build, kind, monkeypatch):
    """float32: routing ties within rounding don't occur in these weights."""
    model = build(kind)
    answers = together(model, 5, experts=True)
    assert all(done.experts is None for done in together(model, 5)[:2])
    seen, choose = [], Router.choose
    monkeypatch.setattr(Router, "choose", lambda self, scores: seen.append(choose(self, scores)) or seen[-1])
    for index, done in enumerate(answers):
        prompt = PROMPTS[index // N]
        seen.clear()
        model.hidden(engine_file.batch_of([[*prompt, *done.tokens[:-1]]]))
        ids = torch.stack(seen, 1) if seen else torch.empty(len(prompt) + len(done.tokens) - 1, 0, 0)
        assert done.experts.dtype == torch.int16 and torch.equal(done.experts.long(), ids.long())
    assert answers[0].experts.shape[1:] == ((1, 2) if kind == "mla-moe" else (0, 0))


def test_rows_that_memory_does_not_hold_wait_and_it_is_said(build, monkeypatch):
    engine, said = Engine(build("gqa")), []
    engine.say = said.append
    each = (3 + 1) * engine.model.cache_bytes() + LOGIT_BYTES * 89  # 3 new tokens, and a share of the prompt
    free = engine_file.hardware("cpu").__class__("cpu", "", 1, 0, available=int(2 * each * 512.5))
    monkeypatch.setattr(engine_file, "hardware", lambda _: free)
    answers = engine.generate([[1, 2, 3, 4]], Sampling(max_new_tokens=3, temperature=1.0, seed=0, n=10_000))
    assert len(answers) == 10_000 and said == ["10,000 rows: 512 at once (512.0 KiB of cache)"]
    few = engine.generate([[1, 2, 3, 4]], Sampling(max_new_tokens=3, temperature=1.0, seed=0, n=100))
    assert apart(few, answers[:100]) <= 1e-5 and len(said) == 1
    # a row that does not fit is tried all the same, one at a time
    free = engine_file.hardware("cpu").__class__("cpu", "", 1, 0, available=1)
    monkeypatch.setattr(engine_file, "hardware", lambda _: free)
    assert engine.generate([[1, 2, 3, 4]], Sampling(max_new_tokens=3, n=2)) and said[1].startswith(
        "2 rows: 1 at"
    )


@pytest.mark.parametrize("kind", ["gqa", "gqa-qk-norm", "mla-moe", "mla-yarn", "window", "longrope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_caches_bytes_are_counted(build, kind, dtype):
    model = build(kind, dtype)
    cache = model.new_cache(3, 10)
    with torch.no_grad():
        model.prefill(engine_file.batch_of([[1, 2], [3], [4]]), cache)
    assert cache.nbytes == 3 * 10 * model.cache_bytes()


def test_a_prompt_may_have_a_limit_of_its_own(build):
    engine, sampling = Engine(build("gqa")), Sampling(max_new_tokens=9, temperature=1.0, seed=3)
    whole = engine.generate(PROMPTS[:3], sampling)
    cut = engine.generate(PROMPTS[:3], sampling, limits=[2, 9, 1])
    assert [done.tokens for done in cut] == [
        done.tokens[:n] for done, n in zip(whole, (2, 9, 1), strict=True)
    ]
    for wrong in ([1, 2], [1, 0, 1]):
        with pytest.raises(ConfigError, match="limits"):
            engine.stream(PROMPTS[:3], sampling, limits=wrong)
    with pytest.raises(ConfigError, match="max_rows is 0"):
        engine.stream(PROMPTS[:3], sampling, max_rows=0)
