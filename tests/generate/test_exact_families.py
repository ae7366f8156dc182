"""Steps of every family: the logits of the packed pass over the same tokens, transformers' greedy tokens.

The control arms read the weights of a model by a shape with one planted bug: they show what each comparison
sees, whoever makes the steps.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from exact import (
    EXACT,
    HERE,
    RECENT,
    SEEN,
    STEPS,
    WIDE,
    Row,
    apart,
    assert_exact,
    each_maker,
    family,
    greedy_tokens,
    rows_of,
    uncached,
    walked,
)
from family_cases import CASES

from unfreeze import models
from unfreeze.generate.steps import launched
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.sparse import SparseMLA

# one row goes its own greedy way for 64 steps; beside it random tokens, over position 100 in one row and to 256
# in another
ROWS = rows_of((5, 64), (1, 24), (70, 64), (192, 64), greedy=1)
each_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in HERE)) for name in CASES]
)


def test_every_family_is_here():
    here = {models.FAMILIES[CASES[name].model_type] for name in HERE}
    theirs = {family for kind, family in models.FAMILIES.items() if kind not in models.ONLY_HERE}
    assert here == theirs, "add a case of tests/models to HERE in exact.py"


@functools.cache
def walks_of(name, steps, wide=False):
    _, model = family(name, wide)
    walks = walked(model, steps, ROWS)
    return walks, uncached(model, walks)


@each_maker
@each_family
def test_steps_to_256_tokens_are_the_packed_pass_over_them(name, steps):
    walks, wanted = walks_of(name, steps)
    assert_exact(walks, wanted)
    assert greedy_tokens(walks[0], wanted[0])


@each_maker
@pytest.mark.parametrize("name", WIDE)
def test_windows_chunks_and_borders_of_100_positions(name, steps):
    walks, wanted = walks_of(name, steps, wide=True)
    assert_exact(walks, wanted)
    assert greedy_tokens(walks[0], wanted[0])


class NoneOfTheLast:
    """transformers' seam for the choice of `likeliest`."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -RECENT:], -torch.inf)


@each_maker
@each_family
def test_greedy_tokens_are_those_of_transformers_cached_generate(name, steps):
    """32 of them. longrope's border of 8 tokens is passed, where transformers fills its cache anew."""
    reference, _ = family(name)
    walk = walks_of(name, steps)[0][0]
    prompt = torch.tensor([ROWS[0].prompt])
    theirs = reference.generate(
        prompt, max_new_tokens=32, do_sample=False, logits_processor=[NoneOfTheLast()]
    )
    assert walk.tokens[: 5 + 32] == theirs[0].tolist()


@each_maker
@pytest.mark.parametrize("name", ["deepseek-v32", "glm-moe-dsa-shared"])
def test_a_cache_of_no_more_positions_than_chosen_keys_is_attended_in_full(name, steps, monkeypatch):
    """It is recorded as latent attention is; one position more, and the attention is called."""
    called, forward = [], SparseMLA.forward
    monkeypatch.setattr(SparseMLA, "forward", lambda *arguments: called.append(1) or forward(*arguments))
    for keys, passes in ((44, 1), (43, 1 + 40)):
        _, model = family(name, index_topk=keys)
        called.clear()
        walks = walked(model, steps, [Row([5, 17, 3, 2], 40)])
        if steps is STEPS["recorded"]:
            assert len(called) == len(model.layers) * passes
        assert_exact(walks, uncached(model, walks))


# ---- control arms: what the comparison sees, whoever makes the steps

FEW = rows_of((1, 40), (4, 30), (7, 20))


def seen(planted, steps, model):
    """How far the steps of a planted model or maker are from the packed pass of the model."""
    walks = walked(planted, steps, FEW)
    return apart(walks, uncached(model, walks))


@each_maker
@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("mistral-window", "sliding_window"),
        ("gemma3-window", "sliding_window"),
        ("gpt-oss-window-all-full", "sliding_window"),
        ("llama4-text", "attention_chunk_size"),
        ("mimo-v2-flash", "sliding_window"),
        ("deepseek-v32", "index_topk"),
    ],
)
def test_control_a_mask_one_too_wide_is_seen(name, field, steps):
    """The same weights, read with a window or chunk of one position more."""
    _, model = family(name)
    _, wider = family(name, **{field: CASES[name].fields[field] + 1})
    assert seen(model, steps, model) <= EXACT
    assert seen(wider, steps, model) > SEEN


@each_maker
@pytest.mark.parametrize("border", [9, 1000], ids=["one step", "to the end"])
def test_control_a_stale_rotary_table_behind_longropes_border_is_seen(border, steps):
    _, model = family("phi3-longrope-tied")
    stale = copy.copy(model)
    stale.shape = replace(model.shape, rope=replace(model.shape.rope, short_until=border))
    assert model.shape.rope.short_until == 8
    assert seen(stale, steps, model) > SEEN


@each_maker
@pytest.mark.parametrize("name", ["llama-3-rope-biases", "deepseek-v3-groups-yarn"])
def test_control_a_position_off_by_one_is_seen(name, steps):
    _, model = family(name)

    def shifted(model, cache):
        cache.lengths = [length + 1 for length in cache.lengths]
        return steps(model, cache)

    walks = walked(model, shifted, FEW, spare=1)
    assert apart(walks, uncached(model, walks)) > SEEN


@each_maker
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3-groups-yarn"])
def test_control_rows_swapped_where_one_leaves_are_seen(name, steps, monkeypatch):
    _, model = family(name)
    keep = Cache.keep

    def swapped(self, rows):
        order = keep(self, rows)
        for store in (store for tensors in self.layers.values() for store in tensors):
            store[: len(order)] = store[: len(order)].flip(0)
        return order

    monkeypatch.setattr(Cache, "keep", swapped)
    assert seen(model, steps, model) > SEEN


def test_control_a_token_that_is_not_the_likeliest_is_seen():
    _, model = family("qwen3")
    (walk,) = walked(model, launched, [Row([5], 8)])
    (wanted,) = uncached(model, [walk])
    assert greedy_tokens(walk, wanted)
    walk.tokens[4] += 1
    assert not greedy_tokens(walk, wanted)
