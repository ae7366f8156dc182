"""The load of experts in a study's table: means over layers and the last tenth of the steps."""

from unfreeze.commands.lab_runs import _load


def event(step, *layers):
    balance = {str(i): {"max_violation": v, "entropy": 0.9, "dead": d} for i, (v, d) in enumerate(layers)}
    return {"kind": "train", "step": step, **({"expert_balance": balance} if layers else {})}


def test_only_the_last_steps_count():
    events = [event(step, (9.0, 5), (9.0, 5)) for step in range(18)] + [event(18, (0.5, 0), (1.5, 1))] * 2
    assert _load(events) == {"MaxVio": 1.0, "dead experts": 0.5}
    assert _load(events[:18]) == {"MaxVio": 9.0, "dead experts": 5.0}


def test_a_model_without_experts_and_a_layer_without_tokens_have_none():
    assert _load([event(1)]) == {} == _load([])
    assert _load([event(1, (None, 0))]) == {}
    assert _load([event(1, (None, 0), (2.0, 3))]) == {"MaxVio": 2.0, "dead experts": 3.0}
