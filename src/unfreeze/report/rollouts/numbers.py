"""Numbers of one step of rollouts, from its answers: small, for trends over all steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from unfreeze.core.schema import AnyText, Int, Real
from unfreeze.report.rollouts.answers import Answer, num_tokens
from unfreeze.report.rollouts.behaviours import NAMES, behaviours
from unfreeze.report.rollouts.canaries import Mean, Products, bounded, pooled, products, values


class Numbers(TypedDict):
    """Counts and sums of a step; means follow from them.

    answers, groups, without_signal  counts; a group without signal has no two different rewards
    reward     count, sum, sum of squares over graded answers
    parts      name -> count, sum
    tokens     sampled tokens of all answers; longest: of the longest answer
    log_p      tokens with a log-probability, and their sum in nats
    stops, outcomes  name -> answers
    behaviours name -> phrases in all answers
    canaries   name -> products of deviations within groups (canaries.py)
    """

    step: Int
    answers: Int
    groups: Int
    without_signal: Int
    reward: tuple[Int, Real, Real]
    parts: dict[AnyText, tuple[Int, Real]]
    tokens: Int
    longest: Int
    log_p: tuple[Int, Real]
    stops: dict[AnyText, Int]
    outcomes: dict[AnyText, Int]
    behaviours: dict[AnyText, Int]
    canaries: dict[AnyText, tuple[Int, Real, Real, Real]]


@cache
def _checker() -> TypeAdapter[Numbers]:
    """Validator. Made on first use, because that takes milliseconds."""
    return TypeAdapter(Numbers)


def checked(numbers: object) -> Numbers | None:
    """Numbers as they are in a file; None if they are damaged."""
    try:
        return _checker().validate_python(numbers)
    except ValidationError:
        return None


def numbers_of(step: int, answers: Iterable[Answer]) -> Numbers:
    """Numbers of these answers, in one pass that keeps no text."""
    groups: dict[int, list[tuple[float, dict[str, float]]]] = {}
    parts: dict[str, tuple[int, float]] = {}
    stops, outcomes, phrases = Counter[str](), Counter[str](), Counter[str](dict.fromkeys(NAMES, 0))
    count = tokens = longest = known = 0
    log_p = 0.0
    for answer in answers:
        # text and tokens
        count, length = count + 1, num_tokens(answer)
        tokens, longest = tokens + length, max(longest, length)
        finite = [bounded(value) for value in answer.get("logprobs", []) if value is not None]
        known, log_p = known + len(finite), log_p + sum(finite)
        phrases.update(behaviours(answer.get("text", "")))
        stops[answer.get("stop", "")] += 1
        outcomes[answer.get("outcome", "ok")] += 1
        # reward
        group, reward = groups.setdefault(answer["group"], []), answer.get("reward")
        for name, value in answer.get("parts", {}).items():
            if value is not None:
                number, total = parts.get(name, (0, 0.0))
                parts[name] = number + 1, total + bounded(value)
        if reward is not None:
            group.append((bounded(reward), values(answer)))
    rewards = [reward for group in groups.values() for reward, _ in group]
    return {
        "step": step,
        "answers": count,
        "groups": len(groups),
        "without_signal": sum(len({reward for reward, _ in group}) < 2 for group in groups.values()),
        "reward": (len(rewards), sum(rewards), sum(reward * reward for reward in rewards)),
        "parts": parts,
        "tokens": tokens,
        "longest": longest,
        "log_p": (known, log_p),
        "stops": dict(stops),
        "outcomes": dict(outcomes),
        "behaviours": dict(phrases),
        "canaries": _canaries(list(groups.values())),
    }


def _canaries(groups: list[list[tuple[float, dict[str, float]]]]) -> dict[str, Products]:
    """Canary -> products over all groups; an answer without a value of that name is left out."""
    names = dict.fromkeys(name for group in groups for _, xs in group for name in xs)
    sums: dict[str, Products] = {}
    for name in names:
        pairs = [[(reward, xs[name]) for reward, xs in group if name in xs] for group in groups]
        sums[name] = pooled([products(*zip(*pair, strict=True)) for pair in pairs if pair])
    return sums


def reward_of(numbers: Numbers) -> Mean:
    """Rewards of a step."""
    return Mean(*numbers["reward"])
