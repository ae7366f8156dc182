"""The first NaN or infinity is named: module, positions, documents, dtype, and the cause where it can be told
(docs/why/trust.md N1)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.data import Example, pack
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.nonfinite import locate
from unfreeze.train.optim import AdamW, NonFinite
from unfreeze.train.step import train_step

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}


class HalfNorm(nn.Module):
    """The norm of the story: all of it in the model's dtype, where eps 1e-8 is 0."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size, dtype=torch.float16)), eps

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.weight * (x_TD / (x_TD.square().mean(-1, keepdim=True) + self.eps).sqrt())


def decoder(family: str = "llama", dtype: torch.dtype = torch.float32) -> models.Decoder:
    model = models.build(models.shape({**SMALL, **FAMILIES[family]}), dtype=dtype, device="cpu")
    models.initialize(model, 0)
    return model


def batch():
    """Two documents of 3 and 3 tokens; token 0 twice, where nothing is supervised."""
    return pack([Example([5, 6, 7], [0.0, 1.0, 1.0]), Example([0, 0, 9], [0.0, 0.0, 1.0])])


def found(model: models.Decoder, recompute: Any = models.plain, batches: Any = None):
    return locate(model, list(enumerate(batches or [batch()])), cross_entropy, recompute=recompute)


def story(eps: float = 1e-8, norm: type[nn.Module] = HalfNorm) -> models.Decoder:
    model = decoder(dtype=torch.float16)
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
    if norm is HalfNorm:
        model.model.layers[0].input_layernorm = HalfNorm(32, eps)  # type: ignore[union-attr]
    return model


def test_a_zero_row_under_a_half_precision_norm_is_named_in_one_line():
    model = story()
    (only,) = [found(model)]
    assert (
        only is not None
        and only.line
        == "NaN first at model.layers.0.input_layernorm, 2 of 6 positions, 1 of them supervised, float16,"
        " micro-batch 1, document 2; zero rows + eps 1e-08, which is 0 in float16"
    )
    assert (only.module, only.dtype, only.micro_batch, only.documents) == (
        "model.layers.0.input_layernorm",
        "float16",
        0,
        (1,),
    )


def test_nan_at_ignored_positions_only_stops_the_step_though_the_loss_is_finite():
    masked = pack([Example([5, 6, 7], [0.0, 1.0, 1.0]), Example([0, 0, 9], [0.0, 0.0, 0.0])])
    model = story()
    with torch.no_grad():
        assert math.isfinite(float(cross_entropy(model.hidden(masked), model.lm_head, masked).sum))
    with pytest.raises(NonFinite, match=r"the loss is finite, [\d.]+, but 3 hidden states are not"):
        train_step(
            model,
            AdamW(model),
            [masked],
            cross_entropy,
            learning_rate=1e-3,
            max_norm=1.0,
            recompute=models.plain,
        )
    line = found(model, batches=[masked]).line  # type: ignore[union-attr]
    assert "2 of 6 positions, none supervised" in line and "zero rows + eps 1e-08" in line


def test_control_arm_with_the_guard_in_place_there_is_no_nan_and_nothing_is_named():
    """The house norm computes in fp32: zero rows in float16 stay finite. (In bf16, as it trains, their
    gradient 1/sqrt(eps) is finite too.)"""
    model = story(norm=nn.Module)
    for layer in model.layers:
        layer.input_layernorm.eps = 1e-8
    with torch.no_grad():
        assert model.hidden(batch()).isfinite().all()
        assert not story().hidden(batch()).isfinite().all()
    assert found(model.bfloat16()) is None


@pytest.mark.parametrize("recompute", ["nothing", "layers", "selective", "elementwise"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_weight_is_named_in_each_family(family: str, recompute: str):
    model = decoder(family)
    with torch.no_grad():
        model.model.layers[1].post_attention_layernorm.weight[3] = math.nan  # type: ignore[union-attr]
    only = found(model, models.RECOMPUTE[recompute])
    assert (
        only is not None
        and only.line
        == "NaN first at model.layers.1.post_attention_layernorm, 6 of 6 positions, 3 of them supervised,"
        " float32, micro-batch 1, documents 1, 2; 1 of 32 values of its weight are not finite"
    )
    assert found(decoder(family), models.RECOMPUTE[recompute]) is None  # a clean step names nothing


@pytest.mark.parametrize("updated", [True, False])
@pytest.mark.parametrize(
    "place", ["layers.1.post_attention_layernorm", "layers.0.self_attn.q_proj", "embed_tokens"]
)
def test_a_weight_that_no_step_changed_is_the_files(place: str, updated: bool):
    """A frozen one always, a trained one before the first update; also below an adapter."""
    frozen, whole = decoder(), decoder()
    attach(frozen, LoraConfig(rank=1, targets=("attention",)), seed=0)
    for model in (frozen, whole):
        with torch.no_grad():
            model.model.get_submodule(place).weight[3] = math.nan  # type: ignore[index,operator]
        only = locate(
            model, [(0, pack([Example([3, 6, 7], [0.0, 1.0, 1.0])]))], cross_entropy, recompute=models.plain,
            updated=updated,
        )  # fmt: skip
        assert only is not None
        expected = f"model.{place}.weight" if model is frozen or not updated else ""
        assert only.weight == expected, only.line
    # control arm: a module that makes NaN of finite weights
    assert (only := found(story())) is not None and only.weight == ""


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * math.inf


class Bad(nn.Module):
    """A module whose forward is finite and whose backward isn't."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return Explodes.apply(self.inner(x))  # type: ignore[return-value]


@pytest.mark.parametrize("recompute", ["nothing", "layers", "selective"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gradient_that_is_not_finite_is_named_though_forward_is(family: str, recompute: str):
    model = decoder(family)
    model.model.layers[1].input_layernorm = Bad(model.model.layers[1].input_layernorm)  # type: ignore[union-attr]
    only = found(model, models.RECOMPUTE[recompute])
    assert only is not None and only.module == "model.layers.1.input_layernorm.inner"
    assert (
        " first at model.layers.1.input_layernorm.inner, in backward, in the gradient that reaches it, "
        in only.line
    )


def test_an_overflow_is_named_with_its_number_and_the_head_too():
    model = decoder(dtype=torch.float16)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)  # 4 sigma of 0.1 are 4e4: the weights are finite, the logits are not
        assert model.lm_head.weight.isfinite().all()
    line = found(model).line  # type: ignore[union-attr]
    assert line.startswith(
        "infinity first at lm_head, 3 of 3 rows, float16, micro-batch 1; its input is finite, largest "
    )
    assert line.endswith("float16 ends at 6.55e+04, so it overflowed")


def test_between_modules_the_parent_is_named(monkeypatch: pytest.MonkeyPatch):
    inner = PackedPass.attend
    monkeypatch.setattr(
        PackedPass, "attend", lambda self, *given, **named: inner(self, *given, **named) * math.nan
    )
    line = found(decoder()).line  # type: ignore[union-attr]
    assert line.startswith(
        "NaN first at model.layers.0.self_attn, between its modules, before o_proj, 6 of 6 positions"
    )


def test_the_second_micro_batch_and_an_adapter_are_named():
    model = decoder()
    attach(model, LoraConfig(rank=2), seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight[31] = math.inf
    bad = pack([Example([1, 2, 3], [0.0, 1.0, 1.0]), Example([4, 31, 5], [0.0, 1.0, 1.0])])
    only = found(model, batches=[batch(), bad])
    assert only is not None and (only.micro_batch, only.documents) == (1, (1,))
    assert (
        only.line
        == "infinity first at model.embed_tokens, 1 of 6 positions, all supervised, float32, micro-batch 2,"
        " document 2; 32 of 1,024 values of its weight are not finite"
    )


@pytest.mark.parametrize("poison", [False, True])
def test_weights_gradients_counts_and_random_numbers_stay(poison: bool):
    model = decoder("deepseek_v3")
    if poison:
        with torch.no_grad():
            model.model.norm.weight[0] = math.nan
    cross_entropy(model.hidden(batch()), model.lm_head, batch()).sum.backward()
    model.moe_layers()[1].counts_E.fill_(5)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: g.clone() for name, g in gradients.items() if g is not None}
    state = torch.get_rng_state()
    assert (found(model, models.keep_inputs) is not None) == poison
    assert torch.equal(torch.get_rng_state(), state) and model.moe_layers()[1].counts_E.eq(5).all()
    for name, p in model.named_parameters():
        assert (
            torch.equal(p.detach().nan_to_num(9), weights[name].nan_to_num(9)) and p.grad is gradients[name]
        )
        assert p.grad is None or torch.equal(p.grad.nan_to_num(9), values[name].nan_to_num(9))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_it_works_on_the_stand_in_of_the_other_tests(tiny: SimpleNamespace):
    model = tiny.Model()
    with torch.no_grad():
        model.lm_head.bias[3] = math.nan
    only = locate(model, [(0, tiny.make_batch([9], [9], 0))], cross_entropy, recompute=tiny.recompute)
    assert (
        only is not None
        and only.line.startswith("NaN first at lm_head, 9 of 9 positions")
        and "1 of 32 values of its bias" in only.line
    )
