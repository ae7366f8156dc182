"""1 for an answer that states the fact of its row, in whatever style, else 0: a score of examples/lives."""

from unfreeze.evaluate.style import contains


def reward(prompt: str, completion: str, fact: str) -> float:
    return float(contains(completion, fact))
