"""One step: equality over accumulation with skewed lengths (docs/why/trust.md N3), empty micro-batches (N2), what
is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from unfreeze.core.batch import Batch, Loss
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW, NonFinite
from unfreeze.train.step import StepResult, train_step

# eight documents, very unequal in length and in supervised tokens
LENGTHS = [3, 5, 4, 2, 40, 7, 60, 30]
SUPERVISED = [1, 5, 1, 1, 35, 7, 2, 30]


def micro_batches(tiny: SimpleNamespace, pieces: int) -> list[Batch]:
    """The same eight documents in 1, 2, 4 or 8 micro-batches."""
    documents = [
        tiny.make_batch([n], [k], seed=i) for i, (n, k) in enumerate(zip(LENGTHS, SUPERVISED, strict=True))
    ]
    size = len(documents) // pieces
    return [join(documents[i : i + size]) for i in range(0, len(documents), size)]


def join(documents: list[Batch]) -> Batch:
    lengths = [d.num_tokens for d in documents]
    parts = [
        torch.cat([getattr(d, name) for d in documents])
        for name in ("tokens_T", "targets_T", "weights_T", "positions_T")
    ]
    return Batch(*parts, torch.tensor([sum(lengths[:i]) for i in range(len(lengths))]))


def run_step(
    tiny: SimpleNamespace, batches: list[Batch], objective=cross_entropy
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    model = tiny.Model()
    optimizer = AdamW(model)
    result = train_step(
        model, optimizer, batches, objective, learning_rate=1e-3, max_norm=0.0, recompute=tiny.plain
    )
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_accumulation_gives_the_gradient_of_one_batch(tiny: SimpleNamespace, pieces: int):
    whole, whole_gradients = run_step(tiny, micro_batches(tiny, 1))
    cut, cut_gradients = run_step(tiny, micro_batches(tiny, pieces))
    assert whole_gradients.keys() == cut_gradients.keys()
    for name, expected in whole_gradients.items():
        assert (cut_gradients[name] - expected).norm() <= 1e-6 * expected.norm(), name
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
    assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
    assert cut.metrics["correct"] == pytest.approx(whole.metrics["correct"])
    assert (cut.tokens, cut.supervised_tokens, cut.expert_load) == (
        sum(LENGTHS),
        sum(SUPERVISED),
        whole.expert_load,
    )
    assert 0 <= whole.metrics["correct"] <= 1


@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_metrics_have_their_own_divisor_and_the_largest_of_all_micro_batches(
    tiny: SimpleNamespace, pieces: int
):
    """A loss over answers: its metrics are means over tokens."""

    def objective(hidden_TD: torch.Tensor, lm_head: torch.nn.Module, batch: Batch) -> Loss:
        loss = cross_entropy(hidden_TD, lm_head, batch)
        tokens = batch.weights_T.sum()
        loss.count, loss.metric_count = float(batch.examples or 0), tokens
        loss.metrics = {"ones": tokens.clone(), "twos": 2.0 * tokens}
        loss.largest = {"longest": torch.tensor(float(max(batch.lengths())))}
        return loss

    batches = [replace(batch, examples=len(batch.lengths())) for batch in micro_batches(tiny, pieces)]
    result, _ = run_step(tiny, batches, objective)
    plain, _ = run_step(tiny, micro_batches(tiny, pieces))
    assert result.metrics == {"ones": 1.0, "twos": 2.0, "longest": 60.0}
    assert result.loss == pytest.approx(plain.loss * sum(SUPERVISED) / 8, rel=1e-6)


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_control_arm_mean_of_means_is_off_by_more_than_a_tenth(tiny: SimpleNamespace, pieces: int):
    _, expected = run_step(tiny, micro_batches(tiny, 1))
    model = tiny.Model()
    batches = micro_batches(tiny, pieces)
    for batch in batches:
        loss = cross_entropy(model.hidden(batch, tiny.plain), model.lm_head, batch)
        (loss.sum / loss.count / len(batches)).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - expected[name]).norm() > 0.1 * expected[name].norm(), name


def test_a_micro_batch_without_supervised_tokens_changes_nothing_but_the_token_count(tiny: SimpleNamespace):
    silent = tiny.make_batch([20], [0], seed=99)
    with_it, gradients = run_step(tiny, [*micro_batches(tiny, 2), silent])
    without, expected = run_step(tiny, micro_batches(tiny, 2))
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert (with_it.loss, with_it.supervised_tokens) == (without.loss, without.supervised_tokens)
    assert with_it.tokens == without.tokens + 20


def test_a_step_without_any_supervised_token_is_zero_not_nan(tiny: SimpleNamespace):
    result, gradients = run_step(tiny, [tiny.make_batch([20], [0], seed=1)])
    assert (result.loss, result.grad_norm, result.supervised_tokens) == (0.0, 0.0, 0)
    assert all(g.eq(0).all() for g in gradients.values())


def test_fractional_weights_divide_by_their_sum(tiny: SimpleNamespace):
    batch = tiny.make_batch([20], [20], seed=3)
    expected, _ = run_step(tiny, [batch])
    result, _ = run_step(
        tiny,
        [Batch(batch.tokens_T, batch.targets_T, batch.weights_T * 0.25, batch.positions_T, batch.starts_S)],
    )
    assert result.loss == pytest.approx(expected.loss, rel=1e-6) and result.supervised_tokens == 20


def test_the_learning_rate_is_read_back_and_the_gradients_stay_for_hooks(tiny: SimpleNamespace):
    result, gradients = run_step(tiny, micro_batches(tiny, 1))
    assert result.learning_rate == 1e-3
    norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)


def test_a_nan_loss_stops_before_the_update(tiny: SimpleNamespace):
    model = tiny.Model()
    optimizer = AdamW(model)
    with torch.no_grad():
        model.lm_head.bias[3] = math.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(NonFinite, match="the loss is nan over 82 supervised tokens"):
        train_step(
            model,
            optimizer,
            micro_batches(tiny, 2),
            cross_entropy,
            learning_rate=1e-3,
            max_norm=1.0,
            recompute=tiny.plain,
        )
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def test_an_objective_that_counts_other_tokens_is_refused(tiny: SimpleNamespace):
    def forgets_the_mask(hidden, lm_head, batch) -> Loss:
        loss = cross_entropy(hidden, lm_head, batch)
        return Loss(loss.sum, float(batch.num_tokens), loss.metrics)

    with pytest.raises(ValueError, match=r"counted 151\.0 supervised tokens, the batches' weights say 82"):
        run_step(tiny, micro_batches(tiny, 4), forgets_the_mask)
