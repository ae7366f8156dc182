"""The trainer/sampler gap: does training give a token the same log-probability as sampling did?

Sampling goes token by token with a KV cache; training is one packed pass.
If the two disagree, reinforcement learning trains on probabilities that the sampler never had. A mixture of
experts may also route a token differently in the two (docs/why/trust.md M4, N9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.data.packing.batches import Example, pack
from unfreeze.generate.answer import Completion
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.models import Decoder

# nats, in float32: the two sum a few thousand terms in different orders.
TOLERANCE = 1e-4
SCORED_ROWS = 1024  # positions whose logits are alive at once: 640 MiB in float32 at Kimi's vocabulary


@dataclass(frozen=True)
class Gap:
    """|log p_sampler - log p_trainer| in nats, over all sampled tokens.

    worst: (prompt, token within its answer) of the largest.
    """

    mean: float
    max: float
    tokens: int
    worst: tuple[int, int]

    def as_dict(self) -> dict[str, float | int]:
        """Return the fields of an event."""
        return {"logprob_gap_mean": self.mean, "logprob_gap_max": self.max, "logprob_gap_tokens": self.tokens}


def log_probability_gap(engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Gap:
    """Sample an answer to each prompt, score the same tokens in one packed pass, and compare.

    Both normalise over the ids that can be sampled, leaving out the probability that an untrained head gives
    to unused rows.
    Errors as in Engine.generate.
    """
    repeated = [prompt for prompt in prompts for _ in range(sampling.n)]
    return gap_of_answers(engine, repeated, engine.generate(prompts, sampling))


def gap_of_answers(engine: Engine, prompts: Sequence[Sequence[int]], answers: Sequence[Completion]) -> Gap:
    """Return the gap of answers that `engine` has already sampled."""
    scored = answer_log_probs(engine.model, prompts, [answer.tokens for answer in answers], engine.num_ids)
    return gap_of(prompts, answers, scored)


def gap_of(
    prompts: Sequence[Sequence[int]], answers: Sequence[Completion], scored: Sequence[Sequence[float]]
) -> Gap:
    """Return the gap between the answers' log-probabilities and `scored`, the trainer's.

    Raises ConfigError if the sampler returned none.
    """
    if not prompts or any(len(answer.logprobs) != len(answer.tokens) for answer in answers):
        raise ConfigError(
            f"{len(prompts)} prompts, but this sampler returned no log-probabilities for some",
            next="use the local engine",
        )
    differences = [
        (abs(sampled - trained), (row, index))
        for row, (answer, values) in enumerate(zip(answers, scored, strict=True))
        for index, (sampled, trained) in enumerate(zip(answer.logprobs, values, strict=True))
    ]
    largest, worst = max(differences)
    return Gap(sum(d for d, _ in differences) / len(differences), largest, len(differences), worst)


def answer_log_probs(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    num_ids: int | None = None,
) -> list[list[float]]:
    """Return log p(answer token | prompt, the answer before it) in nats, as in training: one packed pass.

    A list per answer, a number per token.
    num_ids: normalise over ids below it; None: over the whole head, as the loss does.
    The experts' counts are restored, because scoring is no training step (docs/why/trust.md M2).
    """
    return [[log_p for log_p, _ in each] for each in scored_answers(model, prompts, answers, num_ids)]


@torch.no_grad()
def scored_answers(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    num_ids: int | None = None,
) -> list[list[tuple[float, int]]]:
    """Return for each answer's tokens (log p as in answer_log_probs, rank: the number of likelier ids).

    A greedy answer is the same tokens if all ranks are 0, ties aside.
    """
    batch = _packed(prompts, answers).to(model.device)
    with model.looking():
        hidden_TD = model.hidden(batch)
    rows_N = batch.weights_T.nonzero()[:, 0]
    values: list[tuple[float, int]] = []
    for block_N in rows_N.split(SCORED_ROWS):
        logits_NV = model.logits(hidden_TD[block_N])[:, :num_ids]
        chosen_N1 = logits_NV.gather(1, batch.targets_T[block_N, None])
        log_p_N = chosen_N1[:, 0] - logits_NV.logsumexp(-1)
        values += zip(log_p_N.tolist(), (logits_NV > chosen_N1).sum(-1).tolist(), strict=True)
    taken = iter(values)
    return [[next(taken) for _ in answer] for answer in answers]


def _packed(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Batch:
    if any(not prompt for prompt in prompts):
        raise UserError(
            "a prompt is empty, so its first answer token has no context", next="start with the BOS id"
        )
    return pack(
        [
            Example([*prompt, *answer], [0.0] * len(prompt) + [1.0] * len(answer))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    )
