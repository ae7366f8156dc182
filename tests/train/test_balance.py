"""Loss-free balancing: direction, and that it acts once per optimizer step under accumulation, recompute and
evaluation (docs/why/trust.md M2)."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from unfreeze import models
from unfreeze.core.errors import ConfigError
from unfreeze.data import Example, pack
from unfreeze.job.watch.balancing import BiasWatch, UnbalancedWatch
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.balance import LossFreeBalance
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import start_or_resume
from unfreeze.train.step import clear_expert_load


def test_bias_moves_by_rate_against_the_load(tiny: SimpleNamespace):
    model = tiny.Model()
    balance = LossFreeBalance(model, rate=0.01)
    balance({0: [10, 0, 4, 2], 1: [4, 4, 4, 4]})  # mean 4: over, under, at, under
    biases = [moe.gate.e_score_correction_bias for moe in model.moe_layers().values()]
    torch.testing.assert_close(biases[0], torch.tensor([-0.01, 0.01, 0.0, 0.01]))
    assert biases[1].eq(0).all() and balance.num_updates == 1
    assert balance.tensors()["balance.0"] is biases[0]


@pytest.mark.parametrize("recompute", ["plain", "recompute"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_update_per_step_from_the_counts_of_all_micro_batches(
    tiny: SimpleNamespace, tmp_path, recompute: str, micro_batches: int
):
    model = tiny.Model()
    balance = LossFreeBalance(model, rate=0.5)
    loads = []

    def evaluate_in_between(state, result) -> None:
        loads.append(result.expert_load)
        for seed in range(3):
            with torch.no_grad():
                model.hidden(tiny.make_batch([50], [50], seed), tiny.plain)

    with Run(tmp_path, {}) as run:
        state = start_or_resume(
            run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 5), after_update=[balance]
        )
        fit(
            state,
            tiny.endless(micro_batches=micro_batches),
            cross_entropy,
            recompute=getattr(tiny, recompute),
            on_step=[evaluate_in_between],
        )
    assert balance.num_updates == 5
    assert [sum(load) for step in loads for load in step.values()] == [
        28 * micro_batches
    ] * 10  # 28 tokens a batch, top-1, 2 layers
    for layer, bias in balance.biases.items():
        expected = sum(
            0.5 * (sum(load[layer]) / 4 - torch.tensor(load[layer], dtype=torch.float64)).sign()
            for load in loads
        )
        assert torch.equal(bias.double(), expected)


def test_control_arm_a_recompute_that_counts_again_is_seen(tiny: SimpleNamespace, tmp_path):
    model = tiny.Model(counts_recompute=True)
    loads = []
    with Run(tmp_path, {}) as run:
        state = start_or_resume(run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 1))
        fit(
            state,
            tiny.endless(),
            cross_entropy,
            recompute=tiny.recompute,
            on_step=[lambda _, result: loads.append(result.expert_load)],
        )
    assert sum(loads[0][0]) != 28


def test_control_arm_evaluation_leaks_where_counts_are_not_cleared(tiny: SimpleNamespace):
    model = tiny.Model()
    model.hidden(tiny.make_batch([50], [50], 0), tiny.plain)
    assert sum(model.moe_layers()[0].counts_E.tolist()) == 50
    clear_expert_load(model)
    assert sum(model.moe_layers()[0].counts_E.tolist()) == 0


def test_it_balances(tiny: SimpleNamespace):
    """A router that sends most tokens to one expert: after 200 updates of 0.01 the largest load is within 1.5
    times the mean."""
    model = tiny.Model(layers=1)
    moe = model.moe_layers()[0]
    batch = tiny.make_batch([400], [400], seed=0)
    with torch.no_grad():
        moe.gate.e_score_correction_bias[2] = 0.5

    def load() -> list[int]:
        clear_expert_load(model)
        with torch.no_grad():
            model.hidden(batch, tiny.plain)
        return model.moe_layers()[0].counts_E.tolist()

    assert max(load()) > 2 * 100
    balance = LossFreeBalance(model, rate=0.01)
    for _ in range(200):
        balance({0: load()})
    assert max(load()) < 1.5 * 100


def test_models_it_cannot_act_on_are_refused(tiny: SimpleNamespace):
    with pytest.raises(ConfigError, match="no router of this model has a selection bias"):
        LossFreeBalance(tiny.Model(layers=0))
    model = tiny.Model()
    model.moe_layers()[1].gate.e_score_correction_bias = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"selection bias of layer 1 is torch\.bfloat16"):
        LossFreeBalance(model)


# ---- the guards


CHAIN = {
    "model_type": "chain_of_experts",
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "inner_iter": 2,
}


def guarded(tmp_path, plant=lambda model: None, steps=6, config=CHAIN, balanced=True, auxiliary=False):
    """Warnings of a run whose bias is looked at every two steps; plant: done to the model before it trains."""
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    documents = [Example([1 + i, 5, 9, 2, 7], [0.0, 1.0, 1.0, 1.0, 1.0]) for i in range(6)]
    changes = [LossFreeBalance(model, 0.01)] if balanced else []
    plant(model)
    with Run(tmp_path, {}) as run:
        state = start_or_resume(
            run, model, optimizer=AdamW(model), schedule=Schedule(1e-3, steps), after_update=changes
        )
        fit(
            state,
            iter([([pack(documents)], {"position": n}) for n in range(1, steps + 1)]),
            cross_entropy,
            recompute=models.plain,
            on_step=[UnbalancedWatch(auxiliary), BiasWatch(steps=2)],
        )
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    return [event["message"] for event in events if event["kind"] == "warning"]


def test_a_bias_that_a_run_moves_raises_no_alarm(tmp_path):
    assert guarded(tmp_path) == []


def test_a_bias_that_stands_still_is_named_once(tmp_path):
    """A buffer that was replaced after the balancer took it: the balancer moves what no router reads."""

    def replaced(model):
        gate = model.moe_layers()[1].gate
        gate.e_score_correction_bias = gate.e_score_correction_bias.clone()

    (warning,) = guarded(tmp_path, replaced)
    assert warning.startswith("expert_bias unchanged for 2 steps in layer 0.1, though the load is uneven")


def test_a_run_without_a_balancer_is_warned_of_but_not_one_with_the_auxiliary_loss(tmp_path):
    (warning, *still) = guarded(tmp_path / "a", balanced=False)
    assert "nothing balances the experts" in warning and "a balance_rate above 0" in warning
    assert still and all("unchanged" in line for line in still)
    greedy = {**CHAIN, "topk_method": "greedy"}
    assert "--experts.balance-loss 0.01" in guarded(tmp_path / "b", config=greedy, balanced=False)[0]
    assert guarded(tmp_path / "c", config=greedy, balanced=False, auxiliary=True) == []
