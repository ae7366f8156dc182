"""Router replay: a training pass chooses the experts that the sampler chose, with the weights of the live router."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError
from unfreeze.data import Example, pack
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import launched
from unfreeze.models import Decoder
from unfreeze.models.recompute import RECOMPUTE, recompute_policy
from unfreeze.rollout.routes import UNKNOWN, with_routes
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

WORDS, EXPERTS, TOP = 89, 8, 2
QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],  # the layers with experts are 0 and 2
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 320,
    "initializer_range": 0.3,
}
LENGTHS = (9, 4, 14)


def build() -> Decoder:
    model = models.build(models.shape(QWEN), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    return model


def batch_of() -> Batch:
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, WORDS, (length,), generator=generator).tolist() for length in LENGTHS]
    return pack([Example(tokens, [0.0, *[1.0] * (len(tokens) - 1)]) for tokens in documents])


def own_routes(model: Decoder, batch: Batch) -> Tensor:
    """The experts that the model chooses itself, [T, L, K]."""
    cache = model.new_cache(len(LENGTHS), max(LENGTHS), routes=True)
    with torch.no_grad(), model.looking():
        model.prefill(batch, cache)
    return torch.cat([cache.route(row) for row in range(len(LENGTHS))])


def other_routes(model: Decoder, batch: Batch) -> Tensor:
    """Two experts that the model would mostly not choose, UNKNOWN at every fourth token."""
    routes_TLK = EXPERTS - 1 - own_routes(model, batch)
    routes_TLK[::4] = UNKNOWN
    return routes_TLK


def given(batch: Batch, routes_TLK: Tensor) -> Batch:
    return replace(batch, extras={"routes": routes_TLK})


def gradients(model: Decoder, batch: Batch, recompute: str = "nothing") -> dict[str, Tensor]:
    model.zero_grad()
    hidden_TD = model.hidden(batch, recompute=recompute_policy(recompute, model.layers))
    (hidden_TD * torch.linspace(-1, 1, hidden_TD.numel()).view(hidden_TD.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def replayed(model: Decoder) -> dict[int, list[int]]:
    return {layer: moe.replayed_3.tolist() for layer, moe in model.moe_layers().items()}


def test_the_models_own_choice_changes_nothing_and_flips_nothing():
    model, batch = build(), batch_of()
    routes = own_routes(model, batch)
    assert routes.shape == (sum(LENGTHS), 2, TOP) and routes.dtype == torch.int16
    expected = gradients(model, batch)
    found = gradients(model, given(batch, routes))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert replayed(model) == {layer: [sum(LENGTHS) * TOP, 0, 0] for layer in (0, 2)}


def plain_mixture(moe: Any, x_TD: Tensor, ids_TK: Tensor) -> Tensor:
    """The mixture of these experts, a loop; their weights from the softmax over all, normalised over the chosen."""
    scores_TE = (x_TD @ moe.gate.weight.T).softmax(-1)
    rows = []
    for token, ids in enumerate(ids_TK.tolist()):
        total = sum(scores_TE[token, expert] for expert in ids)
        each = []
        for expert in ids:
            gate, up = (moe.experts.gate_up_proj.weight[expert] @ x_TD[token]).chunk(2)
            y = moe.experts.down_proj.weight[expert] @ (torch.nn.functional.silu(gate) * up)
            each.append(scores_TE[token, expert] / total * y)
        rows.append(sum(each))
    return torch.stack(rows)


def test_given_experts_are_used_with_weights_and_gradients_of_the_live_router():
    model, batch = build(), batch_of()
    moe = model.moe_layers()[2]
    own, chosen = own_routes(model, batch)[:, 1].long(), other_routes(model, batch)[:, 1].long()
    torch.manual_seed(0)
    x_TD, dy_TD = torch.randn(2, sum(LENGTHS), 32)
    run = model.packed_pass(given(batch, torch.stack([chosen, chosen], 1)))
    with torch.no_grad():
        itself = moe.gate.choose(moe.gate(x_TD))
    expected_ids = torch.where(chosen[:, :1] < 0, itself, chosen)
    assert (expected_ids != itself).any(1).float().mean() > 0.5 and own.shape == chosen.shape

    leaves = [x_TD.clone().requires_grad_() for _ in range(2)]
    moe(leaves[0], run).backward(dy_TD)
    found = {name: p.grad.clone() for name, p in moe.named_parameters() if p.grad is not None}
    moe.zero_grad()
    plain_mixture(moe, leaves[1], expected_ids).backward(dy_TD)
    assert "gate.weight" in found and found["gate.weight"].abs().max() > 1e-3
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-4, atol=1e-5)
    for name, parameter in moe.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
    # the counts: given, flipped of them, chosen by itself
    known = int((chosen >= 0).all(1).sum())
    flipped = sum(
        expert not in own_ids
        for ids, own_ids in zip(chosen.tolist(), itself.tolist(), strict=True)
        for expert in ids
        if expert >= 0
    )
    assert moe.replayed_3.tolist() == [known * TOP, flipped, (sum(LENGTHS) - known) * TOP]
    assert moe.counts_E.tolist() == torch.bincount(expected_ids.flatten(), minlength=EXPERTS).tolist()


def test_a_token_with_one_unknown_expert_keeps_its_own():
    model, batch = build(), batch_of()
    routes = own_routes(model, batch)
    routes[:, :, 1] = UNKNOWN
    routes[:, :, 0] = EXPERTS - 1 - routes[:, :, 0]
    expected, found = gradients(model, batch), gradients(model, given(batch, routes))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert replayed(model) == {layer: [0, 0, sum(LENGTHS) * TOP] for layer in (0, 2)}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recomputation_replays_the_same_and_counts_once(recompute, monkeypatch):
    model, batch = build(), batch_of()
    batch = given(batch, other_routes(model, batch))
    expected, counted = gradients(model, batch), replayed(model)
    assert counted[0][1] > 0 and counted[0][2] > 0
    for limit in (None, 10):  # 10 tokens at once: three chunks of documents
        monkeypatch.setattr("unfreeze.models.decoder.chunk_tokens", lambda *_, limit=limit: limit)
        for moe in model.moe_layers().values():
            moe.replayed_3.zero_()
        found = gradients(model, batch, recompute)
        assert replayed(model) == counted
        for name, gradient in expected.items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_looking_counts_nowhere():
    model, batch = build(), batch_of()
    with model.looking():
        model.hidden(given(batch, own_routes(model, batch)))
    assert replayed(model) == {0: [0, 0, 0], 2: [0, 0, 0]}


@pytest.mark.parametrize("shape", [(27, 2, 3), (27, 3, 2), (26, 2, 2)])
def test_routes_of_another_model_are_refused(shape):
    model, batch = build(), batch_of()
    with pytest.raises(UserError, match=r"27 tokens, 2 MoE layers and .* they come from another model"):
        model.hidden(given(batch, torch.zeros(shape, dtype=torch.int16)))


def test_a_steps_result_has_the_replays_of_its_own_passes_only():
    from unfreeze.objectives.cross_entropy import cross_entropy

    model, batch = build(), batch_of()
    options: dict[str, Any] = {"learning_rate": 0.0, "max_norm": 0.0, "recompute": RECOMPUTE["layers"]}
    plain = train_step(model, AdamW(model), [batch, batch], cross_entropy, **options)
    assert plain.replayed == {}
    routes = own_routes(model, batch)
    routes[:, 0] = EXPERTS - 1 - routes[:, 0]
    result = train_step(model, AdamW(model), [given(batch, routes), batch], cross_entropy, **options)
    assert {layer: counts[0] for layer, counts in result.replayed.items()} == {
        layer: sum(LENGTHS) * TOP for layer in (0, 2)
    }
    assert all(0 < counts[1] < counts[0] and counts[2] == 0 for counts in result.replayed.values())
    # each step counts anew
    again = train_step(model, AdamW(model), [given(batch, routes), batch], cross_entropy, **options)
    assert again.replayed == result.replayed


def engine_answers(model: Decoder) -> tuple[list[list[int]], list[Any]]:
    prompts = [[3, 14, 15], [9, 2, 6, 5, 35]]
    engine = Engine(model, steps=launched)
    return prompts, engine.generate(prompts, Sampling(12, temperature=1.0, seed=0), experts=True)


def test_the_engines_experts_become_a_batchs_routes():
    model = build()
    prompts, done = engine_answers(model)
    examples = [
        Example([*prompt, *answer.tokens], [0.0] * len(prompt) + [1.0] * len(answer.tokens))
        for prompt, answer in zip(prompts, done, strict=True)
    ]
    batch = with_routes(pack(examples), [answer.experts for answer in done])
    routes, lengths = batch.extras["routes"], batch.lengths()
    assert routes.dtype == torch.int16 and routes.shape == (sum(lengths), 2, TOP)
    last = [lengths[0] - 1, sum(lengths) - 1]
    unknown = routes.lt(0).all(2).all(1)
    assert unknown.nonzero().squeeze(1).tolist() == last  # the sampler never read the last token
    model.hidden(batch)
    # float32: both choose alike
    assert all(counts[1:] == [0, 2 * TOP] for counts in replayed(model).values())
    # an answer without routes, and a model without experts
    partly = with_routes(pack(examples), [None, done[1].experts])
    assert partly.extras["routes"][: lengths[0]].lt(0).all() and not partly.extras["routes"][-2].lt(0).any()
    assert "routes" not in with_routes(pack(examples), [None, None]).extras
    empty = torch.empty(5, 0, 0, dtype=torch.int16)
    assert "routes" not in with_routes(pack(examples), [empty, empty]).extras


def test_replay_closes_the_gap_that_another_choice_opens():
    """Control arm included: the router, shifted between sampling and training, chooses otherwise."""
    from unfreeze.kernels.linear_cross_entropy import Words
    from unfreeze.objectives.log_p import token_log_p

    model = build()
    prompts, done = engine_answers(model)
    examples = [
        Example([*prompt, *answer.tokens], [0.0] * len(prompt) + [1.0] * len(answer.tokens))
        for prompt, answer in zip(prompts, done, strict=True)
    ]
    batch = pack(examples)
    sampled = torch.tensor([value for answer in done for value in answer.sampled_logprobs])
    engine = SimpleNamespace(num_ids=WORDS)

    def gap(batch: Batch) -> float:
        hidden_TD = model.hidden(batch)
        log_p = token_log_p(hidden_TD, model.lm_head, batch, words=Words(engine.num_ids, 1.0))
        return float((log_p - sampled).abs().max())

    with_them = with_routes(batch, [answer.experts for answer in done])
    assert gap(batch) < 1e-5 and gap(with_them) < 1e-5
    for moe in model.moe_layers().values():  # chooses other experts, but weighs those it is given as before
        moe.gate.choose = lambda scores_TE: scores_TE.topk(TOP + 2).indices[:, 2:]  # type: ignore[method-assign]
    assert gap(batch) > 0.1
    assert gap(with_them) < 1e-5
