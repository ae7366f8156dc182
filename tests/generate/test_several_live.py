"""Several adapters under load: requests of many threads while versions are replaced. No token is of another's
adapter or of another version than its answer's; two planted faults, which the same count finds.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading

import pytest
import torch

from tests.generate import certain
from tests.generate.test_exact_several import CASES, bare, model_of  # noqa: F401  a fixture
from unfreeze.adapters import with_adapters
from unfreeze.adapters.several import Several, Version
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.live import Live
from unfreeze.generate.request import Request
from unfreeze.generate.sampling import Sampling
from unfreeze.serve.speaker import Speaker, Work

NAMES = 5
VERSIONS = 16
THREADS = 12


def token_of(name: int, version: int) -> int:
    """Of the versions of an adapter, 16 tokens in turn; 0 to 15 are those of no adapter."""
    return 16 * (1 + name) + version % VERSIONS


class StepBefore(Several):
    """Planted: the pass has the assignment of the pass before it."""

    _before = ()

    def assign(self, versions):
        now, self._before = self._before, list(versions)
        super().assign([*now, *versions[len(now) :]][: len(versions)])


class Overwritten(Several):
    """Planted: running answers read the version that replaced theirs."""

    def assign(self, versions):
        super().assign([self._now.get(each.name, each) for each in versions])


class TooLong(Several):
    """Planted: new answers begin with the version before the present one."""

    def version(self, name):
        old = next((each for each in self._old if each.name == name), None)
        if old is None:
            return super().version(name)
        with self._lock:
            self._held[old] += 1
        return old


class FreedEarly(Several):
    """Planted: a version is freed when it is replaced, and its slot is taken again."""

    def _retire(self, version):
        if version is not None:
            self._free(version.slot)


@functools.cache
def adapters_of_tokens():
    """Token -> the adapters that make it certain; `put` copies them."""
    model = certain.model()
    return {token: certain.says(model, token) for token in range(16, 16 * (NAMES + 1))}


def wrong_tokens(kind, wanted: int, seed: int = 0) -> tuple[int, int, int]:
    """-> (tokens of answers with an adapter, those of another adapter, those of another version).

    An answer may have any version that was the present one at some time between its request and its end, and
    has one only.
    """
    model = certain.model()
    sets = adapters_of_tokens()
    several = kind(model)
    begun, present = [0] * NAMES, [0] * NAMES  # versions whose loading has begun, has ended
    for name in range(NAMES):
        several.put(str(name), sets[token_of(name, 0)])
    speaker = Speaker(Engine(model), max_rows=16, adapters=several)
    counts, lock, over = [0, 0, 0], threading.Lock(), threading.Event()

    def ask(number):
        draw = random.Random(1000 * seed + number)
        while counts[0] < wanted and not over.is_set():
            name = draw.randrange(-1, NAMES)  # -1: the model as it is
            first = present[name] if name >= 0 else 0
            length = draw.choice((1, 3, 10, 40))
            prompt = [1, 2, 3, *(draw.randrange(certain.VOCAB) for _ in range(draw.randrange(6)))]
            work = Work(
                prompt, Sampling(length, temperature=0.0), length, adapter=str(name) if name >= 0 else ""
            )
            tokens = speaker.submit(work).result(60)[0][0].tokens
            assert len(tokens) == length
            versions = {token_of(name, v) for v in range(first, begun[name] + 1)} if name >= 0 else ()
            own = range(16 * (1 + name), 16 * (2 + name))
            others = (
                sum(token not in own for token in tokens)
                if name >= 0
                else sum(token != 0 for token in tokens)
            )
            stale = sum(token in own and (token not in versions or token != tokens[0]) for token in tokens)
            with lock:
                counts[0] += length
                counts[1] += others
                counts[2] += stale if name >= 0 else 0

    def train():
        draw = random.Random(seed)
        for turn in itertools.count():
            if over.wait(0.002):
                return
            name = turn % NAMES if turn < NAMES else draw.randrange(NAMES)
            if begun[name] - min(begun) < VERSIONS // 2:  # a token stands for one of the last versions only
                begun[name] += 1
                several.put(str(name), sets[token_of(name, begun[name])])
                present[name] = begun[name]

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(THREADS)]
    trainer = threading.Thread(target=train)
    for thread in (*askers, trainer):
        thread.start()
    for thread in askers:
        thread.join()
    over.set()
    trainer.join()
    speaker.close()
    assert min(present) > 2
    if kind is Several:  # only the present versions are in memory
        assert not several._old and not several._held
        assert set(model.lm_head.each.table.factors) == {several.version(n).slot for n in several.names}
    return tuple(counts)


def test_no_token_is_stale_or_of_another_adapter():
    tokens, others, stale = wrong_tokens(Several, 1_200)
    assert tokens >= 1_200 and others == stale == 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_none_of_ten_thousand(seed):
    tokens, others, stale = wrong_tokens(Several, 10_000, seed)
    assert tokens >= 10_000 and others == stale == 0


@pytest.mark.parametrize("kind", [StepBefore, Overwritten, TooLong, FreedEarly])
def test_planted_faults_are_found(kind):
    _, others, stale = wrong_tokens(kind, 1_000)
    assert (others if kind in (StepBefore, FreedEarly) else stale) > 0


# ---- the same answers as one adapter alone


BEGINNING = [(7 * i) % 80 for i in range(40)]
PROMPTS = ([*BEGINNING, 9], [*BEGINNING, 9, 8, 11], [5, 17, 3], [70, 2], [*BEGINNING, 61])


def answers(live, requests):
    for request in requests:
        live.add(request)
    ended = {}
    while live.busy:
        ended |= {id(each.request): each for each in live.turn()}
    assert all(each.error is None for each in ended.values())
    return [ended[id(request)].answers[0] for request in requests]


@pytest.mark.parametrize("case", CASES)
def test_a_mixed_batch_answers_as_each_adapter_alone(case, bare):  # noqa: F811
    """Prompts begin alike, so prefixes are shared: within one adapter only. Ranks 1, 4 and 16."""
    model, sets = model_of(case)
    sampling = Sampling(12, temperature=1.0, seed=3)
    pairs = [(name, prompt) for prompt in PROMPTS for name in ("", *sets)]
    wanted, scores = {}, {}
    for name, prompt in pairs:
        with with_adapters(model, sets.get(name, {})), torch.no_grad():
            (wanted[name, tuple(prompt)],) = Engine(model).generate([prompt], sampling)
            logits_TV = model.logits(model.hidden(batch_of([prompt]))).log_softmax(-1)
            scores[name, tuple(prompt)] = logits_TV[range(len(prompt) - 1), prompt[1:]]
    several = bare(model, sets)
    live = Live(Engine(model), max_rows=6, adapters=several)
    requests = [
        Request(prompt, sampling, 12, adapter=name, prompt_logprobs=len(prompt) == 3)
        for name, prompt in pairs
    ]
    mixed = answers(live, requests)
    assert live.load.reused > 0
    for (name, prompt), request, answer in zip(pairs, requests, mixed, strict=True):
        alone = wanted[name, tuple(prompt)]
        assert answer.tokens == alone.tokens
        torch.testing.assert_close(
            torch.tensor(answer.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5
        )
        if request.prompt_logprobs:  # the prompt's own scores: of the head's adapter too
            own = torch.tensor(request.prompt_scores.logprobs)
            torch.testing.assert_close(own, scores[name, tuple(prompt)], rtol=0, atol=1e-5)
    assert len({tuple(wanted[name, tuple(PROMPTS[0])].tokens) for name in ("", *sets)}) == 5


def test_an_unknown_name_ends_its_request_alone():
    model = certain.model()
    several = Several(model)
    several.put("poems", certain.says(model, 20))
    live = Live(Engine(model), adapters=several)
    requests = [Request([1, 2], Sampling(3, temperature=0.0), 3, adapter=name) for name in ("poem", "poems")]
    for request in requests:
        live.add(request)
    ended = {}
    while live.busy:
        ended |= {each.request.adapter: each for each in live.turn()}
    assert "there is no adapter 'poem'; nearest: 'poems'" in str(ended["poem"].error)
    assert ended["poems"].answers[0].tokens == [20, 20, 20]


def test_versions_are_told_apart():
    assert Version("a", 1, 0) == Version("a", 1, 5) != Version("a", 2, 0)
