"""Chain of Experts against loops in float64 written from the formula, and against the mixtures that C = 1 is."""

import json

import pytest
import torch
from chain_case import CHAIN, VARIANTS, Loops, built, weights_of
from family_cases import batch_of
from test_family_files import Kept, opened

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, sites
from unfreeze.checkpoint import save_checkpoint
from unfreeze.core.errors import CheckpointError
from unfreeze.core.layout import RESIDENT
from unfreeze.models.blocks.chain import ChainLayer, InnerChainLayer, again_of
from unfreeze.models.publish import published, stored_dtypes
from unfreeze.parallel.plan import measure_sizes
from unfreeze.parallel.plan.counts import counts
from unfreeze.parallel.plan.fleet import fleet
from unfreeze.parallel.plan.rates import of_device
from unfreeze.parallel.plan.seconds import Step, seconds
from unfreeze.train.balance import LossFreeBalance

DOCUMENTS = [[5, 17, 3, 88, 41, 2, 9], [11, 7], [60, 61, 62, 63]]
each_variant = pytest.mark.parametrize("name", VARIANTS)


def scored(logits_TV):
    probe = torch.randn(CHAIN["vocab_size"], generator=torch.Generator().manual_seed(1))
    return (logits_TV.log_softmax(-1) * probe.to(logits_TV.dtype)).sum() / len(logits_TV)


def gradients(model, recompute=models.plain, documents=DOCUMENTS):
    model.zero_grad()
    logits_TV = model.logits(model.hidden(batch_of(documents), recompute))
    scored(logits_TV).backward()
    return logits_TV.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def in_loops(fields, model):
    """(logits, name -> gradient, weights multiplied per token) of the loops with the model's weights."""
    weights = weights_of(model)
    loops = Loops(fields, weights)
    logits_TV = torch.cat([loops.logits(document) for document in DOCUMENTS])
    scored(logits_TV).backward()
    tokens = sum(map(len, DOCUMENTS))
    return logits_TV.detach(), {name: w.grad for name, w in weights.items()}, loops.products / tokens


def apart(ours, theirs):
    """Largest difference of gradients over the largest gradient, at most of any parameter."""
    return max(
        float((grad - theirs[name]).abs().max() / max(1.0, float(theirs[name].abs().max())))
        for name, grad in ours.items()
    )


@each_variant
def test_logits_and_gradients_are_those_of_loops_in_float64(name):
    model = built(**VARIANTS[name])
    logits, own = gradients(model)
    expected, theirs, _ = in_loops(VARIANTS[name], model)
    assert (logits - expected).abs().max() <= 1e-4 and apart(own, theirs) <= 1e-4


@pytest.mark.parametrize(
    "planted",
    [
        {"use_igate": False},
        {"inner_iter": 2},
        {"inner_norm": False},
        {"inner_norm": False, "outer_residual": False},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_control_another_chain_is_seen(planted):
    model = built()
    expected, _, _ = in_loops(planted, model)
    assert (gradients(model)[0] - expected).abs().max() > 1e-2


@each_variant
def test_recomputed_layers_give_the_same_bits(name):
    model = built(**VARIANTS[name])
    logits, expected = gradients(model)
    for policy in models.RECOMPUTE.values():
        again, own = gradients(model, policy)
        assert torch.equal(again, logits)
        assert all(torch.equal(own[key], expected[key]) for key in expected)


def test_control_a_recomputed_pass_whose_output_nobody_computes_is_seen(monkeypatch):
    """The first pass as a plain MoE: the shared experts' last product is then zeros in the recomputation."""
    from unfreeze.models.blocks.moe import MoE, ReadMoE

    model = built(n_shared_experts=1)
    _, expected = gradients(model)
    monkeypatch.setattr(ReadMoE, "forward", MoE.forward)
    _, own = gradients(model, models.keep_inputs)
    assert apart(own, expected) > 1e-3


QWEN = {"scoring_func": "softmax", "topk_method": "greedy", "use_qk_norm": True}
GLM = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
TWINS = {
    "qwen3_moe": (QWEN, {"num_experts": 8, "norm_topk_prob": True}),
    "glm4_moe": (GLM, {"partial_rotary_factor": 1.0, "n_routed_experts": 8, **GLM}),
}
ONE_PASS = {"norm": {}, "outer residual alone": {"inner_norm": False, "inner_residual": False}}


@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize("form", ONE_PASS)
def test_one_pass_is_the_mixture_of_experts_bit_for_bit(kind, form):
    fields, theirs = TWINS[kind]
    model = built(inner_iter=1, **fields, **ONE_PASS[form])
    shape = models.shape({**CHAIN, **theirs, "model_type": kind})
    twin = models.build(shape, dtype=torch.float32, device="cpu")
    twin.load_state_dict(model.state_dict())
    logits, own = gradients(model, models.selective)
    expected, of_twin = gradients(twin, models.selective)
    assert torch.equal(logits, expected) and own.keys() == of_twin.keys()
    assert all(torch.equal(own[name], of_twin[name]) for name in own)
    # control: with the inner residual, or with two passes, it is not
    for change in ({"inner_norm": False}, {"inner_iter": 2}):
        other = built(**{"inner_iter": 1, **fields, **change})
        other.load_state_dict(model.state_dict(), strict=False)
        assert (gradients(other)[0] - expected).abs().max() > 1e-2


@each_variant
def test_no_attention_across_documents(name):
    model, seen = built(**VARIANTS[name]), {}
    model.model.embed_tokens.register_forward_hook(
        lambda _m, _i, out: seen.setdefault("x", out.detach().requires_grad_())
    )
    hidden = model.hidden(batch_of(DOCUMENTS))
    (gradient,) = torch.autograd.grad(hidden[7:9].square().sum(), seen["x"])
    assert gradient[7:9].abs().max() > 0 and not gradient[:7].any() and not gradient[9:].any()


@each_variant
def test_adapters_of_the_one_pool_get_the_gradients_of_all_passes(name):
    """dA = scale · Bᵀ dW and dB = scale · dW Aᵀ, with dW of the loops at W + scale · B A."""
    model = built(**VARIANTS[name])
    plain = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    attach(model, LoraConfig(rank=4, alpha=8.0, targets=("experts",)), seed=0)
    twin = built(**VARIANTS[name])
    with torch.no_grad():
        for number, site in enumerate(sites(model)):
            generator = torch.Generator().manual_seed(number)
            for key, factor in site.adapter.named_parameters():
                if key.endswith("B"):
                    factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
            f = site.adapter.factors()
            for part, A, B in (("gate_up", f.gate_up_A, f.gate_up_B), ("down", f.down_A, f.down_B)):
                halves = zip(A.chunk(2, 1), B.chunk(2, 1), strict=True) if part == "gate_up" else [(A, B)]
                plain[f"{site.name}.{part}_proj.weight"] += torch.cat([f.scale * b @ a for a, b in halves], 1)
    twin.load_state_dict(plain)
    _, theirs, _ = in_loops(VARIANTS[name], twin)
    for recompute in (models.plain, models.keep_inputs):
        model.zero_grad()
        scored(model.logits(model.hidden(batch_of(DOCUMENTS), recompute))).backward()
        assert len(sites(model)) == len(again_layers(model))
        for site in sites(model):
            factors, grads = site.adapter.factors(), dict(site.adapter.named_parameters())
            dW = theirs[f"{site.name}.down_proj.weight"]
            A, B = (factor.double() for factor in (factors.down_A, factors.down_B))
            expected = {"down_A": factors.scale * B.mT @ dW, "down_B": factors.scale * dW @ A.mT}
            for key, value in expected.items():
                (own,) = (p.grad for full, p in grads.items() if full.endswith(key))
                assert (own - value).abs().max() <= 1e-4 * max(1.0, float(value.detach().abs().max()))
                assert value.abs().max() > 1e-3


def again_layers(model):
    return [layer for layer in model.layers if isinstance(layer, ChainLayer)]


@each_variant
def test_each_pass_counts_its_own_choices(name):
    model = built(**VARIANTS[name])
    gradients(model, models.keep_inputs)  # a recomputation does not count
    tokens, depth, C = sum(map(len, DOCUMENTS)), len(model.layers), model.shape.moe.passes
    moe = model.moe_layers()
    assert list(moe) == sorted(moe) and len(moe) == C * len(again_layers(model)) == len(model.moe_names())
    assert all(int(part.counts_E.sum()) == 2 * tokens for part in moe.values())
    assert model.moe_names()[depth + 1] == "1.1"
    assert not torch.equal(moe[1].counts_E, moe[depth + 1].counts_E)
    with model.looking(), torch.no_grad():
        model.hidden(batch_of(DOCUMENTS))
    assert all(int(part.counts_E.sum()) == 2 * tokens for part in moe.values())


@pytest.mark.parametrize("own", [True, False])
def test_the_bias_moves_by_the_load_of_the_passes_that_share_it(own):
    model = built(inner_iter=2, num_hidden_layers=1, use_igate=own)
    before = {key: moe.gate.e_score_correction_bias.clone() for key, moe in model.moe_layers().items()}
    first, second = [8, 0, 0, 0, 0, 0, 0, 0], [0, 24, 0, 0, 0, 0, 0, 0]
    LossFreeBalance(model, 0.5)({0: first, 1: second})
    moved = {key: (moe.gate.e_score_correction_bias - before[key]) for key, moe in model.moe_layers().items()}
    if own:
        assert torch.allclose(moved[0], torch.tensor([-0.5] + [0.5] * 7))
        assert torch.allclose(moved[1], torch.tensor([0.5, -0.5] + [0.5] * 6))
    else:  # 8, 24, 0, …: the mean is 4
        assert torch.allclose(moved[0], torch.tensor([-0.5, -0.5] + [0.5] * 6))
        assert torch.equal(moved[0], moved[1])


@each_variant
def test_the_plan_counts_the_passes(name):
    fields = VARIANTS[name]
    model = built(**fields)
    _, _, products = in_loops(fields, model)
    counted = counts(model)
    assert counted.active == products
    assert counted.experts_bytes == sum(p.nbytes for key, p in model.named_parameters() if ".experts." in key)
    assert counted.mixtures == len(model.moe_layers())
    extra = sum(moe.counts_E.nbytes + moe.replayed_3.nbytes for moe in model.moe_layers().values())
    assert measure_sizes(model, None).base == sum(t.nbytes for t in model.state_dict().values()) + extra


@each_variant
def test_the_plan_has_the_activations_a_layer_keeps(name):
    model, T = built(**VARIANTS[name]), 1024
    attach(model, LoraConfig(rank=1), seed=0)
    run = model.packed_pass(batch_of([[number % 97 for number in range(128)]] * (T // 128)))
    for layer in again_layers(model):
        x_TD = torch.randn(T, 64).requires_grad_()
        kept = Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept.note, lambda t: t):
            y_TD = layer(x_TD, run)
        held = kept.beyond([*layer.parameters(), *layer.buffers(), x_TD, run.cos_Tr, run.sin_Tr])
        counted = layer.bytes(torch.float32, "cpu")
        shape = counted.attention
        said = counted.held * T
        said += 4 * T * (shape.heads - shape.key_heads) * (shape.width + shape.value_width)
        assert 0.97 <= (held + y_TD.nbytes) / said <= 1.12, (held + y_TD.nbytes) / said


@each_variant
def test_what_is_saved_is_read_again(name, tmp_path):
    model = built(**VARIANTS[name])
    config = {**CHAIN, **VARIANTS[name], "dtype": "float32"}
    save_checkpoint(tmp_path / "model", config, published(model, config))
    again, manifest = opened(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["inner_iter"] == config["inner_iter"]
    assert models.notes(manifest.config) == []
    batch = batch_of(DOCUMENTS)
    assert torch.equal(again.logits(again.hidden(batch)), model.logits(model.hidden(batch)))
    stored = set(stored_dtypes(again, manifest))
    assert {n for n in stored if ".passes." in n} == {n for n in model.state_dict() if ".passes." in n}
    assert len([n for n in stored if "experts.7.down_proj" in n]) == len(again_layers(model))


def test_a_chain_holds_each_weight_once():
    model = built(n_shared_experts=1)
    names = list(model.state_dict())
    assert sum(".experts." in name for name in names) == 2 * 3 and len(model.layers) == 3
    assert all(not name.split("passes.")[-1].startswith(("1.experts", "1.shared")) for name in names)
    assert isinstance(model.layers[0], ChainLayer) and len(again_of(model.layers[0])) == 2
    assert isinstance(built(inner_norm=False).layers[0], InnerChainLayer)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"inner_iter": 0}, "inner_iter"),
        ({"inner_iter": True}, "inner_iter"),
        ({"inner_iter": None}, "inner_iter"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is not built"),
        ({"topk_method": "group_limited_greedy"}, "topk_method"),
        ({"inner_residual": False}, "inner_norm true has one true residual"),
        ({"use_igate": None}, "use_igate is null"),
        ({"n_group": 2}, "n_group 2 is not built"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_field(change, words):
    with pytest.raises(CheckpointError) as caught:
        models.shape({**CHAIN, **change})
    assert words in caught.value.message and caught.value.next


@pytest.mark.parametrize("own", [True, False])
def test_the_plans_seconds_grow_with_the_passes(own):
    """Experts, routers and shared experts C times; attention once; bytes of weights once."""
    fields = {"n_shared_experts": 1, "use_igate": own, "first_k_dense_replace": 1}
    one, three = (counts(built(inner_iter=C, **fields)) for C in (1, 3))
    machine = fleet("1xH100")
    rates = of_device(machine.device)
    times = [seconds(of, machine, rates, RESIDENT, Step(4096, 512, {})).terms for of in (one, three)]
    for term in ("experts", "passes over rows", "routers"):
        assert times[1][term] == pytest.approx(3 * times[0][term])
    assert times[1]["attention"] == times[0]["attention"]
    shared, dense = 3 * 64 * 48, 3 * 64 * 96
    attention = 64 * (64 + 2 * 32 + 64)
    assert one.dense == 3 * attention + dense + 2 * shared
    assert three.dense - one.dense == 2 * 2 * shared
    assert three.experts_bytes == one.experts_bytes and three.expanded == one.expanded
