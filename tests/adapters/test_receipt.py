"""The receipt says what learned; a group that was asked for and did not is an error. Each guard has its bug planted."""

import json

import pytest
import torch

from unfreeze.adapters import LoraConfig, Receipt, adapter_parameters, attach, receipt, sites
from unfreeze.adapters.receipt import Gradients, check, first_tokens, make_receipt, snapshot
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import AdapterError
from unfreeze.data.packing import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.models.decoder import plain
from unfreeze.recipes.demo import TINY_K2


def first_step(tiny, model, plant_before=None, plant_after=None, learning_rate=1e-3, parameters=None, decay=0.0):
    """One training step with the receipt's calls, as sft makes them."""
    receipt = Receipt(model)
    chosen = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    optimizer = torch.optim.AdamW(chosen, lr=learning_rate, weight_decay=decay)
    batch = tiny.batch(tiny.documents)
    if plant_before:
        plant_before(model)
    logits = model.logits(model.hidden(batch))
    torch.nn.functional.cross_entropy(logits, batch.targets_T).backward()
    receipt.after_backward(model)
    optimizer.step()
    if plant_after:
        plant_after(model)
    return receipt.after_update(model, batch), model


def adapted(tiny, *targets):
    model = tiny.model("deepseek")
    attach(model, LoraConfig(targets=targets or ("all-linear",), rank=4), seed=0)
    return model


def test_every_trained_group_shows_gradient_movement_effect_and_the_rest_is_frozen(tiny):
    groups, model = first_step(tiny, adapted(tiny))
    assert json.loads(json.dumps(groups, allow_nan=False)) == groups
    assert {name for name, g in groups.items() if g["trained"]} == {"attention", "mlp", "shared_experts", "experts"}
    for name in ("attention", "mlp", "shared_experts", "experts"):
        entry = groups[name]
        assert entry["grad_norm"] > 0 and entry["moved"] > 0 and entry["output_change"] > 0, name
        assert entry["sites_moved"] == entry["sites"] == sum(site.group == name for site in sites(model))
    for name in ("router", "embeddings", "norms", "lm_head"):
        assert groups[name]["trained"] == 0 and groups[name]["moved"] == 0 and groups[name]["parameters"] > 0
    # independent counts: the oracle's own parameters, and the optimizer's first step (AdamW moves every element with a gradient by ~lr)
    assert sum(g["parameters"] for g in groups.values()) == sum(p.numel() for p in tiny.reference("deepseek").parameters())
    assert sum(g["trained"] for g in groups.values()) == sum(p.numel() for _, p in adapter_parameters(model))
    moved = sum(p.double().square().sum() for n, p in adapter_parameters(model) if n.endswith("B") and ".self_attn." in n) ** 0.5
    assert groups["attention"]["moved"] == pytest.approx(moved.item(), rel=1e-6)


def test_an_untrained_adapter_changes_nothing_on_the_fused_path_either(tiny):
    """Both arms run the same kernels (scale 0, not removed), so rounding of the fused GEMM can't pass for an effect."""
    model = adapted(tiny)
    model.moe_layers()[1].experts.impl = "fused"
    groups = make_receipt(model, snapshot(model), Gradients(), tiny.batch(tiny.documents))
    assert all(groups[name]["output_change"] == 0 for name in ("attention", "mlp", "shared_experts", "experts"))
    groups, _ = first_step(tiny, model)
    assert groups["experts"]["output_change"] > 0


def test_experts_reached_are_those_that_tokens_were_sent_to(tiny):
    model = adapted(tiny, "experts")
    with torch.no_grad():
        model.moe_layers()[1].gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))  # only experts 0 and 1
    groups, _ = first_step(tiny, model)
    assert (groups["experts"]["experts"], groups["experts"]["experts_reached"]) == (4, 2)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("full", [False, True])
def test_weight_decay_is_no_learning(tiny, decay, full):
    """Decay moves every A, and every weight of an expert no token was sent to: neither counts as reached nor as moved."""
    model = tiny.model("deepseek") if full else adapted(tiny, "experts")
    experts = model.moe_layers()[1].experts
    with torch.no_grad():
        model.moe_layers()[1].gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    before = {n: p.detach().clone() for n, p in experts.named_parameters() if p.requires_grad}
    groups, _ = first_step(tiny, model, decay=decay)
    assert (groups["experts"]["experts"], groups["experts"]["experts_reached"]) == (4, 2)
    moved = {n: (p - before[n]).detach() for n, p in experts.named_parameters() if n in before}
    counted = [change[:2] for name, change in moved.items() if full or name.endswith("B")]
    assert groups["experts"]["moved"] == pytest.approx(sum(c.double().square().sum() for c in counted).item() ** 0.5, rel=1e-4)
    # control: with decay the others did move, so counting what moved would have said 4 of 4
    assert any(change[2:].any() for change in moved.values()) == (decay > 0)


def test_parameters_that_only_decay_stop_the_run(tiny):
    """The planted fault: an update that forgot the gradients of the experts but decays them."""
    model = adapted(tiny)
    B = [p for n, p in adapter_parameters(model) if "mlp.experts" in n and n.endswith("B")]

    def undo(_):
        with torch.no_grad():
            for parameter in B:
                parameter.zero_()

    with pytest.raises(AdapterError, match=r"experts: .*did not move"):
        first_step(tiny, model, plant_after=undo, decay=0.5)
    first_step(tiny, adapted(tiny), decay=0.5)  # control


def test_the_probe_leaves_weights_scales_and_expert_counts_as_they_were(tiny):
    model = adapted(tiny)
    before = snapshot(model)
    batch = tiny.batch(tiny.documents)
    model.hidden(batch)
    counts, state = model.moe_layers()[1].counts_E.clone(), {n: p.clone() for n, p in model.named_parameters()}
    scales = [site.adapter.scale for site in sites(model)]
    make_receipt(model, before, Gradients(), batch)
    assert torch.equal(model.moe_layers()[1].counts_E, counts) and scales == [site.adapter.scale for site in sites(model)]
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())


def detach_from_forward(model):
    """The silent fault: adapters are there, own parameters, and the forward pass does not use them."""
    for site in sites(model):
        if site.group == "shared_experts":
            site.owner.forward = lambda x, kept=None, w=site.owner.weight: torch.nn.functional.linear(x, w)


def test_an_adapter_the_forward_pass_bypasses_stops_the_run(tiny):
    with pytest.raises(AdapterError, match=r"shared_experts: .*no gradient arrived"):
        first_step(tiny, adapted(tiny), plant_before=detach_from_forward)
    first_step(tiny, adapted(tiny))  # control: without the bug it passes


def test_an_adapter_that_moves_but_does_not_reach_the_output_stops_the_run(tiny):
    with pytest.raises(AdapterError, match=r"shared_experts: .*the output is the same"):
        first_step(tiny, adapted(tiny), plant_after=detach_from_forward)


def test_parameters_missing_from_the_optimizer_stop_the_run(tiny):
    model = adapted(tiny)
    with pytest.raises(AdapterError, match=r"experts: .*did not move .*missing from the optimizer"):
        first_step(tiny, model, parameters=[p for n, p in adapter_parameters(model) if "mlp.experts" not in n])


def test_learning_rate_zero_and_a_gradient_that_is_not_finite_stop_the_run(tiny):
    with pytest.raises(AdapterError, match="did not move"):
        first_step(tiny, adapted(tiny), learning_rate=0.0)
    model = adapted(tiny)
    next(p for n, p in adapter_parameters(model) if n.endswith("B")).register_hook(lambda g: g * float("nan"))
    with pytest.raises(AdapterError, match="not finite"):
        first_step(tiny, model)


def test_a_step_too_small_to_show_in_bf16_is_not_taken_for_a_missing_connection(tiny):
    model = adapted(tiny, "attention").to(torch.bfloat16)
    for site in sites(model):
        site.adapter.float()
    groups, _ = first_step(tiny, model, learning_rate=1e-9)
    assert groups["attention"]["output_change"] == 0 and groups["attention"]["connected"]


def test_full_training_is_measured_against_copies(tiny):
    model = tiny.model("deepseek")  # every weight trains
    groups, _ = first_step(tiny, model)
    trained = {name for name, g in groups.items() if g["trained"]}
    assert trained == set(groups) and all(groups[name]["output_change"] > 0 for name in trained)
    assert groups["experts"]["experts_reached"] > 0


def test_weights_too_large_to_copy_are_sampled(tiny):
    model = tiny.model("llama")
    before = snapshot(model, copy_bytes=0)
    assert not before.full
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    groups = make_receipt(model, before, Gradients(), None)
    exact = sum((p - old[n]).double().square().sum() for n, p in model.named_parameters() if "self_attn" in n) ** 0.5
    assert groups["attention"]["moved"] == pytest.approx(exact.item(), rel=1e-4)
    assert groups["attention"]["output_change"] is None


def test_check_accepts_a_frozen_model_and_the_probe_is_at_most_its_length(tiny):
    model = tiny.model("llama").requires_grad_(False)
    check(make_receipt(model, snapshot(model), Gradients(), None))
    probe = first_tokens(tiny.batch(tiny.documents), 8)
    assert probe.num_tokens == 8 and probe.lengths() == [7, 1]


def change_of_shared_experts(dtype) -> dict:
    """What a step-sized adapter on the shared experts of tiny-k2 changes, computed in `dtype`."""
    model = open_model(open_checkpoint(TINY_K2), dtype=dtype)
    attach(model, LoraConfig(targets=("shared_experts",), rank=4), seed=0)
    before = snapshot(model)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter_parameters(model):
        if name.endswith("B"):
            parameter.data = 1e-3 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(3, model.shape.vocab_size, (256,), generator=generator).tolist()
    return make_receipt(model, before, Gradients(), pack([Example(tokens, [1.0] * 256)]))["shared_experts"]


def test_in_bfloat16_the_change_of_the_output_is_the_adapters_and_not_another_routing():
    exact, rounded = change_of_shared_experts(torch.float32), change_of_shared_experts(torch.bfloat16)
    assert exact["rounding"] < exact["output_change"] / 1000
    assert abs(rounded["output_change"] - exact["output_change"]) <= 8 * rounded["rounding"]  # a few roundings a layer, four layers


def test_control_arm_routing_chosen_anew_passes_for_an_effect(monkeypatch):
    exact = change_of_shared_experts(torch.float32)
    monkeypatch.setattr(receipt, "_SameExperts", lambda: plain)
    rounded = change_of_shared_experts(torch.bfloat16)
    assert rounded["output_change"] - exact["output_change"] > 8 * rounded["rounding"]
