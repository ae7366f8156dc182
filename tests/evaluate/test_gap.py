"""Trainer and sampler agree on log-probabilities to 1e-4 in float32, for attention with groups, with experts,
and latent; faults are seen."""

from __future__ import annotations

import pytest
import torch

from unfreeze import models
from unfreeze.core.errors import ConfigError
from unfreeze.evaluate.gap import TOLERANCE, answer_log_probs, gap_of, log_probability_gap
from unfreeze.generate.answer import Completion
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import launched
from unfreeze.models.blocks.routers import Router

SMALL = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.25,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
    },
}
PROMPTS = [[3, 17, 42, 8, 60, 11, 5], [70, 2], list(range(20, 51))]
SAMPLING = Sampling(max_new_tokens=64, temperature=1.0, seed=0)


def build(family: str) -> models.Decoder:
    model = models.build(models.shape({**SMALL, **FAMILIES[family]}), dtype=torch.float32, device="cpu")
    models.initialize(model, 1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_trainer_agree(family: str):
    model = build(family)
    gap = log_probability_gap(Engine(model), PROMPTS, SAMPLING)
    assert 0 < gap.mean <= gap.max <= TOLERANCE and gap.tokens == 3 * 64
    assert gap.as_dict() == {
        "logprob_gap_mean": gap.mean,
        "logprob_gap_max": gap.max,
        "logprob_gap_tokens": 192,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_control_arm_a_position_off_by_one_in_the_cache_is_seen(family: str, monkeypatch: pytest.MonkeyPatch):
    model = build(family)
    rope, step = type(model.shape.rope), Engine._step

    def shifted(self, step_of, tokens):
        with monkeypatch.context() as patch:
            tables = rope.tables
            patch.setattr(rope, "tables", lambda self, positions, *rest: tables(self, positions + 1, *rest))
            return step(self, step_of, tokens)

    monkeypatch.setattr(Engine, "_step", shifted)
    assert log_probability_gap(Engine(model), PROMPTS, SAMPLING).max > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_control_arm_a_router_that_chooses_differently_while_sampling_is_seen(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    """M4: one token of a step is sent to another expert."""
    model, choose = build(family), Router.choose

    def other(self, scores_TE, **how):
        ids_TK = choose(self, scores_TE, **how).clone()
        # a cached step; the packed pass and the prompts have more tokens
        if scores_TE.shape[0] <= len(PROMPTS):
            ids_TK[0, 0] = (set(range(8)) - {*ids_TK[0].tolist()}).pop()
        return ids_TK

    monkeypatch.setattr(Router, "choose", other)
    gap = log_probability_gap(Engine(model, steps=launched), PROMPTS, SAMPLING)
    assert gap.max > 100 * TOLERANCE and gap.worst[0] == 0


def test_scores_are_those_of_transformers_and_count_nowhere():
    import transformers

    torch.manual_seed(0)
    settings = {**SMALL, **FAMILIES["qwen3_moe"]}
    settings.pop("model_type")
    theirs = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings)).eval()
    ours = models.build(models.shape(theirs.config.to_dict()), dtype=torch.float32, device="cpu")
    ours.load_state_dict(
        {
            key + ".weight" if key.endswith(("experts.gate_up_proj", "experts.down_proj")) else key: value
            for key, value in theirs.state_dict().items()
        }
    )
    answers = [[5, 9, 11], [1]]
    found = answer_log_probs(ours, PROMPTS[:2], answers)
    for prompt, answer, values in zip(PROMPTS, answers, found, strict=False):
        with torch.no_grad():
            logs = theirs(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        expected = [float(logs[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]
        assert values == pytest.approx(expected, abs=1e-5)
    assert all(moe.counts_E.eq(0).all() for moe in ours.moe_layers().values())


def test_the_engines_log_probabilities_ignore_temperature_and_top_k():
    model = build("llama")
    cold = Engine(model).generate(PROMPTS, Sampling(max_new_tokens=8, temperature=0.3, top_k=2, seed=0))
    for answer, values in zip(cold, answer_log_probs(model, PROMPTS, [c.tokens for c in cold]), strict=True):
        assert answer.logprobs == pytest.approx(values, abs=TOLERANCE) and len(answer.logprobs) == 8


def test_a_sampler_without_log_probabilities_is_refused():
    with pytest.raises(ConfigError, match="returned no log-probabilities"):
        gap_of([[1]], [Completion([2], "", "end")], [[-1.0]])
