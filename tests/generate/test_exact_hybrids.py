"""Rows with a recurrent state or a window: they join, leave and share a prompt; each is what it is alone.

Steps of each family to 256 tokens, uneven rows, are in test_exact_families.py.
"""

from __future__ import annotations

import pytest
import torch
from exact import EXACT, SEEN, Walk, apart, assert_exact, each_maker, family, some, uncached, walked
from test_exact_rows import uneven

from unfreeze.core.errors import UserError
from unfreeze.generate import engine as engine_file
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import launched
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.step_pass import StepPass

HYBRIDS = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "kimi-linear", "lfm2-biases-untied", "lfm2-moe")
each_hybrid = pytest.mark.parametrize("name", HYBRIDS)


@each_maker
@each_hybrid
def test_a_row_among_others_is_what_it_is_alone(name, steps):
    _, model = family(name)
    rows = uneven(5)
    walks = walked(model, steps, rows)
    for row, walk in zip(rows, walks, strict=True):
        (alone,) = walked(model, steps, [row])
        assert alone.tokens == walk.tokens
        assert_exact([walk], [torch.stack(alone.logits)])
    assert_exact(walks, uncached(model, walks))


class Rows:
    """A cache of 4 rows, of which some run; every step feeds each its next random token."""

    def __init__(self, model, steps):
        self.model, self.cache = model, model.new_cache(4, 64)
        self.cache.lengths = []
        self.step, self.running, self.gone = steps(model, self.cache), [], []

    def join(self, *prompts):
        """Fill further rows."""
        places = list(range(len(self.running), len(self.running) + len(prompts)))
        self.cache.more(len(prompts))
        batch = batch_of(prompts)
        ends_S = batch.starts_S + torch.tensor(batch.lengths()) - 1
        logits_SV = self.model.logits(self.model.prefill(batch, self.cache, places)[ends_S])
        self.running += [Walk(len(p), [*p], [row]) for p, row in zip(prompts, logits_SV, strict=True)]

    def fork(self, source, count):
        """Give the prompt of a row to further ones."""
        walk = self.running[source]
        self.cache.more(count)
        places = list(range(len(self.running), len(self.running) + count))
        self.cache.fork(source, places, len(walk.tokens))
        self.running += [Walk(walk.prompt, [*walk.tokens], [*walk.logits]) for _ in places]

    def go(self, count, seed):
        for turn in range(count):
            for walk, token in zip(self.running, some(len(self.running), 100 * seed + turn), strict=True):
                walk.tokens.append(token)
            logits_SV = self.step([walk.tokens[-1] for walk in self.running])
            for walk, logits in zip(self.running, logits_SV, strict=True):
                walk.logits.append(logits.clone())

    def leave(self, *stay):
        self.gone += [walk for place, walk in enumerate(self.running) if place not in stay]
        self.running = [self.running[place] for place in self.cache.keep(list(stay))]

    @property
    def walks(self):
        return self.gone + self.running


@torch.no_grad()
def joined(model, steps):
    """Rows of four lengths: two begin, one joins, the first leaves, one joins in its place, all end."""
    rows = Rows(model, steps)
    rows.join(some(5, 1), some(1, 2))
    rows.go(6, seed=1)
    rows.join(some(19, 3))
    rows.go(4, seed=2)
    rows.leave(1, 2)
    rows.go(3, seed=3)
    rows.join(some(2, 4), some(11, 5))
    rows.go(5, seed=4)
    rows.leave(0, 3)
    rows.go(3, seed=5)
    return rows.walks


@torch.no_grad()
def forked(model, steps):
    """Three rows share a prompt, and another is beside them."""
    rows = Rows(model, steps)
    rows.join(some(9, 1), some(4, 2))
    rows.fork(0, 2)
    rows.go(8, seed=1)
    rows.leave(1, 2, 3)
    rows.go(4, seed=2)
    return rows.walks


@each_maker
@each_hybrid
@pytest.mark.parametrize("way", [joined, forked])
def test_rows_that_join_leave_and_share_a_prompt_are_the_packed_pass(way, name, steps):
    _, model = family(name)
    walks = way(model, steps)
    assert_exact(walks, uncached(model, walks))


@each_hybrid
def test_a_row_has_a_state_after_all_of_its_positions_alone(name):
    """A fork of the first 3 of 5 positions would need a state that is gone."""
    _, model = family(name)
    rows = Rows(model, launched)
    rows.join(some(5, 1))
    rows.cache.more(1)
    with pytest.raises(UserError, match="state after 5 positions, none after 3"):
        rows.cache.fork(0, [1], 3)
    assert model.holds(5, 5) and not model.holds(3, 5)


PROMPTS = [some(length, length) for length in (7, 1, 12)]


@each_hybrid
@pytest.mark.parametrize("shared", [True, False], ids=["shared prompts", "copied prompts"])
def test_answers_do_not_depend_on_the_batch(name, shared, monkeypatch):
    """Three answers to each of three prompts, two rows at once, against each answer alone."""
    if not shared:
        monkeypatch.setattr(engine_file, "shares_prompts", lambda *_: False)
    _, model = family(name)
    engine, seeds = Engine(model, stop_ids=frozenset(range(0, 97, 9))), tuple(range(9))
    many = engine.generate(PROMPTS, Sampling(max_new_tokens=8, temperature=1.0, n=3, seeds=seeds), max_rows=2)
    assert len({len(answer.tokens) for answer in many}) > 2
    for index, answer in enumerate(many):
        one = Sampling(max_new_tokens=8, temperature=1.0, seeds=(seeds[index],))
        (alone,) = engine.generate([PROMPTS[index // 3]], one)
        assert answer.tokens == alone.tokens
        torch.testing.assert_close(
            torch.tensor(answer.logprobs), torch.tensor(alone.logprobs), rtol=0, atol=1e-5
        )


# ---- control arms


def keeps_states_behind(patch):
    """A row that moves to a freed place leaves its state behind."""
    keep = Cache.keep

    def planted(self, rows):
        states, self.states = self.states, {}
        order = keep(self, rows)
        self.states = states
        return order

    patch.setattr(Cache, "keep", planted)


def joins_an_old_state(patch):
    """A row that joins goes on from the state of the row before it."""
    write = Cache.write_state

    def planted(self, name, rows_S, state):
        if name not in self.states:
            write(self, name, rows_S, state)

    patch.setattr(Cache, "write_state", planted)


def forks_no_state(patch):
    patch.setattr(Cache, "fork_states", lambda *_: None)


def window_stands_still(patch):
    """The window of a convolution does not move on."""
    convolve = StepPass.convolve

    def planted(self, name, *parts, **how):
        before = self.cache.states[name].clone()
        y = convolve(self, name, *parts, **how)
        self.cache.states[name].copy_(before)
        return y

    patch.setattr(StepPass, "convolve", planted)


@each_hybrid
@pytest.mark.parametrize(
    ("fault", "way"),
    [
        (keeps_states_behind, joined),
        (joins_an_old_state, joined),
        (forks_no_state, forked),
        (window_stands_still, forked),
    ],
    ids=lambda thing: thing.__name__,
)
def test_control_a_state_of_another_row_is_seen(fault, way, name, monkeypatch):
    _, model = family(name)
    fault(monkeypatch)
    walks = way(model, launched)
    assert apart(walks, uncached(model, walks)) > SEEN > EXACT
