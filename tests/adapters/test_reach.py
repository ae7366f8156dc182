"""What a gradient came to: seen at outputs, in every way through a layer; a zero that is right raises no
alarm."""

from dataclasses import replace

import pytest
import torch

from unfreeze.adapters import LoraConfig, Receipt, attach
from unfreeze.adapters.reach import Reach
from unfreeze.adapters.receipt import check
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step


def adapted(tiny):
    model = tiny.model("deepseek")
    attach(model, LoraConfig(rank=4), seed=0)
    return model


def one_supervised(tiny):
    """The documents with one supervised position in all."""
    batch = tiny.batch(tiny.documents)
    return replace(batch, weights_T=torch.zeros_like(batch.weights_T).index_fill(0, torch.tensor([5]), 1.0))


def exceptions_of(model, batch, recompute="nothing"):
    receipt = Receipt(model)
    optimizer = AdamW(model)
    train_step(
        model,
        optimizer,
        [batch],
        cross_entropy,
        learning_rate=1e-3,
        max_norm=0.0,
        recompute=RECOMPUTE[recompute],
    )
    return receipt.take(None)


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("full", [False, True])
def test_an_expert_of_the_last_layer_with_unsupervised_tokens_only_is_no_exception(tiny, recompute, full):
    """Its output's gradient is zero, so its own has to be. (The tiny model's last layer is its MoE.)"""
    model = tiny.model("deepseek") if full else adapted(tiny)
    taken = exceptions_of(model, one_supervised(tiny), recompute)
    entry = taken.groups["experts"]
    assert (
        taken.exceptions == [] and 0 < entry["sites_reached"] == entry["sites_moved"] < entry["sites"] == 12
    )


def test_control_arm_tokens_counted_whether_supervised_or_not_raise_a_false_alarm(tiny, monkeypatch):
    seen = Reach._experts
    monkeypatch.setattr(
        Reach,
        "_experts",
        lambda self, name, E, x, ids, w, dy: seen(self, name, E, x, ids, w, torch.ones_like(dy)),
    )
    found = exceptions_of(adapted(tiny), one_supervised(tiny)).exceptions
    assert {entry["why"] for entry in found} == {"no gradient"}


@pytest.mark.parametrize("family", ["deepseek", "llama"])
def test_attention_over_one_key_owes_no_gradient_to_queries_and_keys(tiny, family, attention_runs):
    """With the first position supervised alone, the softmax is over one score: its gradient is zero, and so
    is q's and k's, rightly."""
    attention_runs("reference")
    model = tiny.model(family)
    attach(model, LoraConfig(rank=4), seed=0)
    batch = tiny.batch([[3, 4], [5, 6]])
    taken = exceptions_of(model, replace(batch, weights_T=torch.tensor([1.0, 0.0, 1.0, 0.0])))
    assert taken.exceptions == []
    entry = taken.groups["attention"]
    # the backward of its softmax, and that of attention by tiles, leave a rounding, which counts as reached
    assert entry["sites_reached"] < entry["sites"] or family == "llama"


@pytest.mark.parametrize("full", [False, True])
def test_a_pruned_expert_owes_no_gradient_to_its_gate_and_up(tiny, full):
    model = tiny.model("deepseek") if full else adapted(tiny)
    with torch.no_grad():
        model.moe_layers()[1].experts.down_proj.weight[2].zero_()
    taken = exceptions_of(model, tiny.batch(tiny.documents))
    assert taken.exceptions == [] and taken.groups["experts"]["sites_reached"] == 10


PRUNED = {"down": ("down_proj", slice(None)), "gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1)}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("zero", [["gate", "up", "down"], ["gate", "up"], ["gate"], ["up"]], ids="+".join)
def test_an_expert_with_matrices_of_zeros_is_no_exception(tiny, full, zero):
    """Whatever is zero of it: a matrix gets its gradient through the other two."""
    model = tiny.model("deepseek") if full else adapted(tiny)
    experts = model.moe_layers()[1].experts
    with torch.no_grad():
        for part in zero:
            stack, half = PRUNED[part]
            weight = getattr(experts, stack).weight[2]
            (weight if part == "down" else weight.chunk(2)[half]).zero_()
    taken = exceptions_of(model, tiny.batch(tiny.documents))
    assert taken.exceptions == [] and taken.groups["experts"]["sites_reached"] == 12 - (
        3 if len(zero) > 1 else 2
    )


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    "family, name",
    [
        ("llama", "model.layers.1.input_layernorm.weight"),
        ("llama", "model.layers.0.mlp.up_proj.weight"),
        ("deepseek", "model.layers.1.post_attention_layernorm.weight"),
        ("deepseek", "model.layers.0.self_attn.kv_a_layernorm.weight"),
    ],
)
def test_a_matrix_behind_zeros_owes_no_gradient(tiny, family, name, full):
    model = tiny.model(family)
    if not full:
        attach(model, LoraConfig(rank=4), seed=0)
    with torch.no_grad():
        model.get_parameter(name).zero_()
    taken = exceptions_of(model, tiny.batch(tiny.documents))
    assert taken.exceptions == [] and any(
        entry["sites_reached"] < entry["sites"] for entry in taken.groups.values()
    )


def test_a_group_that_nothing_reached_is_not_called_bypassed(tiny):
    model = adapted(tiny)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_a_layernorm.weight.zero_()
    receipt, batch = Receipt(model), tiny.batch(tiny.documents)
    train_step(
        model,
        AdamW(model),
        [batch],
        cross_entropy,
        learning_rate=1e-3,
        max_norm=0.0,
        recompute=RECOMPUTE["nothing"],
    )
    taken = receipt.take(batch)
    assert taken.groups["attention"]["sites_reached"] == 0 and taken.groups["attention"]["connected"] is None
    check(taken)


def test_control_arm_without_a_look_at_inputs_a_matrix_behind_zeros_raises_a_false_alarm(tiny, monkeypatch):
    seen = Reach._whole
    monkeypatch.setattr(Reach, "_whole", lambda self, name, fed, dy: seen(self, name, None, dy))
    model = tiny.model("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.zero_()
    assert {entry["why"] for entry in exceptions_of(model, tiny.batch(tiny.documents)).exceptions} == {
        "no gradient"
    }


def test_what_each_process_saw_is_put_together(tiny):
    """Two processes, each with one document: summed, the second knows what only the first saw."""
    model, batches = adapted(tiny), [tiny.batch([document]) for document in tiny.documents[:2]]
    seen = []
    for batch in batches:
        reach = Reach(model)
        model.zero_grad()
        cross_entropy(model.hidden(batch), model.lm_head, batch).sum.backward()
        reach.close()
        seen.append(reach)
    name = "model.layers.1.mlp.experts"
    apart = [reach.of(name, 4, model.device) for reach in seen]
    sent = []
    seen[0].over_processes(lambda tensors: sent.extend(t.clone() for t in tensors), model.device)
    seen[1].over_processes(
        lambda tensors: [t.add_(other) for t, other in zip(tensors, sent, strict=True)], model.device
    )
    assert torch.equal(seen[1].of(name, 4, model.device), apart[0] | apart[1])
