"""Drawn experts: how often each is drawn against the exact probabilities, and that equal keys draw alike."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from chain_case import CHAIN, VARIANTS, built
from family_cases import batch_of
from scipy.stats import chisquare
from torch import Tensor

from unfreeze import models
from unfreeze.core.draws import Draw, number
from unfreeze.models.blocks import noise
from unfreeze.models.blocks.noise import Noise, gumbel
from unfreeze.models.blocks.routers import Router, RoutingRule, noaux_tc
from unfreeze.models.recompute import RECOMPUTE

T, E = 20_000, 6
LOGITS_E = torch.tensor([0.9, -0.4, 0.1, 1.5, -1.2, 0.3])
BIAS_E = torch.tensor([0.0, 0.3, -0.1, -0.4, 0.2, 0.1])
RULES = {
    "softmax": RoutingRule(),
    "softmax and bias": RoutingRule("softmax", "E"),
    "sigmoid and bias": noaux_tc(),
    "logits": RoutingRule("logits"),
}


def drawn(rule: RoutingRule, top_k: int, temperature: float, key: int = 7, layer: int = 0) -> Tensor:
    """ids [T, K] of T tokens with the same scores, in the order of the draws."""
    router = Router(E, E, top_k, rule, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.copy_(BIAS_E)
    scores_TE = router(LOGITS_E.expand(T, E))
    return router.choose(scores_TE, partial(Noise(Draw(key, temperature), T), layer))


def probabilities(rule: RoutingRule, temperature: float) -> list[float]:
    """Of one draw, from the definition, in float64."""
    z = LOGITS_E.double()
    scores = z.sigmoid() if rule.score == "sigmoid" else z.softmax(0)
    if rule.correction:
        scores = (scores + (BIAS_E - BIAS_E.mean()).double()).clamp(min=1e-9)
    return (scores ** (1 / temperature) / (scores ** (1 / temperature)).sum()).tolist()


def ordered(p: list[float], top_k: int) -> dict[tuple[int, ...], float]:
    """Plackett-Luce: the probability of each ordered draw of `top_k` without replacement."""
    found = {}
    for order in itertools.permutations(range(len(p)), top_k):
        left, chance = 1.0, 1.0
        for expert in order:
            chance *= p[expert] / left
            left -= p[expert]
        found[order] = chance
    return found


def p_value(ids_TK: Tensor, expected: dict[tuple[int, ...], float]) -> float:
    """Of χ² over the cells that expect five draws or more; the others are one cell."""
    counts = dict.fromkeys(expected, 0)
    for order in ids_TK.tolist():
        counts[tuple(order)] += 1
    large = [order for order, chance in expected.items() if chance * T >= 5]
    rest = 1 - sum(expected[order] for order in large)
    observed = [counts[order] for order in large]
    wanted = [expected[order] * T for order in large]
    if rest * T >= 5:
        observed, wanted = [*observed, T - sum(observed)], [*wanted, rest * T]
    scale = sum(observed) / sum(wanted)
    return float(chisquare(observed, [value * scale for value in wanted]).pvalue)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("name", RULES)
def test_draws_are_as_frequent_as_plackett_and_luce_say(name, top_k, temperature):
    rule = RULES[name]
    ids_TK = drawn(rule, top_k, temperature)
    assert all(len({*ids}) == top_k for ids in ids_TK[:100].tolist())
    assert p_value(ids_TK, ordered(probabilities(rule, temperature), top_k)) > 0.01 / 36  # 36 such tests


def test_one_draw_is_softmax_of_the_logits_over_the_temperature():
    p = (LOGITS_E.double() / 2).softmax(0).tolist()
    assert probabilities(RULES["softmax"], 2.0) == pytest.approx(p)
    assert p_value(drawn(RULES["softmax"], 1, 2.0), {(e,): p[e] for e in range(E)}) > 0.01


@pytest.mark.parametrize("top_k", [1, 2])
def test_control_other_noise_and_another_temperature_are_seen(top_k, monkeypatch):
    expected = ordered(probabilities(RULES["softmax"], 1.0), top_k)
    assert p_value(drawn(RULES["softmax"], top_k, 1.2), expected) < 1e-6

    def normal(key: int, layer: int, tokens: int, experts: int) -> Tensor:
        return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(key))

    monkeypatch.setattr(noise, "gumbel", normal)
    assert p_value(drawn(RULES["softmax"], top_k, 1.0), expected) < 1e-6


@pytest.mark.parametrize("name", RULES)
def test_towards_zero_the_best_are_drawn(name):
    router = Router(E, E, 2, RULES[name], dtype=torch.float32, device="cpu")
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    x_TE = torch.randn(500, E, generator=torch.Generator().manual_seed(0))
    scores_TE = router(x_TE)
    cold = router.choose(scores_TE, partial(Noise(Draw(7, 1e-6), 500), 0))
    assert torch.equal(cold, router.choose(scores_TE))
    warm = router.choose(scores_TE, partial(Noise(Draw(7, 1.0), 500), 0))
    assert not torch.equal(warm, router.choose(scores_TE))


def test_a_bias_that_drifts_as_a_whole_changes_no_draw(monkeypatch):
    expected = drawn(RULES["sigmoid and bias"], 2, 1.0)
    monkeypatch.setitem(globals(), "BIAS_E", BIAS_E + 0.5)
    assert (drawn(RULES["sigmoid and bias"], 2, 1.0) == expected).float().mean() > 0.999  # but for rounding


def test_experts_of_groups_that_are_left_out_are_never_drawn():
    router = Router(E, E, 2, noaux_tc(3, 2), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    scores_TE = router(LOGITS_E.expand(T, E))
    ids_TK = router.choose(scores_TE, partial(Noise(Draw(7, 5.0), T), 0))
    # groups (0, 1), (2, 3), (4, 5) by the sum of sigmoids: (2, 3) and (0, 1)
    assert {*ids_TK.flatten().tolist()} == {0, 1, 2, 3}


def test_the_noise_is_a_function_of_key_layer_token_and_expert():
    assert torch.equal(gumbel(7, 0, 50, E), gumbel(7, 0, 50, E))
    torch.manual_seed(1)  # torch's own state has no part in it, and is left as it is
    before = torch.get_rng_state()
    gumbel(7, 0, 50, E)
    assert torch.equal(before, torch.get_rng_state())
    keys = {number(*key) for key in itertools.product(range(3), range(3), range(3))}
    assert len(keys) == 27
    several = [gumbel(key, layer, 50, E) for key in (7, 8) for layer in (0, 1)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(several, 2))


# ---- in a model

DOCUMENTS = [[5, 17, 3, 88, 41, 2, 9], [11, 7], [60, 61, 62, 63, 64, 65], list(range(20, 40))]


def drawing(key: int = 3, temperature: float = 1.0) -> Any:
    return replace(batch_of(DOCUMENTS), draw=Draw(key, temperature))


def ran(model: models.Decoder, batch: Any, recompute: Any = models.plain) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    hidden_TD = model.hidden(batch, recompute)
    (hidden_TD * torch.linspace(-1, 1, hidden_TD.numel()).view(hidden_TD.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return hidden_TD.detach(), grads


@pytest.mark.parametrize("name", VARIANTS)
def test_recomputed_layers_draw_the_same_experts(name):
    model = built(**VARIANTS[name])
    hidden, expected = ran(model, drawing())
    for policy in RECOMPUTE.values():
        again, own = ran(model, drawing(), policy)
        assert torch.equal(again, hidden)
        assert all(torch.equal(own[key], expected[key]) for key in expected)
    assert not torch.equal(ran(model, drawing(key=4))[0], hidden)
    assert not torch.equal(ran(model, batch_of(DOCUMENTS))[0], hidden)


def test_a_pass_in_chunks_draws_what_a_whole_one_draws(monkeypatch):
    model = built()
    hidden, expected = ran(model, drawing(), models.keep_inputs)
    monkeypatch.setattr("unfreeze.models.decoder.chunk_tokens", lambda *_: 9)
    assert len(model.packed_pass(drawing()).chunks) > 1
    chunked, own = ran(model, drawing(), models.keep_inputs)
    assert (chunked - hidden).abs().max() <= 1e-5
    assert all(torch.allclose(own[key], expected[key], atol=1e-4) for key in expected)
    # control: each chunk with the noise of the batch's first tokens
    monkeypatch.setattr(Noise, "part", lambda self, rows: Noise(self.draw, rows.stop - rows.start))
    assert not torch.allclose(ran(model, drawing(), models.keep_inputs)[0], hidden, atol=1e-2)


def test_layers_and_passes_draw_apart():
    model = built(inner_iter=2, num_hidden_layers=2)
    with torch.no_grad():
        for moe in model.moe_layers().values():
            moe.gate.weight.zero_()
            moe.gate.e_score_correction_bias.zero_()
        cache = {}
        for key, moe in model.moe_layers().items():
            moe.register_forward_pre_hook(lambda _m, _i: None)
            cache[key] = moe
        model.hidden(drawing())
    counts = [tuple(moe.counts_E.tolist()) for moe in cache.values()]
    assert len({*counts}) == len(counts) == 4


def test_generation_and_scoring_take_the_best():
    """Without a key nothing is drawn: twice the same, and what routers would choose without noise."""
    model = built(**VARIANTS["both residuals"])
    batch = batch_of(DOCUMENTS)
    with torch.no_grad():
        plain = model.hidden(batch)
        cache = model.new_cache(len(DOCUMENTS), 64)
        filled = model.prefill(drawing(), cache)  # a cache is never filled by chance
    assert torch.equal(plain, model.hidden(batch)) and torch.equal(filled, plain)
    assert CHAIN["inner_iter"] == 3
