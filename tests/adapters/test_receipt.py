"""The receipt says what learned; a group that was asked for and did not is an error. Each guard has its bug
planted."""

import json
import re

import pytest
import torch

from unfreeze.adapters import LoraConfig, Receipt, adapter_parameters, attach, output_change, sites
from unfreeze.adapters.reach import Reach
from unfreeze.adapters.receipt import Taken, check, first_tokens, make_receipt, snapshot
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import AdapterError
from unfreeze.data.packing.batches import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.models.recompute import RECOMPUTE, plain
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

pytestmark = pytest.mark.usefixtures("whole_looks")  # what a probe of 256 tokens shows


def first_step(
    tiny,
    model,
    plant_before=None,
    plant_gradients=None,
    plant_after=None,
    learning_rate=1e-3,
    parameters=None,
    decay=0.0,
):
    """One training step with the receipt's calls, as sft makes them."""
    receipt = Receipt(model)
    chosen = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    optimizer = torch.optim.AdamW(chosen, lr=learning_rate, weight_decay=decay)
    batch = tiny.batch(tiny.documents)
    if plant_before:
        plant_before(model)
    logits = model.logits(model.hidden(batch))
    torch.nn.functional.cross_entropy(logits, batch.targets_T).backward()
    if plant_gradients:
        plant_gradients(model)
    optimizer.step()
    if plant_after:
        plant_after(model)
    taken = receipt.take(batch)
    check(taken)
    return taken.groups, model


def nothing_trained_yet(model, probe) -> dict:
    """The receipt of a model as it stands: no gradient, nothing moved."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return make_receipt(model, weights, lambda name: None, snapshot(weights), Reach(model), probe).groups


def adapted(tiny, *targets):
    model = tiny.model("deepseek")
    attach(model, LoraConfig(targets=targets or ("all-linear",), rank=4), seed=0)
    return model


def test_every_trained_group_shows_gradient_movement_effect_and_the_rest_is_frozen(tiny):
    groups, model = first_step(tiny, adapted(tiny))
    assert json.loads(json.dumps(groups, allow_nan=False)) == groups
    assert {name for name, g in groups.items() if g["trained"]} == {
        "attention",
        "mlp",
        "shared_experts",
        "experts",
    }
    for name in ("attention", "mlp", "shared_experts", "experts"):
        entry = groups[name]
        assert entry["grad_norm"] > 0 and entry["moved"] > 0 and entry["output_change"] > 0, name
        matrices = sum(
            (3 * site.owner.num_experts if name == "experts" else 1)
            for site in sites(model)
            if site.group == name
        )
        assert entry["sites_moved"] == entry["sites_reached"] == entry["sites"] == matrices
    for name in ("router", "embeddings", "norms", "lm_head"):
        assert groups[name]["trained"] == 0 and groups[name]["moved"] == 0 and groups[name]["parameters"] > 0
    # independent counts: the oracle's own parameters, and the optimizer's first step (AdamW moves every
    # element with a gradient by ~lr)
    assert sum(g["parameters"] for g in groups.values()) == sum(
        p.numel() for p in tiny.reference("deepseek").parameters()
    )
    assert sum(g["trained"] for g in groups.values()) == sum(p.numel() for _, p in adapter_parameters(model))
    moved = (
        sum(
            p.double().square().sum()
            for n, p in adapter_parameters(model)
            if n.endswith("B") and ".self_attn." in n
        )
        ** 0.5
    )
    assert groups["attention"]["moved"] == pytest.approx(moved.item(), rel=1e-6)


def test_an_untrained_adapter_changes_nothing_on_the_fused_path_either(tiny):
    """Both arms run the same kernels (scale 0, not removed), so rounding of the fused GEMM can't pass for an
    effect."""
    model = adapted(tiny)
    model.moe_layers()[1].experts.impl = "fused"
    groups = nothing_trained_yet(model, tiny.batch(tiny.documents))
    assert all(
        groups[name]["output_change"] == 0 for name in ("attention", "mlp", "shared_experts", "experts")
    )
    groups, _ = first_step(tiny, model)
    assert groups["experts"]["output_change"] > 0


def test_experts_reached_are_those_that_tokens_were_sent_to(tiny):
    model = adapted(tiny, "experts")
    with torch.no_grad():
        # only experts 0 and 1
        model.moe_layers()[1].gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    groups, _ = first_step(tiny, model)
    assert (groups["experts"]["experts"], groups["experts"]["experts_reached"]) == (4, 2)


@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("full", [False, True])
def test_weight_decay_is_no_learning(tiny, decay, full):
    """Decay moves every A, and every weight of an expert no token was sent to: neither counts as reached nor
    as moved."""
    model = tiny.model("deepseek") if full else adapted(tiny, "experts")
    experts = model.moe_layers()[1].experts
    with torch.no_grad():
        model.moe_layers()[1].gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))
    before = {n: p.detach().clone() for n, p in experts.named_parameters() if p.requires_grad}
    groups, _ = first_step(tiny, model, decay=decay)
    assert (groups["experts"]["experts"], groups["experts"]["experts_reached"]) == (4, 2)
    moved = {n: (p - before[n]).detach() for n, p in experts.named_parameters() if n in before}
    counted = [change[:2] for name, change in moved.items() if full or name.endswith("B")]
    assert groups["experts"]["moved"] == pytest.approx(
        sum(c.double().square().sum() for c in counted).item() ** 0.5, rel=1e-4
    )
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
    batch = tiny.batch(tiny.documents)
    model.hidden(batch)
    counts, state = (
        model.moe_layers()[1].counts_E.clone(),
        {n: p.clone() for n, p in model.named_parameters()},
    )
    scales = [site.adapter.scale for site in sites(model)]
    nothing_trained_yet(model, batch)
    assert torch.equal(model.moe_layers()[1].counts_E, counts) and scales == [
        site.adapter.scale for site in sites(model)
    ]
    assert all(torch.equal(p, state[n]) for n, p in model.named_parameters())


def detach_from_forward(model):
    """The silent fault: adapters are there, own parameters, and the forward pass does not use them."""
    for site in sites(model):
        if site.group == "shared_experts":
            site.owner.forward = lambda x, kept=None, w=site.owner.weight: torch.nn.functional.linear(x, w)


def test_an_adapter_the_forward_pass_bypasses_stops_the_run(tiny):
    with pytest.raises(AdapterError, match=r"shared_experts: .*got no gradient"):
        first_step(tiny, adapted(tiny), plant_before=detach_from_forward)
    first_step(tiny, adapted(tiny))  # control: without the bug it passes


def test_an_adapter_that_moves_but_does_not_reach_the_output_stops_the_run(tiny):
    with pytest.raises(AdapterError, match=r"shared_experts: .*the output is the same"):
        first_step(tiny, adapted(tiny), plant_after=detach_from_forward)


def test_parameters_missing_from_the_optimizer_stop_the_run(tiny):
    model = adapted(tiny)
    with pytest.raises(AdapterError, match=r"experts: .*did not move .*missing from the optimizer"):
        first_step(
            tiny, model, parameters=[p for n, p in adapter_parameters(model) if "mlp.experts" not in n]
        )


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


def test_where_the_rate_is_tiny_it_is_named_and_not_a_bypass(tiny):
    """Two rates, the same planted bypass: at a usual one the bypass is the cause."""
    entry = {"trained": 9, "grad_norm": 0.1, "moved": 1e-12, "connected": False}
    taken = Taken({"attention": entry})
    with pytest.raises(AdapterError, match="the learning rate of this step is 1e-12, too small") as error:
        check(taken, 1e-12)
    assert "report it" not in str(error.value) and "--learning-rate" in (error.value.next or "")
    with pytest.raises(AdapterError, match="bypasses these adapters"):
        check(taken, 1e-3)


def test_full_training_is_measured_against_copies(tiny):
    model = tiny.model("deepseek")  # every weight trains
    groups, _ = first_step(tiny, model)
    trained = {name for name, g in groups.items() if g["trained"]}
    assert trained == set(groups) and all(groups[name]["output_change"] > 0 for name in trained)
    assert groups["experts"]["experts_reached"] > 0


def test_weights_too_large_to_copy_are_sampled(tiny):
    model = tiny.model("llama")
    weights = dict(model.named_parameters())
    before = snapshot(weights, copy_bytes=0)
    assert not before.full
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    groups = make_receipt(
        model, weights, lambda name: torch.ones_like(weights[name]), before, Reach(model), None
    ).groups
    exact = (
        sum((p - old[n]).double().square().sum() for n, p in model.named_parameters() if "self_attn" in n)
        ** 0.5
    )
    assert groups["attention"]["moved"] == pytest.approx(exact.item(), rel=1e-4)
    assert groups["attention"]["output_change"] is None


def test_check_accepts_a_frozen_model_and_the_probe_is_at_most_its_length(tiny):
    model = tiny.model("llama").requires_grad_(False)
    check(Taken(nothing_trained_yet(model, None)))
    probe = first_tokens(tiny.batch(tiny.documents), 8)
    assert probe.num_tokens == 8 and probe.lengths() == [7, 1]


def change_of_shared_experts(dtype) -> dict:
    """What a step-sized adapter on the shared experts of tiny-k2 changes, computed in `dtype`."""
    model = open_model(open_checkpoint(TINY_K2), dtype=dtype)
    attach(model, LoraConfig(targets=("shared_experts",), rank=4), seed=0)
    weights = dict(adapter_parameters(model))
    before = snapshot(weights)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter_parameters(model):
        if name.endswith("B"):
            parameter.data = 1e-3 * torch.randn(parameter.shape, generator=generator)
    tokens = torch.randint(3, model.shape.vocab_size, (256,), generator=generator).tolist()
    probe = pack([Example(tokens, [1.0] * 256)])
    return make_receipt(model, weights, lambda name: None, before, Reach(model), probe).groups[
        "shared_experts"
    ]


def test_in_bfloat16_the_change_of_the_output_is_the_adapters_and_not_another_routing():
    exact, rounded = change_of_shared_experts(torch.float32), change_of_shared_experts(torch.bfloat16)
    assert exact["rounding"] < exact["output_change"] / 1000
    # a few roundings a layer, four layers
    assert abs(rounded["output_change"] - exact["output_change"]) <= 8 * rounded["rounding"]


def test_control_arm_routing_chosen_anew_passes_for_an_effect(monkeypatch):
    exact = change_of_shared_experts(torch.float32)
    monkeypatch.setattr(output_change, "_SameExperts", lambda: plain)
    rounded = change_of_shared_experts(torch.bfloat16)
    assert rounded["output_change"] - exact["output_change"] > 8 * rounded["rounding"]


def dead(pattern, experts=slice(None), rows=slice(None)):
    """A fault between backward and update: the gradients of these parameters (of some experts, of some rows)
    are zero."""

    def plant(model):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and re.search(pattern, name) and parameter.grad is not None:
                (parameter.grad[experts, rows] if parameter.grad.dim() == 3 else parameter.grad).zero_()

    return plant


DEAD = {
    r"experts: 4 of 12 matrices got no gradient.*model\.layers\.1\.mlp\.experts\.0-3\.down_proj": dead(
        r"mlp\.experts.*down"
    ),
    r"experts: 6 of 12 matrices .*experts\.0-1\.gate_proj, .*experts\.0-1\.up_proj, .*experts\.0-1\.down_proj": dead(
        r"mlp\.experts", slice(2)
    ),
    r"experts: 12 of 12 matrices got no gradient": dead(r"mlp\.experts"),
    r"attention: 1 of \d+ matrices got no gradient.*They are model\.layers\.1\.self_attn\.q_b_proj\n": dead(
        r"layers\.1.*q_b_proj"
    ),
    r"attention: 1 of \d+ .*experts: 1 of 12 .*q_b_proj, model\.layers\.1\.mlp\.experts\.3\.down_proj\n": lambda model: (
        dead(r"layers\.1.*q_b_proj")(model),
        dead(r"mlp\.experts.*down", slice(3, 4))(model),
    ),
}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("says", DEAD)
def test_every_matrix_left_without_gradient_is_named(tiny, says, full):
    def model():
        return tiny.model("deepseek") if full else adapted(tiny)

    with pytest.raises(AdapterError, match=says):
        first_step(tiny, model(), plant_gradients=DEAD[says])
    first_step(tiny, model())  # control: without the fault nothing is said


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_gate_and_up_are_matrices_of_their_own(tiny, name):
    """The stack of both has one parameter; zero one half of the rows of B (and of A), and only that one is
    named."""

    def plant(model):
        for parameter_name, parameter in model.named_parameters():
            if "mlp.experts.adapter.gate_up" in parameter_name:
                first, second = parameter.grad.chunk(2, dim=1)
                (first if name == "gate_proj" else second).zero_()

    with pytest.raises(
        AdapterError, match=rf"4 of 12 matrices .*They are model\.layers\.1\.mlp\.experts\.0-3\.{name}\n"
    ):
        first_step(tiny, adapted(tiny), plant_gradients=plant)


def full_step_in_bf16(tiny, weights):
    model = tiny.model("deepseek").to(torch.bfloat16)
    optimizer = AdamW(model)
    receipt = Receipt(model, optimizer.masters if weights == "masters" else None, optimizer.gradient)
    train_step(
        model,
        optimizer,
        [tiny.batch(tiny.documents)],
        cross_entropy,
        learning_rate=2e-5,
        max_norm=1.0,
        recompute=RECOMPUTE["nothing"],
    )
    return receipt.take(tiny.batch(tiny.documents))


def test_full_training_in_bfloat16_moves_the_masters_where_the_weights_round_back(tiny):
    """2e-5 beside a norm weight of 1 is lost in bf16 (2^-8), not in its fp32 master."""
    taken = full_step_in_bf16(tiny, "masters")
    check(taken)
    assert taken.exceptions == [] and all(
        g["sites_moved"] == g["sites_reached"] for g in taken.groups.values()
    )
    found = full_step_in_bf16(tiny, "weights").exceptions  # control arm: measured on the weights themselves
    assert {"norms"} <= {entry["group"] for entry in found} and {entry["why"] for entry in found} == {
        "not moved"
    }


def test_hooks_are_gone_when_the_receipt_is_taken(tiny):
    model = adapted(tiny)
    first_step(tiny, model)
    assert not any(module._forward_hooks for module in model.modules())
