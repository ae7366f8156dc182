"""Reward of form: reasoning between think marks, then one answer in a box. It reads no column of the row.

    unfreeze reward show examples/rewards/form.py --model MODEL --data problems.jsonl

Alone it teaches the form and nothing else. Give it beside a reward that reads the answer.
"""

import re

THINKS = re.compile(r"^\s*<think>.+?</think>\s*\S", re.DOTALL)
BOXED = re.compile(r"\\boxed\{[^{}]+\}")


def reward(prompt: str, completion: str) -> dict[str, float]:
    """Half for each of: reasoning that is closed before the answer, and exactly one box."""
    answer = completion.rpartition("</think>")[2]
    return {
        "thinks": 0.5 * bool(THINKS.match(completion)),
        "one box": 0.5 * (len(BOXED.findall(answer)) == 1),
    }
