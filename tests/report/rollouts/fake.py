"""A run of rollouts that nobody trained: sums, graded for value and format, better from step to step.

python -m tests.report.rollouts.fake FOLDER writes one to look at.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unfreeze.report.html import write_report
from unfreeze.report.rollouts import Answer, Rollouts

THOUGHTS = (
    "First, we need to add the units.",
    "Let me check this result.",
    "Wait, that is not right.",
    "To get 24 we need a multiple of 8.",
    "Step 2: add the tens.",
    "So it is easy.",
)


def fake_answer(step: int, group: int, answer: int, *, skill: float, prompts: int = 40) -> Answer:
    """One graded answer. skill: chance of the right value, 0 to 1."""
    draw = random.Random(f"{step} {group} {answer}")
    row = random.Random(f"{step} {group}").randrange(prompts)
    a, b = 3 + row * 7 % 90, 5 + row * 13 % 80
    right, formed = draw.random() < skill, draw.random() < 0.5 + skill / 2
    thoughts = " ".join(draw.choices(THOUGHTS, k=draw.randrange(1, 5)))
    value = a + b if right else a + b + draw.randrange(1, 9)
    text = f"{thoughts}\n" + (f"<answer>{value}</answer>" if formed else f"It is {value}.")
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    reward = 0.8 * right + 0.2 * formed
    return {
        "step": step,
        "group": group,
        "answer": answer,
        "row": row,
        "prompt": f"What is {a} + {b}? Put the sum between <answer> and </answer>.",
        "text": text,
        "pieces": pieces,
        "logprobs": [-(draw.random() ** 3) * 3 for _ in pieces],
        "reward": reward,
        "parts": {"value": float(right), "format": float(formed)},
        "stop": draw.choice(["end", "end", "end", "length"]),
        "outcome": "ok",
        "message": "",
    }


def fake_step(step: int, groups: int = 8, answers: int = 8, *, skill: float = 0.5) -> list[Answer]:
    """The answers of a step, with advantages R - mean R; every fifth answer of the last group fails."""
    rows: list[Answer] = []
    for group in range(groups):
        of_group = [fake_answer(step, group, i, skill=skill) for i in range(answers)]
        if group == groups - 1:
            for answer in of_group[::5]:
                answer |= {"reward": None, "parts": {}, "outcome": "timeout", "message": "5 s passed"}
        rewards = [reward for answer in of_group if (reward := answer["reward"]) is not None]
        for answer in of_group:
            mean = sum(rewards) / max(len(rewards), 1)
            answer["advantage"] = 0.0 if answer["reward"] is None else answer["reward"] - mean
        rows += of_group
    return rows


def fake_events(steps: Sequence[int], last: int | None = None) -> list[dict[str, Any]]:
    """Events of the run; last: its end, None while it goes on."""
    metrics = [
        {"field": "loss", "label": "Loss", "unit": "nats per sampled token", "over": "tokens"},
        {"field": "kl", "label": "KL to the model as it began", "unit": "nats per token", "over": "tokens"},
    ]
    start = {"kind": "start", "step": 0, "time": 1.79e9, "steps": len(steps), "resumed": False}
    start |= {"model": "tiny-k2", "data": "sums.jsonl", "metrics": metrics}
    events = [start]
    for step in steps:
        at = {"kind": "train", "step": step, "time": 1.79e9 + step, "grad_norm": 0.3}
        events.append(at | {"loss": 0.1 / step, "kl": 0.002 * step, "tokens": 4000, "seconds": 1.5})
    if last is not None:
        events.append({"kind": "end", "step": last, "time": 1.8e9, "reason": "done", "steps": last})
    return events


def fake_run(
    folder: Path,
    steps: int = 12,
    groups: int = 8,
    answers: int = 8,
    rows: dict[int, list[Answer]] | None = None,
) -> Path:
    """A run folder with events and rollouts. rows: step -> answers in place of the fake ones."""
    folder.mkdir(parents=True)
    numbers = list(rows) if rows is not None else list(range(1, steps + 1))
    lines = [json.dumps(event) + "\n" for event in fake_events(numbers, numbers[-1] if numbers else None)]
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    writer = Rollouts(folder)
    for step in numbers:
        skill = 0.1 + 0.85 * step / max(len(numbers), 1)
        writer.write(step, rows[step] if rows is not None else fake_step(step, groups, answers, skill=skill))
    return folder


if __name__ == "__main__":
    print(write_report(fake_run(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
