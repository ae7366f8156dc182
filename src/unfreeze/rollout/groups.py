"""Advantages of a step's answers, from the rewards of their groups.

    A = (r - b) / (s + eps)

b is a baseline that does not depend on the answer's own tokens, so that the gradient keeps its mean. (The
mean of a group contains the answer's own reward; this only scales the gradient, by (G - 1) / G.) s is a
spread.

b  mean           of the group                                        GRPO, 2402.03300
   leave-one-out  mean of the other answers of the group              RLOO, 2402.14740
   ema            moving average of earlier steps' rewards            Williams 1992, REINFORCE with a baseline
   greedy         reward of the greedy answer to the same prompt      ReMax, 2310.10505
s  group          unbiased standard deviation of the answers that b is the mean of (leave-one-out: the others,
                  as in NeMo-RL); of the group for ema and greedy. 0 divides by nothing
   batch          of all rewards of the step
   none           A = r - b: a group's weight does not depend on its spread (Dr. GRPO, 2503.20783)

An answer without a reward is left out of its group, has advantage 0 and is not trained on. P groups
(prompts), G answers to each; all tensors are float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.core.batch import Batch
    from unfreeze.objectives.policy import Per

Baseline = Literal["mean", "leave-one-out", "ema", "greedy"]
Scale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class Advantage:
    """Baseline b, spread s and its eps. decay: of the moving average, per step."""

    baseline: Baseline = "mean"
    scale: Scale = "none"
    eps: float = 1e-4
    decay: float = 0.9


class Groups(NamedTuple):
    """A step's groups.

    advantage_PG  0 for an answer that is not trained on
    trained_PG    True for an answer with a reward
    signal_P      True if an answer of the group has an advantage other than 0
    equal_P       True if the group has rewards and all are equal
    mean_P        mean reward, NaN without rewards
    """

    advantage_PG: Tensor
    trained_PG: Tensor
    signal_P: Tensor
    equal_P: Tensor
    mean_P: Tensor


def rewards_of(groups: Sequence[Sequence[float | None]]) -> Tensor:
    """Return rewards [P, G] with NaN for None. Shorter groups are filled up with NaN."""
    import torch

    widest = max([1, *map(len, groups)])
    rows = [[math.nan if reward is None else reward for reward in group] for group in groups]
    padded = [row + [math.nan] * (widest - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.float64).view(len(groups), widest)


def advantages(
    rewards_PG: Tensor,
    settings: Advantage | None = None,
    *,
    average: float | None = None,
    greedy_P: Tensor | None = None,
) -> Groups:
    """Return the advantages of rewards; NaN where an answer has none.

    average   of the baseline "ema" (next_average); None at the first step: the mean of its rewards
    greedy_P  of "greedy": rewards of the greedy answers. A group whose greedy answer has none is not trained
              on
    A group with one reward has no baseline of its own: with "mean" and "leave-one-out" its advantage is 0.
    Raises ValueError if the greedy rewards are missing.
    """
    import torch

    settings = settings or Advantage()
    graded_PG = ~rewards_PG.isnan()
    r_PG = rewards_PG.nan_to_num(0.0)
    count_P1 = graded_PG.sum(1, keepdim=True).double()
    mean_P1 = r_PG.sum(1, keepdim=True) / count_P1  # NaN for a group without rewards
    alone = settings.baseline == "leave-one-out"
    if settings.baseline == "ema":
        b_PG = torch.full_like(r_PG, float(rewards_PG.nanmean()) if average is None else average)
    elif settings.baseline == "greedy":
        if greedy_P is None:
            raise ValueError("the baseline greedy needs the rewards of the greedy answers")
        graded_PG = graded_PG & ~greedy_P.isnan().unsqueeze(1)
        b_PG = greedy_P.double().unsqueeze(1).expand_as(r_PG)
    else:
        b_PG = (r_PG.sum(1, keepdim=True) - r_PG) / (count_P1 - 1) if alone else mean_P1.expand_as(r_PG)

    # equal rewards differ from their mean by rounding, which a spread of 0 would enlarge
    low_P = rewards_PG.nan_to_num(math.inf).amin(1)
    high_P = rewards_PG.nan_to_num(-math.inf).amax(1)
    equal_P = low_P == high_P
    own_mean = settings.baseline in ("mean", "leave-one-out")
    none_PG = ~graded_PG | (own_mean & equal_P.unsqueeze(1))
    raw_PG = (r_PG - b_PG) / _divisor(rewards_PG, settings)
    advantage_PG = raw_PG.masked_fill(none_PG, 0.0)
    return Groups(advantage_PG, graded_PG, advantage_PG.ne(0).any(1), equal_P, mean_P1.squeeze(1))


def _divisor(rewards_PG: Tensor, settings: Advantage) -> Tensor | float:
    """s + eps, or 1 where s is 0 or unknown."""
    import torch

    if settings.scale == "none":
        return 1.0
    if settings.scale == "batch":
        spread = _spread(rewards_PG.view(1, -1))
    elif settings.baseline == "leave-one-out":
        # [P, G, G]: for each answer the group without it
        itself = torch.eye(rewards_PG.shape[1], dtype=torch.bool)
        others_PGG = rewards_PG.unsqueeze(1).masked_fill(itself, math.nan)
        spread = _spread(others_PGG).squeeze(-1)
    else:
        spread = _spread(rewards_PG)
    return torch.where(spread > 0, spread + settings.eps, 1.0)


def _spread(values: Tensor) -> Tensor:
    """Unbiased standard deviation over the last axis without NaN; 0 for fewer than two numbers."""
    count = (~values.isnan()).sum(-1, keepdim=True)
    squares = (values - values.nanmean(-1, keepdim=True)).square().nansum(-1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def next_average(average: float | None, rewards_PG: Tensor, decay: float) -> float | None:
    """Return decay · average + (1 - decay) · mean reward; unchanged by a step without rewards."""
    mean = float(rewards_PG.nanmean())
    if math.isnan(mean):
        return average
    return mean if average is None else decay * average + (1 - decay) * mean


def divided(micro_batches: Sequence[Batch], per: Per, *, answers: int, tokens: int) -> list[Batch]:
    """Return the micro-batches of a step with its divisor: tokens, answers, or 1 for a sum.

    answers, tokens: those of the step that are trained on, also of answers that are left out of the batches
    because their advantage is 0. Without those, a step per token needs no call.
    The divisor of a step is the sum over its micro-batches, so it stands on the first.
    """
    count = {"tokens": tokens, "answers": answers, "constant": answers, "sum": 1}[per]
    return [replace(batch, examples=0 if index else count) for index, batch in enumerate(micro_batches)]
