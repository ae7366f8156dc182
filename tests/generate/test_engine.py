"""The engine: cached equals uncached token for token on every attention, single and batched; limits, stops
and refusals."""

import gc
import weakref

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from unfreeze import models
from unfreeze.core.draws import uniform
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.generate.answer import Completion, Interrupted
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.model import Model
from unfreeze.generate.sampling import Sampling, choose
from unfreeze.generate.steps import launched

KINDS = ("gqa", "gqa-qk-norm", "mla-yarn", "mla-yarn-no-q-latent")  # of conftest.py
PROMPTS = [[3, 17, 42, 8, 60, 11, 5], [70, 2], list(range(20, 51))]


def chosen(logits_SV, sampling, place):
    """The tokens at `place` of the first answer to each prompt."""
    keys = sampling.keys(len(logits_SV))
    return choose(logits_SV, sampling, [uniform(key, place) for key in keys])[0]


def uncached(model, prompts, sampling):
    """The definition: the whole of every sequence goes through the model again for each token."""
    sequences = [list(prompt) for prompt in prompts]
    for place in range(sampling.max_new_tokens):
        last = [row[-1] for row in scores(model, sequences)]
        for sequence, token in zip(sequences, chosen(torch.stack(last), sampling, place), strict=True):
            sequence.append(token)
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]


def replayed(model, prompts, answers, sampling):
    """The same in one pass over prompts and answers: a causal model's logits at a place are those of the
    sequence cut there."""
    rows = scores(model, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    rows = [row[len(prompt) - 1 : -1] for row, prompt in zip(rows, prompts, strict=True)]
    steps = [
        chosen(torch.stack(logits), sampling, place) for place, logits in enumerate(zip(*rows, strict=True))
    ]
    return [list(answer) for answer in zip(*steps, strict=True)]


def scores(model, sequences):
    return model.logits(model.hidden(batch_of(sequences))).split([len(sequence) for sequence in sequences])


def tokens(completions):
    return [completion.tokens for completion in completions]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batched", "single"])
@pytest.mark.parametrize("kind", KINDS)
def test_cached_equals_uncached_for_256_tokens(build, kind, prompts):
    """Sampled at temperature 1, because greedy random models soon repeat themselves; a seed makes the draw a
    function of the logits."""
    model, sampling = build(kind), Sampling(max_new_tokens=256, temperature=1.0, seed=0)
    answers = tokens(Engine(model).generate(prompts, sampling))
    assert answers == replayed(model, prompts, answers, sampling)
    assert len({*answers[0]}) > 30  # the test is no test on a sequence that repeats itself


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_equals_the_model_run_anew_for_each_token(build, kind, temperature):
    model, sampling = build(kind), Sampling(max_new_tokens=24, temperature=temperature, seed=0)
    assert tokens(Engine(model).generate(PROMPTS, sampling)) == uncached(model, PROMPTS, sampling)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_same_single_and_batched(build, kind):
    model, sampling = build(kind), Sampling(max_new_tokens=64)
    single = [Engine(model).generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert Engine(model).generate(PROMPTS, sampling) == single


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_off_by_one_in_the_cache_would_be_seen(build, kind, monkeypatch):
    """Control arm: new tokens rotated as if they stood one place later."""
    model, sampling = build(kind), Sampling(max_new_tokens=24)
    expected = tokens(Engine(model, steps=launched).generate(PROMPTS, sampling))
    rope, step = type(model.shape.rope), models.Decoder.step

    def shifted_step(self, tokens_S, cache):
        with monkeypatch.context() as patch:
            tables = rope.tables
            patch.setattr(rope, "tables", lambda self, positions, *rest: tables(self, positions + 1, *rest))
            return step(self, tokens_S, cache)

    monkeypatch.setattr(models.Decoder, "step", shifted_step)
    assert tokens(Engine(model, steps=launched).generate(PROMPTS, sampling)) != expected


def test_the_cache_of_latent_attention_is_the_latent(build, monkeypatch):
    """(24 latent + 8 rotary) numbers per position and layer, where keys and values would be 4 heads x (24 +
    12)."""
    model = build("mla-yarn")
    cache = model.new_cache(2, 10)
    model.prefill(batch_of([[1, 2, 3], [4]]), cache)
    assert cache.nbytes == 2 * 10 * (24 + 8) * 4 * model.shape.num_layers


def test_rows_that_finish_leave_the_batch_and_change_no_other(build, monkeypatch):
    """Stop ids end rows at different steps; each row is what it is alone, and the number of rows computed
    shrinks."""
    model = build("gqa")
    plain = Engine(model).generate(PROMPTS, Sampling(max_new_tokens=40, temperature=1.0, seed=2))
    stop_ids = frozenset({plain[0].tokens[4], plain[2].tokens[11]})
    expected = []
    for done in plain:
        first = next((i for i, token in enumerate(done.tokens) if token in stop_ids), None)
        expected.append(done if first is None else Completion(done.tokens[: first + 1], "", "end"))
    sizes, step = [], models.Decoder.step
    monkeypatch.setattr(
        models.Decoder,
        "step",
        lambda self, tokens_S, cache: sizes.append(len(tokens_S)) or step(self, tokens_S, cache),
    )
    assert (
        Engine(model, stop_ids=stop_ids, steps=launched).generate(
            PROMPTS, Sampling(max_new_tokens=40, temperature=1.0, seed=2)
        )
        == expected
    )
    assert sum(sizes) == sum(len(done.tokens) - 1 for done in expected) and sizes[0] == 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.0, None, None), (1.0, None, None), (0.7, None, None), (1.3, 9, 0.8)],
)
def test_log_probabilities_before_and_after_the_warpers(build, temperature, top_k, top_p):
    """Oracle: transformers' warpers in float64, over one packed pass."""
    model = build("gqa")
    sampling = Sampling(20, temperature, top_k=top_k, top_p=top_p, seed=0)
    answers = Engine(model).generate(PROMPTS, sampling)
    rows = scores(model, [[*prompt, *done.tokens] for prompt, done in zip(PROMPTS, answers, strict=True)])
    for prompt, done, row in zip(PROMPTS, answers, rows, strict=True):
        before = row[len(prompt) - 1 : -1].double()
        after = TemperatureLogitsWarper(temperature)(None, before) if temperature else before
        after = TopKLogitsWarper(top_k)(None, after) if top_k else after
        after = TopPLogitsWarper(top_p)(None, after) if top_p else after
        if not temperature:  # one token has all the probability
            after = torch.zeros_like(before).scatter_(1, before.argmax(-1, keepdim=True), 1.0).log()
        for found, logits in ((done.logprobs, before), (done.sampled_logprobs, after)):
            expected = logits.log_softmax(-1).gather(1, torch.tensor(done.tokens)[:, None])[:, 0]
            assert expected.isfinite().all() and len(found) == 20
            torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=0, atol=1e-5)


def test_n_answers_come_prompt_by_prompt_and_the_first_is_that_of_n_1(build):
    model = Model(build("gqa"))
    options = {"max_new_tokens": 6, "temperature": 1.0, "seed": 3}
    one, two = model.generate(PROMPTS, **options), model.generate(PROMPTS, n=2, **options)
    assert two[::2] == one and len({*map(tuple, two)}) == 6
    assert model.generate(PROMPTS[0], n=2, **options) == two[:2]
    assert model.generate(PROMPTS[0], n=1, **options) == two[:1]
    assert model.generate(PROMPTS[0], **options) == two[0]
    rows = [[] for _ in two]
    for piece in model.stream(PROMPTS, n=2, **options):
        rows[piece.row].append(piece.token)
    assert rows == two
    own = model.generate(PROMPTS[:2], seeds=[5, 3], max_new_tokens=6, temperature=1.0)
    assert own[1] == model.generate(PROMPTS[1], max_new_tokens=6, temperature=1.0, seed=3)
    with pytest.raises(ConfigError, match="n is 0"):
        model.generate(PROMPTS, n=0)
    with pytest.raises(ConfigError, match="non-empty strings"):
        model.generate(PROMPTS, stop="")


class Breaks(Exception):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Breaks])
def test_ctrl_c_has_the_answers_so_far_and_another_error_is_itself(build, monkeypatch, error):
    """The first has ended, the others go on; with two rows at once the third has joined, the last still waits."""
    model, step, count = build("gqa"), Engine._step, []
    prompts, limits = [*PROMPTS, [9]], [3, 40, 40, 5]
    engine, sampling = Engine(model), Sampling(temperature=1.0, seed=0)
    whole = engine.generate(prompts, sampling, limits=limits)

    def breaks(self, step_of, tokens):
        count.append(1)
        if len(count) == 3:
            raise error
        return step(self, step_of, tokens)

    monkeypatch.setattr(Engine, "_step", breaks)
    with pytest.raises(error) as caught:
        engine.generate(prompts[:3], sampling, limits=limits[:3])
    if error is KeyboardInterrupt:
        assert isinstance(caught.value, Interrupted)
        so_far = [(len(done.tokens), done.stop_reason) for done in caught.value.completions]
        assert so_far == [(3, "length"), (3, "interrupted"), (3, "interrupted")]
        for done, full in zip(caught.value.completions, whole, strict=False):
            assert done.tokens == full.tokens[: len(done.tokens)] and done.finish_reason in ("stop", "length")
            assert len(done.logprobs) == len(done.tokens)
        count.clear()
        with pytest.raises(Interrupted) as caught:
            engine.generate(prompts, sampling, limits=limits, max_rows=2)
        assert [len(done.tokens) for done in caught.value.completions] == [3, 3, 1, 0]


def test_breaking_off_a_stream_ends_it_and_frees_its_cache(build, monkeypatch):
    model, caches, new = Model(build("gqa")), [], models.Decoder.new_cache

    def kept(self, *size, **how):
        cache = new(self, *size, **how)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(models.Decoder, "new_cache", kept)
    pieces = model.stream(PROMPTS, max_new_tokens=40)
    assert [next(pieces).row for _ in range(5)] == [0, 1, 2, 0, 1]
    assert caches[0]() is not None
    del pieces
    gc.collect()
    assert caches[0]() is None
    for piece in model.stream(PROMPTS[0], max_new_tokens=40):
        if piece.token:
            break
    assert model.generate(PROMPTS[0], max_new_tokens=2)  # and the engine goes on


def test_stream_yields_each_token_once_in_order(build):
    engine, sampling = Engine(build("gqa")), Sampling(max_new_tokens=12)
    rows = [[] for _ in PROMPTS]
    for step in engine.stream(PROMPTS, sampling):
        for piece in step:
            rows[piece.row].append(piece)
    assert [[piece.token for piece in row] for row in rows] == tokens(engine.generate(PROMPTS, sampling))
    assert all([p.finish_reason for p in row] == [None] * 11 + ["length"] for row in rows)


def test_stream_leaves_the_callers_grad_mode_alone(build):
    for _ in Engine(build("gqa")).stream([[1]], Sampling(max_new_tokens=3)):
        assert torch.is_grad_enabled()


class Letters:
    """Ids 0 to 25 are letters, 26 a new line; the head has 89 rows, 62 of them padding."""

    named_size = 27

    class _Stream:
        def push(self, id):
            return "abcdefghijklmnopqrstuvwxyz\n"[id]

        def finish(self):
            return ""

    def stream_decoder(self):
        return self._Stream()


def test_padded_rows_of_the_head_are_never_sampled(build):
    """docs/why/trust.md N5. The control arm is the same run without a tokenizer, which does sample them."""
    model, sampling = build("gqa"), Sampling(max_new_tokens=100, temperature=2.0, seed=0)
    with_names, without = Engine(model, tokenizer=Letters()), Engine(model)
    assert max(with_names.generate([[1]], sampling)[0].tokens) < 27
    assert max(without.generate([[1]], sampling)[0].tokens) >= 27


def test_stop_strings_end_the_text_across_tokens(build):
    engine, sampling = (
        Engine(build("gqa"), tokenizer=Letters()),
        {"max_new_tokens": 60, "temperature": 1.0, "seed": 4},
    )
    free = engine.generate([[1], [2]], Sampling(**sampling))
    stop = free[0].text[20:23]  # three letters, three tokens
    stopped = engine.generate([[1], [2]], Sampling(**sampling, stop=(stop,)))
    cut = free[0].text.index(stop)
    assert stopped[0] == Completion(free[0].tokens[: cut + 3], free[0].text[:cut], "stop word")
    streamed = [p.text for step in engine.stream([[1]], Sampling(**sampling, stop=(stop,))) for p in step]
    assert stop not in "".join(streamed)


def test_text_held_back_for_a_stop_string_comes_at_the_end(build):
    engine, sampling = (
        Engine(build("gqa"), tokenizer=Letters()),
        {"max_new_tokens": 10, "temperature": 1.0, "seed": 4},
    )
    text = engine.generate([[1]], Sampling(**sampling))[0].text
    held = engine.generate([[1]], Sampling(**sampling, stop=(text[-2:] + "#",)))[0]
    assert held.text == text and held.finish_reason == "length"


def test_max_new_tokens_is_bounded_by_the_positions_and_the_completion_says_so(build, recwarn):
    engine = Engine(build("gqa", max_position_embeddings=16))
    long, short = engine.generate([PROMPTS[0], PROMPTS[1]], Sampling(max_new_tokens=50))
    assert (len(long.tokens), len(short.tokens)) == (9, 14)
    assert long.finish_reason == short.finish_reason == "length"
    assert long.stop_reason == short.stop_reason == "window"
    assert len(engine.generate([PROMPTS[0]], Sampling(max_new_tokens=9))[0].tokens) == 9
    assert not recwarn.list  # data, not a line of Python on somebody's terminal


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "sequence 1 of 2 is empty"),
        ([[1, 89]], "sequence 0, position 1: token id 89 is outside the vocabulary 0 to 88"),
        ([[-1]], "token id -1"),
        ([[1] * 320], "320 tokens, the model 320 positions"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused_before_work(build, prompts, message):
    with pytest.raises(UserError, match=message):
        Engine(build("gqa")).stream(prompts, Sampling())


def test_stop_strings_without_a_tokenizer_are_refused(build):
    with pytest.raises(UserError, match="need a tokenizer"):
        Engine(build("gqa")).stream([[1]], Sampling(stop=("x",)))


def test_no_prompts_no_completions(build):
    assert Engine(build("gqa")).generate([], Sampling()) == []
