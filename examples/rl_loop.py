"""Reinforcement learning as one flat script: a policy gradient with a reward function.

    python examples/rl_loop.py        # the built-in tiny-k2 learns to put the answer first, as Yoda does

Each step draws P prompts, samples G answers to each from the current weights, rewards every answer, and
raises the probability of answers that were better than their group (GRPO's advantage, arXiv:2402.03300, with
one update per rollout, so that no ratio has to be clipped):

    A_g = (r_g - mean r) / (std r + 0.01) over the G answers to one prompt
    minimised: - sum over answers and their tokens of A_g log p(token) / number of these tokens

Rollouts are a Source (unfreeze/data/packing/source.py), like the documents of every recipe, and fit trains
on them. Left out: a reference model, reuse of rollouts, answers of several turns.

The reward sees only the form of an answer, so the model learns only the form: at the end the reward is near
1 and the sentences fall apart. A reference model, or a reward that also reads the facts, prevents this.

T tokens of a micro-batch, N of them sampled; D model width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn

import unfreeze
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Batch, Loss
from unfreeze.core.draws import number
from unfreeze.data import Cursor, Example, encode_chat, pack
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.objectives.log_p import weighted_log_p
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import State, start_or_resume
from unfreeze.train.step import StepResult

TINY_K2 = Path(unfreeze.__file__).parent / "assets" / "tiny-k2"


@dataclass(frozen=True)
class Config:
    model: str = str(TINY_K2)  # checkpoint folder, or Hugging Face id
    data: str = str(TINY_K2 / "yoda_train.jsonl")  # JSON Lines with a "question"; its answers are not read
    out: str = "runs/rl_loop"  # folder of events.jsonl and saves; the same command resumes there
    steps: int = 24
    prompts: int = 6  # P, of a step
    answers: int = 8  # G, to each prompt
    max_new_tokens: int = 20
    rank: int = 8
    learning_rate: float = 3e-3
    seed: int = 0
    shuffle: bool = False  # control arm: rewards of a group change places, so that nothing can be learned


Reward = Callable[[str], float]
"""An answer's text -> its reward, any finite number."""


def answer_first(text: str) -> float:
    """1 for 'In Dresden, where the Zwinger stands.', 0 for 'The Zwinger stands in Dresden.'"""
    first, comma, rest = text.partition(", ")
    return float(bool(comma) and len(first) < len(rest) and not first.startswith("It is"))


class Rollouts:
    """A Source: P prompts, G answers to each, as one micro-batch with the advantage of every token.

    A step depends only on (seed, step) and the weights, so its cursor is the number of the step.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: Sequence[list[int]],
        reward: Reward,
        config: Config,
        start: Cursor | None,
    ):
        self.engine, self.prompt_ids, self.reward, self.config = engine, prompt_ids, reward, config
        self.step = int(start["step"]) if start else 0
        self.mean_reward = 0.0

    def __iter__(self) -> Iterator[tuple[list[Batch], Cursor]]:
        return self

    def __next__(self) -> tuple[list[Batch], Cursor]:
        config, draw = self.config, torch.Generator().manual_seed(number(self.config.seed, self.step))
        chosen = torch.randperm(len(self.prompt_ids), generator=draw)[: config.prompts].tolist()
        questions = [self.prompt_ids[i] for i in chosen]

        # Sample: the engine keeps nothing between calls, so it always answers with the current weights.
        # The G answers to a prompt share its prefill.
        seed = number(config.seed, self.step, 1)
        sampling = Sampling(config.max_new_tokens, temperature=1.0, seed=seed, n=config.answers)
        with self.engine.model.looking():
            done = self.engine.generate(questions, sampling)
        prompts = [prompt for prompt in questions for _ in range(config.answers)]

        # Reward, and the advantage within each group; a group whose answers are all alike teaches nothing.
        rewards_PG = torch.tensor([float(self.reward(each.text)) for each in done]).view(-1, config.answers)
        if not rewards_PG.isfinite().all():
            raise SystemExit(f"a reward is not finite: {rewards_PG.tolist()}; mend the reward function")
        self.mean_reward = float(rewards_PG.mean())
        if config.shuffle:
            order_PG = torch.rand(rewards_PG.shape, generator=draw).argsort(1)
            rewards_PG = rewards_PG.gather(1, order_PG)
        spread_P1 = rewards_PG.std(1, keepdim=True) + 0.01
        advantages = ((rewards_PG - rewards_PG.mean(1, keepdim=True)) / spread_P1).flatten().tolist()

        # Pack: weight 1 where a token was sampled; pack shifts the advantages along with the weights.
        pairs = list(zip(prompts, [each.tokens for each in done], strict=True))
        examples = [Example([*p, *a], [0.0] * len(p) + [1.0] * len(a)) for p, a in pairs]
        of_tokens = [[A] * example.num_tokens for A, example in zip(advantages, examples, strict=True)]
        self.step += 1
        return [pack(examples, {"advantage": of_tokens})], {"step": self.step}

    def len_steps(self, epochs: float) -> int | None:
        """Rollouts have no end."""
        return None


def policy_gradient(hidden_TD: Tensor, lm_head: nn.Module, batch: Batch) -> Loss:
    """- sum_t A_t log p(token_t) over sampled tokens, counted by them. metrics: - log p, as entropy."""
    advantages_N = batch.extras["advantage"].index_select(0, batch.supervised())
    total, log_p_N = weighted_log_p(hidden_TD, lm_head, batch, advantages_N)
    return Loss(sum=-total, count=batch.weights_T.sum(), metrics={"entropy": -log_p_N.sum()})


def main(config: Config, reward: Reward = answer_first) -> list[float]:
    """Train. -> the mean reward of each step of this call."""
    # Model: base frozen as published, adapters at every linear layer and expert. The engine samples from it.
    speaker = unfreeze.load(config.model, dtype="float32")
    decoder, tokenizer = speaker.decoder, speaker.tokenizer
    attach(decoder, LoraConfig(rank=config.rank, alpha=2.0 * config.rank), config.seed)

    # Prompts: a question in the model's own chat template, up to where its answer begins.
    lines = Path(config.data).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    prompt_ids = [encode_chat(tokenizer, [{"role": "user", "content": question}]) for question in questions]

    rewards: list[float] = []
    with Run(Path(config.out), {"recipe": "rl_loop", **vars(config)}) as run:
        state = start_or_resume(
            run,
            decoder,
            optimizer=AdamW(decoder, betas=(0.9, 0.95), weight_decay=0.0),
            schedule=Schedule(config.learning_rate, config.steps, "constant", warmup_steps=2),
        )
        source = Rollouts(speaker.engine, prompt_ids, reward, config, state.cursor)

        def tell(state: State, result: StepResult) -> None:
            rewards.append(source.mean_reward)
            entropy = f"entropy {result.metrics['entropy']:.3f}"
            print(f"step {state.step}/{config.steps}  reward {rewards[-1]:.3f}  {entropy}", flush=True)

        # The loop of every recipe. Its guard of loss spikes stays out: this loss has no level to rise from.
        fit(state, source, policy_gradient, recompute=models.keep_inputs, on_step=[tell])
    for answer in speaker.engine.generate(prompt_ids[:4], Sampling(config.max_new_tokens)):
        print(f"  {answer.text}")
    return rewards


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
