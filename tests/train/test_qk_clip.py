"""qk-clip: heads above the limit come back to it, by a formula checked in float64; others keep their bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unfreeze import models
from unfreeze.core.errors import ConfigError
from unfreeze.core.taps import Tap
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.matrices import hidden_matrices
from unfreeze.models.queries import scalable
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.train import qk_clip
from unfreeze.train.muon import Muon
from unfreeze.train.optim import AdamW
from unfreeze.train.qk_clip import LargestLogits, QkClip
from unfreeze.train.step import forward_backward

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import test_collectives as small

LIMIT = 5.0
SHAPES = {
    "heads": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4},
    "grouped": {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2},  # biases too
    "fused": {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 4},
    "latent": {},
}
COMMON = (
    "vocab_size hidden_size num_hidden_layers intermediate_size rms_norm_eps rope_theta max_position_embeddings"
    " initializer_range"
).split()
HUGE = 1  # the head that is planted


def build(kind: str, dtype: torch.dtype = torch.float32) -> models.Decoder:
    config = small.CONFIG if kind == "latent" else {n: small.CONFIG[n] for n in COMMON} | SHAPES[kind]
    model = models.build(models.shape(config), dtype=dtype, device="cpu")
    models.initialize(model, 0)
    with torch.no_grad():
        attention = model.layers[0].attention
        heads = attention.num_heads if kind == "latent" else 4
        last = {"latent": "q_b_proj", "fused": "qkv_proj"}.get(kind, "q_proj")
        linear = getattr(attention, last)
        rows = attention.nope + attention.rope if kind == "latent" else attention.head_dim
        linear.weight[HUGE * rows : (HUGE + 1) * rows] *= 400  # of `heads`
        assert linear.weight.shape[0] >= heads * rows
    return model


def logits(model: models.Decoder) -> Tensor:
    """[H], the largest of the first layer, whose input no clip changes."""
    tap, largest = Tap(0, "logit"), []
    for batch in small.cut(4, True):
        taps = Taps({tap})
        with torch.no_grad():
            model.hidden(batch, taps=taps)
        largest.append(taps.found[tap].amax(0))
    return torch.stack(largest).amax(0)


def clipped(model: models.Decoder, policy: str = "nothing", limit: float = LIMIT) -> LargestLogits:
    """A step without an update, so that the same logits can be measured again."""
    watch = LargestLogits(cross_entropy, list(scalable(model)))
    optimizer = Muon(model, hidden_matrices(model))
    recompute = models.recompute_policy(policy, model.layers)
    gradients = forward_backward(model, optimizer, small.cut(4, True), watch, recompute=recompute)
    assert gradients.metrics["largest_logit"] >= float(logits(model).max()) * (1 - 1e-5)
    QkClip(model, optimizer, watch, limit, ALONE)({})
    return watch


@pytest.mark.parametrize("kind", SHAPES)
def test_the_planted_head_comes_to_the_limit_and_others_keep_their_logits_to_the_bit(kind: str):
    model = build(kind)
    before = logits(model)
    assert before[HUGE] > 10 * LIMIT and (before < LIMIT).sum() == len(before) - 1
    clipped(model)
    after = logits(model)
    assert float(after[HUGE]) == pytest.approx(LIMIT, rel=1e-4)
    others = torch.arange(len(before)) != HUGE
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("kind", SHAPES)
def test_the_weights_are_those_of_the_formula_in_float64(kind: str):
    """Rows of other heads, and every other parameter, keep their bits."""
    model, was = build(kind), build(kind)
    factor = LIMIT / float(logits(model)[HUGE].double())
    clipped(model)
    attention, name = model.layers[0].attention, "model.layers.0.self_attn."
    own = slice(HUGE * 8, HUGE * 8 + 8)  # every head is 8 wide here
    if kind == "latent":
        root, whole = slice(HUGE * 16, HUGE * 16 + 8), slice(HUGE * 16 + 8, HUGE * 16 + 16)
        expected = {
            "q_b_proj.weight": [(root, factor**0.5), (whole, factor)],
            "kv_b_proj.weight": [(root, factor**0.5)],
        }
        assert (attention.nope, attention.rope, attention.value) == (8, 8, 8)
    elif kind == "grouped":
        expected = {"q_proj.weight": [(own, factor)], "q_proj.bias": [(own, factor)]}
    elif kind == "fused":
        keys = slice(32 + own.start, 32 + own.stop)
        expected = {"qkv_proj.weight": [(own, factor**0.5), (keys, factor**0.5)]}
    else:
        expected = {f"{side}_proj.weight": [(own, factor**0.5)] for side in "qk"}
    for parameter, value in model.named_parameters():
        exact = was.get_parameter(parameter).detach().double().clone()
        for rows, by in expected.get(parameter.removeprefix(name), []):
            exact[rows] *= by
            torch.testing.assert_close(value.detach()[rows].double(), exact[rows], rtol=1e-5, atol=0)
            exact[rows] = value.detach()[rows].double()
        assert torch.equal(value.detach().double(), exact), parameter


def test_control_arms_all_of_the_factor_on_both_sides_and_a_limit_above_all(monkeypatch: pytest.MonkeyPatch):
    model, was = build("heads"), build("heads")
    before = float(logits(model)[HUGE])
    clipped(model, limit=2 * before)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), was.parameters(), strict=True))

    def both(factor_H: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(("q_proj", "k_proj"), factor_H.repeat_interleave(8))

    monkeypatch.setattr(qk_clip, "scalable", lambda model: {0: both, 1: lambda factor_H: {}})
    clipped(model)
    assert float(logits(model)[HUGE]) == pytest.approx(LIMIT**2 / before, rel=1e-4)


@pytest.mark.parametrize("policy", ["layers", "selective", "elementwise"])
def test_every_recompute_policy_clips_the_same_to_the_bit(policy: str):
    plain, other = build("latent"), build("latent")
    clipped(plain)
    clipped(other, policy)
    for (name, p), q in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7), name


def test_loss_and_gradients_are_the_objectives_own_and_held_out_logits_do_not_count():
    model, bare = build("heads"), build("heads")
    recompute = models.recompute_policy("nothing", model.layers)
    watch = LargestLogits(cross_entropy, list(scalable(model)))
    watched = forward_backward(model, AdamW(model), small.cut(4, True), watch, recompute=recompute)
    own = forward_backward(bare, AdamW(bare), small.cut(4, True), cross_entropy, recompute=recompute)
    assert watched.loss == own.loss and watched.norm == own.norm
    assert watch.take(ALONE).keys() == {0, 1} and watch.take(ALONE) == {}
    with torch.no_grad():
        batch, taps = small.cut(4, True)[0], Taps(watch.taps)
        watch(model.hidden(batch, taps=taps), model.lm_head, batch, taps.found)
    assert watch.take(ALONE) == {}


def test_half_precision_weights_follow_their_masters():
    model = build("heads", torch.bfloat16)
    watch = LargestLogits(cross_entropy, list(scalable(model)))
    optimizer = Muon(model, hidden_matrices(model))
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    recompute = models.recompute_policy("nothing", model.layers)
    forward_backward(model, optimizer, small.cut(4, True), watch, recompute=recompute)
    QkClip(model, optimizer, watch, LIMIT, ALONE)({})
    name = "model.layers.0.self_attn.q_proj.weight"
    master = optimizer.masters[name]
    assert not torch.equal(master, before[name]) and torch.equal(model.get_parameter(name), master.bfloat16())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model_type": "qwen3", "head_dim": 8}, "layer 1 norms its queries and keys"),
        ({"model_type": "olmo2"}, "layer 1 norms its queries and keys"),
        (
            {"model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
            "caps its logits",
        ),
    ],
)
def test_a_model_whose_scale_has_no_effect_is_refused(more: dict, said: str):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    gemma = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    config = (
        {n: small.CONFIG[n] for n in COMMON} | heads | (gemma if "gemma" in more["model_type"] else {}) | more
    )
    model = models.build(models.shape(config), dtype=torch.float32, device="meta")
    with pytest.raises(ConfigError, match=said):
        scalable(model)
