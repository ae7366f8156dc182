"""The auxiliary loss of experts against transformers' own, and over micro-batches as over one batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.core.draws import Draw
from unfreeze.data import Example, pack
from unfreeze.job.experts import routed
from unfreeze.models import Decoder
from unfreeze.objectives.balanced import Balanced
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.ahead import look_ahead
from unfreeze.train.optim import AdamW
from unfreeze.train.step import StepResult, train_step

WORDS, EXPERTS = 97, 8
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
CHAIN = {
    **{name: QWEN[name] for name in QWEN if not name.startswith("num_experts")},
    "model_type": "chain_of_experts",
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "inner_iter": 2,
}
LENGTHS = (40, 3, 9, 25)  # very unequal
SUPERVISED = (2, 2, 8, 1)
WEIGHT = 0.7


def build(config: dict[str, Any] = QWEN) -> Decoder:
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    return model


def examples() -> list[Example]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, WORDS, (length,), generator=generator).tolist() for length in LENGTHS]
    return [
        Example(tokens, [0.0] * (len(tokens) - n) + [1.0] * n)
        for tokens, n in zip(drawn, SUPERVISED, strict=True)
    ]


def cut(pieces: int, seed: int | None = None) -> list[Batch]:
    """The documents in so many micro-batches; seed: of drawn experts, the same noise is not to be expected."""
    size = len(LENGTHS) // pieces
    batches = [pack(examples()[i : i + size]) for i in range(0, len(LENGTHS), size)]
    if seed is None:
        return batches
    return [replace(batch, draw=Draw(seed + i, 1.0)) for i, batch in enumerate(batches)]


def stepped(
    model: Decoder, batches: list[Batch], weight: float = WEIGHT, recompute: Any = models.keep_inputs
) -> tuple[dict[str, Tensor], StepResult]:
    """Gradients of one step, and its result."""
    objective = Balanced(cross_entropy, routed(model, "balance_loss"), weight) if weight else cross_entropy
    optimizer = AdamW(model)
    result = train_step(
        model, optimizer, batches, objective, learning_rate=0.0, max_norm=0.0, recompute=recompute
    )
    return {name: optimizer.gradient(name).clone() for name in optimizer.parameters}, result


def apart(own: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of all gradients as one vector, relative."""
    a, b = (torch.cat([grads[name].flatten() for name in other]) for grads in (own, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_value_and_gradient_are_transformers_over_k(top_k):
    """Of a whole model with one layer: theirs puts the tokens of all layers together, ours each for itself."""
    fields = {**QWEN, "num_hidden_layers": 1, "num_experts_per_tok": top_k}
    config = transformers.Qwen3MoeConfig(**fields, output_router_logits=True, router_aux_loss_coef=WEIGHT)
    config._experts_implementation = "eager"
    reference = transformers.Qwen3MoeForCausalLM(config).float()
    model = build(fields)
    names = {
        name: name.removesuffix(".weight") if ".experts." in name else name for name in model.state_dict()
    }
    reference.load_state_dict({names[name]: tensor for name, tensor in model.state_dict().items()})

    document = examples()[0]
    tokens = torch.tensor([document.tokens])
    labels = torch.full_like(tokens, -100)
    labels[0, -2:] = tokens[0, -2:]
    out = reference(tokens, labels=labels)
    out.loss.backward()
    own, result = stepped(model, [pack([document])], WEIGHT * top_k)
    theirs = {name: reference.get_parameter(names[name]).grad for name in names}
    assert result.metrics["balance_loss"] * top_k == pytest.approx(float(out.aux_loss.detach()), rel=1e-5)
    assert result.loss + WEIGHT * top_k * result.metrics["balance_loss"] == pytest.approx(
        float(out.loss), rel=1e-5
    )
    for name, gradient in own.items():
        assert (gradient - theirs[name]).abs().max() <= 1e-5 * max(1.0, float(theirs[name].abs().max())), name


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_the_value_does_not_grow_with_k(top_k):
    """1 for a router without a preference, whatever K; transformers' is K."""
    model = build({**QWEN, "num_experts_per_tok": top_k})
    with torch.no_grad():
        for moe in model.moe_layers().values():
            moe.gate.weight.mul_(1e-4)
    _, result = stepped(model, cut(1))
    assert result.metrics["balance_loss"] == pytest.approx(1.0, abs=1e-3)
    logits = torch.zeros(50, EXPERTS)
    assert float(load_balancing_loss_func((logits,), EXPERTS, top_k)) == pytest.approx(top_k)


@pytest.mark.parametrize("config", [QWEN, CHAIN], ids=["moe", "chain"])
def test_the_value_is_the_mean_of_mixtures_over_all_tokens(config):
    model = build(config)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    for key, moe in model.moe_layers().items():
        moe.gate.register_forward_hook(lambda _m, _i, out, key=key: seen.__setitem__(key, out.detach()))
    with torch.no_grad(), model.looking():
        model.hidden(pack(examples()))
    parts = []
    for key, moe in model.moe_layers().items():
        p_TE = seen[key].double()
        p_TE = p_TE / p_TE.sum(-1, keepdim=True)
        n_E = torch.bincount(moe.gate.choose(seen[key]).flatten(), minlength=EXPERTS).double()
        parts.append(EXPERTS * float((n_E / (2 * len(p_TE)) * p_TE.mean(0)).sum()))
    assert len(parts) == (4 if config is CHAIN else 2)
    for pieces in (1, 4):
        _, result = stepped(build(config), cut(pieces))
        assert result.metrics["balance_loss"] == pytest.approx(sum(parts) / len(parts), rel=1e-5)


@pytest.mark.parametrize("config", [QWEN, CHAIN], ids=["moe", "chain"])
@pytest.mark.parametrize("recompute", models.RECOMPUTE)
def test_micro_batches_and_recomputation_give_the_gradient_of_one_batch(config, recompute):
    expected, whole = stepped(build(config), cut(1), recompute=models.plain)
    for pieces in (1, 2, 4):
        own, result = stepped(build(config), cut(pieces), recompute=models.RECOMPUTE[recompute])
        assert apart(own, expected) <= 1e-5
        assert result.loss == pytest.approx(whole.loss, rel=1e-6)
        assert result.expert_load == whole.expert_load


def test_layers_in_chunks_of_documents_give_the_same_gradient(monkeypatch):
    expected, _ = stepped(build(CHAIN), cut(1), recompute=models.plain)
    monkeypatch.setattr("unfreeze.models.decoder.chunk_tokens", lambda *_: 30)
    assert len(build(CHAIN).packed_pass(cut(1)[0]).chunks) > 1
    own, _ = stepped(build(CHAIN), cut(1))
    assert apart(own, expected) <= 1e-5


def alone_of(config: dict[str, Any], batches: list[Batch]) -> dict[str, Tensor]:
    """The auxiliary loss's share of a step's gradient."""
    whole, _ = stepped(build(config), batches)
    without, _ = stepped(build(config), batches, weight=0.0)
    return {name: whole[name] - without[name] for name in whole}


def test_control_a_mean_of_means_is_seen(monkeypatch):
    """Each micro-batch with its own shares of choices, as trainers that add up micro-batches' losses have it."""
    right = alone_of(QWEN, cut(1))
    assert apart(alone_of(QWEN, cut(4)), right) <= 1e-4

    def begin(self: Balanced, micro_batches: Any, load: Any) -> None:
        self._tokens, self._divisor, self._load = 1, 1.0, None

    def mean_of_means(self: Balanced, hidden: Tensor, head: Any, batch: Batch, tapped: Any) -> Any:
        loss = cross_entropy(hidden, head, batch)
        values = []
        for tap, mixtures in self.mixtures.items():
            for mixture in mixtures.values():
                p_TE = tapped[tap]
                n_E = torch.bincount(mixture.gate.choose(p_TE).flatten(), minlength=EXPERTS)
                values.append(EXPERTS * (n_E / (2 * len(p_TE)) * p_TE.mean(0)).sum())
        term = self.weight * torch.stack(values).mean() * sum(SUPERVISED) / 4
        return replace(loss, sum=loss.sum + term - term.detach())

    monkeypatch.setattr(Balanced, "begin", begin)
    monkeypatch.setattr(Balanced, "__call__", mean_of_means)
    assert apart(alone_of(QWEN, cut(1)), right) > 0.1 or apart(alone_of(QWEN, cut(4)), right) > 0.1


def test_it_is_in_the_gradient_of_the_router_and_below():
    """And the reported loss stays the objective's own."""
    own, result = stepped(build(), cut(2))
    without, plain = stepped(build(), cut(2), weight=0.0)
    assert result.loss == pytest.approx(plain.loss, rel=1e-7) and "balance_loss" not in plain.metrics
    moved = {name for name in own if float((own[name] - without[name]).abs().max()) > 1e-5}
    assert {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)} <= moved
    assert "model.embed_tokens.weight" in moved and "lm_head.weight" not in moved


def test_sixty_steps_of_it_alone_even_a_skewed_router():
    model = build({**QWEN, "num_hidden_layers": 1})
    with torch.no_grad():
        model.moe_layers()[0].gate.weight[3] += 0.6 * model.model.embed_tokens.weight.mean(0).sign()
        model.moe_layers()[0].gate.weight[5] += 1.0
    objective = Balanced(cross_entropy, routed(model, "balance_loss"), 1.0)
    optimizer, spread = AdamW(model), []
    for _ in range(60):
        result = train_step(
            model, optimizer, cut(2), objective, learning_rate=3e-3, max_norm=1.0, recompute=models.plain
        )
        spread.append(result.metrics["balance_loss"])
    assert spread[-1] < 1.1 < spread[0]


def test_drawn_experts_count_as_drawn():
    """The look ahead draws what the step draws."""
    own, result = stepped(build(), cut(4, seed=3))
    seen: dict[int, Tensor] = {}

    class Noting(Balanced):
        def begin(self, micro_batches: Any, load: Any) -> None:
            seen.update({} if load is None else load)
            super().begin(micro_batches, load)

    model = build()
    objective = Noting(cross_entropy, routed(model, "balance_loss"), WEIGHT)
    from unfreeze.parallel.processes.collectives import ALONE

    look_ahead(model, objective, cut(4, seed=3), models.plain, ALONE)
    assert {layer: load.tolist() for layer, load in seen.items()} == result.expert_load
    assert all(not moe.counts_E.any() for moe in model.moe_layers().values())
    best, _ = stepped(build(), cut(4))
    assert apart(own, best) > 1e-2


def test_evaluation_has_no_such_loss():
    model = build()
    objective = Balanced(cross_entropy, routed(model, "balance_loss"), WEIGHT)
    look_ahead_batches = cut(1)
    objective.begin(look_ahead_batches, None)
    from unfreeze.train.step import loss_of

    with torch.no_grad():
        loss = loss_of(model, look_ahead_batches[0], objective, models.plain)
    assert "balance_loss" not in loss.metrics and loss.each is not None
