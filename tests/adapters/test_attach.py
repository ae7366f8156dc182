"""Where adapters go: targets by group, name and glob; nothing else trains; the output is unchanged."""

import pytest
import torch
from pydantic import ValidationError

from unfreeze import models
from unfreeze.adapters import LoraConfig, adapter_parameters, attach, detach, sites, without_adapters
from unfreeze.core.errors import AdapterError
from unfreeze.models.groups import group_of
from unfreeze.models.targets import parameters_per_rank, per_rank


def attached(tiny, case, *targets, **settings):
    model = tiny.model(case)
    attach(model, LoraConfig(targets=targets, **settings), seed=0)
    return model, {site.name.removeprefix("model.layers."): site for site in sites(model)}


def test_all_linear_is_every_linear_layer_and_the_experts_but_not_head_embedding_router(tiny):
    _, found = attached(tiny, "deepseek", "all-linear")
    attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    mlp = ["gate_proj", "up_proj", "down_proj"]
    assert set(found) == {
        *(f"{layer}.self_attn.{p}" for layer in (0, 1) for p in attention),
        *(f"0.mlp.{p}" for p in mlp),
        *(f"1.mlp.shared_experts.{p}" for p in mlp),
        "1.mlp.experts",
    }


@pytest.mark.parametrize(
    ("target", "group"),
    [("experts", "experts"), ("attention", "attention"), ("mlp", "mlp"), ("shared_experts",) * 2],
)
def test_a_group_name_takes_its_group_only(tiny, target, group):
    _, found = attached(tiny, "deepseek", target)
    assert found and {site.group for site in found.values()} == {group}


def test_globs_names_and_ends_of_names(tiny):
    some = attached(tiny, "deepseek", "*.o_proj", "model.layers.0.mlp.up_proj")[1]
    assert set(some) == {"0.self_attn.o_proj", "1.self_attn.o_proj", "0.mlp.up_proj"}
    assert set(attached(tiny, "llama", "q_proj")[1]) == {"0.self_attn.q_proj", "1.self_attn.q_proj"}
    adapter = attached(tiny, "deepseek", "*.experts.down_proj")[1]["1.mlp.experts"].adapter
    assert adapter.gate_up_A is None and adapter.down_A is not None
    assert set(attached(tiny, "llama", "lm_head")[1]) == {"lm_head"}  # by name only


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("q_prj", "'q_proj'"),
        ("*.q_b_prj", "'*.q_b_proj'"),
        ("expert", "'experts'"),
        ("gate", "no linear layer"),
        ("norm", "no linear layer"),
    ],
)
def test_an_unmatched_target_names_the_nearest(tiny, target, said):
    case = "deepseek" if target != "q_prj" else "llama"
    with pytest.raises(AdapterError, match=r"lora\.targets") as error:
        attach(tiny.model(case), LoraConfig(targets=(target,)), seed=0)
    assert target in str(error.value) and said in str(error.value)


def test_after_commas_the_unmatched_one_is_named_alone(tiny):
    with pytest.raises(AdapterError, match=r"lora\.targets: 'expert' matches none .*'experts'"):
        attach(tiny.model("deepseek"), LoraConfig(targets=("attention,expert",)), seed=0)


def test_a_group_the_model_does_not_have_is_an_error(tiny):
    with pytest.raises(AdapterError, match="this model has attention, mlp"):
        attach(tiny.model("llama"), LoraConfig(targets=("experts",)), seed=0)


@pytest.mark.parametrize("case", ["llama", "qwen2", "deepseek", "qwen3-moe"])
def test_the_initial_output_is_unchanged_to_the_bit(tiny, case):
    model = tiny.model(case)
    before = tiny.logits(model)
    attach(model, LoraConfig(), seed=0)
    assert torch.equal(tiny.logits(model), before)
    tiny.trained(tiny.model(case), LoraConfig())
    with torch.no_grad():  # control: a B that is not zero is seen
        next(p for n, p in adapter_parameters(model) if n.endswith("B")).fill_(0.1)
    assert not torch.equal(tiny.logits(model), before)


def test_only_adapters_train_and_everything_else_is_frozen(tiny):
    model, _ = attached(tiny, "deepseek", "all-linear")
    assert all(p.requires_grad == (".adapter." in n) for n, p in model.named_parameters())
    assert all(p.dtype == torch.float32 for _, p in adapter_parameters(model))


def test_experts_rank_and_rank_stabilised_scale(tiny):
    _, found = attached(
        tiny, "deepseek", "all-linear", rank=4, experts_rank=2, alpha=8.0, scaling="alpha/sqrt(r)"
    )
    assert found["0.self_attn.o_proj"].adapter.rank == 4 and found["0.self_attn.o_proj"].adapter.scale == 4.0
    experts = found["1.mlp.experts"].adapter
    assert (experts.gate_up_rank, experts.down_rank) == (2, 2) and experts.scale == pytest.approx(8 / 2**0.5)


def test_the_same_seed_gives_the_same_factors_whatever_else_is_attached(tiny):
    alone, all_of_it = attached(tiny, "deepseek", "*.o_proj")[1], attached(tiny, "deepseek", "all-linear")[1]
    assert torch.equal(alone["1.self_attn.o_proj"].adapter.A, all_of_it["1.self_attn.o_proj"].adapter.A)


@pytest.mark.parametrize("targets", [("all-linear",), ("experts",), ("*.experts.down_proj", "attention")])
def test_parameters_per_rank_equals_what_attach_makes(tiny, targets):
    model = tiny.model("deepseek")
    dense, experts = parameters_per_rank(model, targets)
    attach(model, LoraConfig(rank=3, experts_rank=5, targets=targets), seed=0)
    assert sum(p.numel() for _, p in adapter_parameters(model)) == 3 * dense + 5 * experts


def test_attaches_to_a_model_on_meta_with_real_factors(tiny):
    model = models.build(models.shape(tiny.reference("deepseek").config.to_dict()), dtype=torch.float32)
    attach(model, LoraConfig(), seed=0)
    assert all(p.device.type == "cpu" for _, p in adapter_parameters(model))


def test_attaching_twice_is_refused_and_detach_undoes(tiny):
    model, _ = attached(tiny, "llama", "all-linear")
    with pytest.raises(AdapterError, match="already carry an adapter"):
        attach(model, LoraConfig(), seed=0)
    detach(model)
    assert not sites(model) and not list(adapter_parameters(model))


def test_config_refuses_what_it_does_not_know():
    for settings in ({"rank": 0}, {"alpha": 0.0}, {"targets": ()}, {"ranks": 4}, {"scaling": "alpha"}):
        with pytest.raises(ValidationError):
            LoraConfig(**settings)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.1.mlp.gate.weight", "router"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("lm_head.weight", "lm_head"),
        ("model.layers.1.self_attn.q_a_layernorm.weight", "norms"),
        ("model.norm.weight", "norms"),
        ("model.embed_tokens.weight", "embeddings"),
        ("model.layers.1.mlp.experts.adapter.gate_up_A", "experts"),
        # names on disk, which inspect counts by
        ("model.layers.1.block_sparse_moe.gate.weight", "router"),
        ("model.layers.1.block_sparse_moe.e_score_correction_bias", "router"),
        ("model.layers.1.block_sparse_moe.experts.0.w2.weight", "experts"),
        ("model.layers.1.block_sparse_moe.input_linear.weight", "experts"),
        ("model.layers.1.feed_forward.router.weight", "router"),
        ("model.layers.1.feed_forward.shared_expert.up_proj.weight", "shared_experts"),
        ("model.layers.1.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.1.moe.gate.per_expert_scale", "router"),
        ("model.layers.1.mlp.shared_experts.up_proj.adapter.A", "shared_experts"),
        ("model.layers.1.self_attn.kv_b_proj.weight", "attention"),
    ],
)
def test_group_of(name, group):
    assert group_of(name) == group


@pytest.mark.parametrize(
    ("name", "targets", "reason"),
    [
        ("llama", "all-linear", "this model has none"),
        ("deepseek", "attention", "the targets attention leave them out"),
    ],
)
def test_a_rank_for_experts_where_none_is_adapted_is_refused(tiny, name, targets, reason):
    config = LoraConfig(rank=2, experts_rank=8, targets=(targets,))
    model = tiny.model(name)
    # the plan asks first
    for refuse in (lambda: per_rank(config, model), lambda: attach(model, config, seed=0)):
        with pytest.raises(
            AdapterError, match=rf"lora.experts_rank = 8, but no routed expert gets an adapter: {reason}"
        ) as error:
            refuse()
        assert "--lora.experts-rank" in error.value.next
    # control: half of the experts' is enough
    attach(tiny.model("deepseek"), config.model_copy(update={"targets": ("*.experts.down_proj",)}), seed=0)


def test_without_adapters_is_the_base_and_afterwards_all_are_back(tiny):
    model, found = attached(tiny, "deepseek", "all-linear")
    with without_adapters(model):
        assert not sites(model)
    assert {site.name: id(site.adapter) for site in sites(model)} == {
        site.name: id(site.adapter) for site in found.values()
    }
    with pytest.raises(ZeroDivisionError), without_adapters(model):
        raise ZeroDivisionError
    assert len(sites(model)) == len(found)
