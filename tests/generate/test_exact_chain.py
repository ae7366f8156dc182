"""Steps of a chain of experts: the logits of the packed pass over the same tokens, recorded and called."""

from __future__ import annotations

import pytest
import torch
from chain_case import VARIANTS, built
from exact import (
    SEEN,
    STEPS,
    adapted,
    apart,
    assert_exact,
    each_maker,
    greedy_tokens,
    rows_of,
    uncached,
    walked,
)

from unfreeze.generate.engine import batch_of
from unfreeze.generate.steps import launched
from unfreeze.models.blocks.moe import MoE, ReadMoE

# the first row goes its own greedy way
ROWS = rows_of((5, 64), (1, 48), (9, 32), greedy=1)
each_variant = pytest.mark.parametrize("name", VARIANTS)


def model_of(name):
    return built(**VARIANTS[name]).eval().requires_grad_(False)


@each_maker
@each_variant
def test_steps_are_the_packed_pass_over_their_tokens(name, steps, monkeypatch):
    model, called = model_of(name), []
    for kind in (MoE, ReadMoE):
        forward = kind.forward
        monkeypatch.setattr(
            kind,
            "forward",
            lambda *arguments, forward=forward: called.append(arguments) or forward(*arguments),
        )
    walks = walked(model, steps, ROWS)
    if steps is STEPS["recorded"]:  # every pass of every layer is recorded: only the prefill calls them
        assert len(called) == len(model.moe_layers())
    wanted = uncached(model, walks)
    assert_exact(walks, wanted)
    assert greedy_tokens(walks[0], wanted[0])


@each_maker
@pytest.mark.parametrize("name", ["norm and gate per pass", "published, one gate"])
def test_steps_with_adapters_on_the_one_pool(name, steps):
    bare = model_of(name)
    model = adapted(bare, "experts")
    walks = walked(model, steps, ROWS)
    assert_exact(walks, uncached(model, walks))
    assert apart(walks, uncached(bare, walks)) > SEEN  # control: the adapters do something


def test_control_a_step_of_one_pass_less_is_seen():
    model, fewer = model_of("norm and gate per pass"), built(inner_iter=2)
    fewer.load_state_dict(model.state_dict(), strict=False)
    walks = walked(fewer.eval().requires_grad_(False), STEPS["recorded"], ROWS)
    assert apart(walks, uncached(model, walks)) > SEEN


def test_steps_keep_the_experts_of_each_pass():
    """As router replay reads them: [positions, mixtures, K], a mixture per pass, as a packed pass chooses."""
    model, document = model_of("norm and gate per pass"), list(range(3, 20))
    routes = []
    for steps in (STEPS["recorded"], launched):
        cache = model.new_cache(1, 20, routes=True)
        with torch.no_grad():
            model.prefill(batch_of([document[:9]]), cache)
            step = steps(model, cache)
            for token in document[9:]:
                step([token])
        routes.append(cache.route(0))
    whole = model.new_cache(1, 20, routes=True)
    with torch.no_grad():
        model.prefill(batch_of([document]), whole)
    expected = whole.route(0).sort(-1).values
    assert expected.shape == (len(document), len(model.moe_layers()), 2)
    assert all(torch.equal(route.sort(-1).values, expected) for route in routes)
