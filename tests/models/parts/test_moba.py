"""A model of blocks: full attention where all are seen, documents apart, nothing from the future, the same bits when
recomputed, a gate that learns, and what the part refuses."""

import copy

import pytest
import torch
from family_cases import batch_of
from moba_case import FAMILIES, GATES, built, config, moba

from unfreeze import models
from unfreeze.core.errors import CheckpointError
from unfreeze.core.taps import Tap
from unfreeze.models.blocks.moba import LowRankGate, MeanGate
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.indexers import indexers, mixtures_of_blocks, train_indexers, trained_indexers
from unfreeze.objectives.following import Following

LENGTHS = (40, 7, 70, 24, 33)  # two of at most 24 = chosen · block
each_gate = pytest.mark.parametrize("gate", GATES)
each_family = pytest.mark.parametrize("family", FAMILIES)


def documents(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def part_of(family, gate="mean", **options):
    at = "layers.0.self_attn" if family == "qwen3_next" else "layers.*.self_attn"
    return moba(at, **GATES[gate], **options)


def full_of(family):
    return {"at": part_of(family)["at"], "part": "full"}


def gradients(model, policy=models.plain, given=None):
    model.zero_grad()
    logits_TV = model.logits(model.hidden(batch_of(given or documents()), policy))
    probe = torch.randn(97, generator=torch.Generator().manual_seed(1)).to(logits_TV.dtype)
    (logits_TV.log_softmax(-1) * probe).mean(0).sum().backward()
    return logits_TV.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@each_family
def test_as_many_blocks_as_there_are_is_full_attention(family):
    model, twin = built(family, part_of(family, chosen=9)), built(family, full_of(family))
    twin.load_state_dict(model.state_dict())
    logits, own = gradients(model)
    expected, theirs = gradients(twin)
    assert own.keys() == theirs.keys() and (logits - expected).abs().max() <= 1e-5
    for name, gradient in own.items():
        assert (gradient - theirs[name]).abs().max() <= 1e-5 * max(1.0, float(theirs[name].abs().max()))
    # control: with three of nine it is another function, but for documents of three blocks
    fewer = built(family, part_of(family))
    fewer.load_state_dict(model.state_dict())
    apart_T = (gradients(fewer)[0] - expected).abs().amax(1)
    first = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for begin, length in zip(first[:-1], LENGTHS, strict=True):
        of_document = apart_T[begin : begin + length]
        assert of_document[:24].max() <= 1e-5 and (length <= 24 or of_document[24:].max() > 1e-3)


@each_gate
@pytest.mark.parametrize("policy", models.RECOMPUTE)
def test_recomputed_layers_give_the_same_bits(gate, policy):
    model = built("qwen3", moba(**GATES[gate]))
    logits, expected = gradients(model)
    again, own = gradients(model, models.RECOMPUTE[policy])
    assert torch.equal(again, logits)
    assert all(torch.equal(own[name], expected[name]) for name in expected)


@each_gate
def test_nothing_comes_from_the_future_or_from_another_document(gate):
    model, seen = built("llama", moba(**GATES[gate])), {}
    model.model.embed_tokens.register_forward_hook(
        lambda _m, _i, out: seen.setdefault("x", out.detach().requires_grad_())
    )
    hidden = model.hidden(batch_of(documents()))
    for token in (47 + 30, 47 + 69):
        (gradient,) = torch.autograd.grad(hidden[token].square().sum(), seen["x"], retain_graph=True)
        assert gradient[token].any() and not gradient[token + 1 :].any() and not gradient[:47].any()


@each_gate
def test_a_document_is_what_it_is_alone(gate):
    model = built("llama", moba(**GATES[gate])).requires_grad_(False)
    together = model.logits(model.hidden(batch_of(documents())))
    for document, logits in zip(documents(), together.split(LENGTHS), strict=True):
        alone = model.logits(model.hidden(batch_of([document])))
        assert (alone - logits).abs().max() <= 1e-5


def test_bfloat16_trains():
    model = built("llama", moba(), dtype=torch.bfloat16)
    logits, own = gradients(model)
    assert logits.isfinite().all() and all(g.isfinite().all() and g.any() for g in own.values())


# ---- the learned gate


def test_a_gate_of_full_rank_begins_as_the_mean():
    mean = built("llama", moba())
    low = built("llama", moba(gate="low_rank", rank=16))
    low.load_state_dict(mean.state_dict(), strict=False)
    half = built("llama", moba(gate="low_rank", rank=4))
    half.load_state_dict(mean.state_dict(), strict=False)
    expected = gradients(mean)[0]
    assert (gradients(low)[0] - expected).abs().max() <= 1e-5
    assert (gradients(half)[0] - expected).abs().max() > 1e-3  # control: a projection chooses otherwise


def test_names_sizes_and_groups_of_the_gates_parameters():
    from unfreeze.models.groups import group_of

    model = built("llama", moba(gate="low_rank", rank=8))
    own = {name: tuple(p.shape) for name, p in model.named_parameters() if "indexer" in name}
    assert own == {
        f"model.layers.{layer}.self_attn.blocks.indexer.{name}.weight": shape
        for layer in range(2)
        for name, shape in {"gate_q": (4, 8, 16), "gate_k": (2, 8, 48)}.items()
    }
    assert {group_of(name) for name in own} == {"indexer"}
    assert not any("indexer" in name for name, _ in built("llama", moba()).named_parameters())


def test_the_gate_is_frozen_until_it_is_to_train():
    model = built("llama", moba(gate="low_rank"))
    assert trained_indexers(model) == [] and sorted(indexers(model)) == [0, 1]
    assert not any("indexer" in name for name in gradients(model)[1])
    train_indexers(model)
    assert trained_indexers(model) == [0, 1]


def divergences(model, policy=models.plain):
    """Loss of the gates, gradients of all parameters."""
    model.zero_grad()
    taps = Taps([Tap(layer, "divergence") for layer in (0, 1)])
    model.hidden(batch_of(documents()), policy, taps=taps)
    total = torch.stack([taps.found[tap].mean() for tap in sorted(taps.asked)]).sum()
    total.backward()
    return total.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("policy", ["layers", "selective", "elementwise"])
def test_the_gates_loss_reaches_the_gates_alone_whatever_is_recomputed(policy):
    model = built("llama", moba(gate="low_rank", rank=4))
    train_indexers(model)
    loss, own = divergences(model)
    assert loss > 0 and {name for name, g in own.items() if g.any()} == {n for n in own if "indexer" in n}
    again, theirs = divergences(model, models.RECOMPUTE[policy])
    assert torch.equal(again, loss)
    assert all(torch.equal(theirs[name], own[name]) for name in own if "indexer" in name)


def test_following_reports_the_gates_divergence():
    """The objective of a run whose gates train (training.indexer)."""
    from unfreeze.objectives.cross_entropy import cross_entropy

    model = built("llama", moba(gate="low_rank"))
    train_indexers(model)
    objective = Following(cross_entropy, trained_indexers(model))
    assert objective.own == [Tap(0, "divergence"), Tap(1, "divergence")]


# ---- what is refused


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"base_model_type": "gemma2", "query_pre_attn_scalar": 16}, "no softcap"),
        (
            {"base_model_type": "deepseek_v3", "kv_lora_rank": 16, "qk_nope_head_dim": 8},
            "attention of q, k and v",
        ),
    ],
)
def test_an_attention_that_cannot_choose_is_refused_in_one_line(fields, says):
    latent = {"q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4}
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
    experts |= {"num_key_value_heads": 4, "head_dim": 8}
    with pytest.raises(CheckpointError, match=says):
        built("llama", moba(), **{**latent, **experts, **fields})


@pytest.mark.parametrize("options", [{"block": 0}, {"chosen": 0}, {"gate": "best"}, {"rank": 0}, {"top": 3}])
def test_an_option_that_cannot_be_is_refused(options):
    with pytest.raises(CheckpointError, match=f"moba(.| has no option '){next(iter(options))}"):
        models.shape(config("llama", moba(**options)))


def gates(model):
    return [(layer, part.indexer) for layer, part in mixtures_of_blocks(model).items()]


def test_gates_are_of_the_class_that_was_asked_for():
    assert all(isinstance(gate, MeanGate) for _, gate in gates(built("llama", moba())))
    model = built("llama", moba("layers.1.self_attn", gate="low_rank"))
    assert [(layer, type(gate)) for layer, gate in gates(model)] == [(1, LowRankGate)]
    assert copy.deepcopy(model) is not model
