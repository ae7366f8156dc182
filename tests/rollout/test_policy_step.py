"""A whole step: the engine samples at a temperature over the named words, groups are rewarded, and train_step minimises
a policy's loss with the sampler's experts replayed. In float32 trainer and sampler agree, so all ratios are 1."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfreeze import models
from unfreeze.core.batch import Batch
from unfreeze.data import Example, pack
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import launched
from unfreeze.kernels.linear_cross_entropy import Words
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.objectives.policy import Settings, policy
from unfreeze.objectives.ratios import KINDS
from unfreeze.rollout.groups import advantages, divided, rewards_of
from unfreeze.rollout.routes import with_routes
from unfreeze.train.events import train_fields
from unfreeze.train.optim import AdamW
from unfreeze.train.step import StepResult, train_step

WORDS, NAMED, TEMPERATURE, G = 89, 80, 0.8, 3
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def build() -> models.Decoder:
    model = models.build(models.shape(MIXTRAL), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    return model


class Rollout:
    """Two prompts with three answers each; the reward is the share of even words."""

    def __init__(self, model: models.Decoder):
        engine = Engine(
            model,
            tokenizer=SimpleNamespace(named_size=NAMED, stream_decoder=lambda: _Silent()),  # type: ignore[arg-type]
            stop_ids=frozenset(range(0, NAMED, 9)),
            steps=launched,
        )
        prompts = [[3, 14, 15], [9, 2, 6, 5, 35]]
        self.words = Words(engine.num_ids, TEMPERATURE)
        sampling = Sampling(10, temperature=TEMPERATURE, seed=0, n=G)
        self.done = engine.generate(prompts, sampling, experts=True)
        self.prompts = [prompt for prompt in prompts for _ in range(G)]
        even = [sum(token % 2 == 0 for token in answer.tokens) / len(answer.tokens) for answer in self.done]
        self.groups = advantages(rewards_of([even[:G], even[G:]]))

    def batches(self, dealt: list[list[int]]) -> list[Batch]:
        made = []
        for part in dealt:
            pairs = [(self.prompts[index], self.done[index]) for index in part]
            examples = [
                Example([*prompt, *done.tokens], [0.0] * len(prompt) + [1.0] * len(done.tokens))
                for prompt, done in pairs
            ]
            flat = self.groups.advantage_PG.flatten().tolist()
            extras = {
                "advantage": [
                    [flat[index]] * example.num_tokens for index, example in zip(part, examples, strict=True)
                ],
                "sampler_log_p": [[0.0] * len(prompt) + done.sampled_logprobs for prompt, done in pairs],
            }
            made.append(with_routes(pack(examples, extras), [done.experts for _, done in pairs]))
        return made


class _Silent:
    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def step(rollout: Rollout, settings: Settings, dealt: list[list[int]], **words: Any) -> StepResult:
    model = build()
    batches = rollout.batches(dealt)
    if settings.per != "tokens":
        batches = divided(batches, settings.per, answers=len(rollout.done), tokens=0)
    objective = partial(policy, settings=settings, words=words.get("words", rollout.words))
    options: dict[str, Any] = {"learning_rate": 1e-3, "max_norm": 0.0, "recompute": RECOMPUTE["layers"]}
    return train_step(model, AdamW(model), batches, objective, **options)


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    return Rollout(build())


def test_trainer_and_sampler_agree_and_every_objective_makes_the_same_step(rollout):
    assert rollout.groups.signal_P.all() and len({len(done.tokens) for done in rollout.done}) > 2
    first = step(rollout, Settings(), [[0, 1, 2, 3, 4, 5]])
    assert first.metrics["gap_max"] < 1e-5 and first.metrics["entropy"] > 1
    assert first.supervised_tokens == sum(len(done.tokens) for done in rollout.done)
    for kind in KINDS:
        result = step(rollout, Settings(kind), [[0, 1, 2, 3, 4, 5]])
        assert result.grad_norm == pytest.approx(first.grad_norm, rel=1e-4)
        if kind != "reinforce":
            assert result.metrics["ratio"] == pytest.approx(1, abs=1e-5)
            assert result.metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
            assert result.metrics["clip_fraction"] == 0
    # control arms: at another temperature, or over all rows of the head, ratios begin elsewhere
    for words in (Words(NAMED, 1.0), Words(WORDS, TEMPERATURE)):
        assert step(rollout, Settings("ppo"), [[0, 1, 2, 3, 4, 5]], words=words).metrics["gap_max"] > 1e-3


@pytest.mark.parametrize("per", ["tokens", "answers", "constant", "sum"])
def test_a_step_is_the_same_however_its_answers_are_dealt(rollout, per):
    settings = Settings("ppo", per=per, constant=10.0)
    whole = step(rollout, settings, [[0, 1, 2, 3, 4, 5]])
    parts = step(rollout, settings, [[4, 1], [5], [3, 0, 2]])
    assert parts.loss == pytest.approx(whole.loss, abs=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert parts.metrics == pytest.approx(whole.metrics, abs=1e-5)


def test_the_share_of_flipped_experts_is_in_the_steps_event(rollout):
    result = step(rollout, Settings(), [[0, 1, 2, 3, 4, 5]])
    fields = train_fields(result, 0.1, {"peak_bytes": 0}, {}, {0: "0", 1: "1"})
    assert fields["experts_flipped"] == {"0": 0.0, "1": 0.0}
    flipped = {name: [4, 1, 0] for name in (0, 1)}
    result = StepResult(0.0, {}, 1, 1, 0.0, 0.0, 1.0, {}, replayed=flipped)
    fields = train_fields(result, 0.1, {"peak_bytes": 0}, {}, {0: "0", 1: "1"})
    assert fields["experts_flipped"] == {"0": 0.25, "1": 0.25}
    assert "experts_flipped" not in train_fields(
        StepResult(0.0, {}, 1, 1, 0.0, 0.0, 1.0, {}), 0.1, {"peak_bytes": 0}, {}, {}
    )
