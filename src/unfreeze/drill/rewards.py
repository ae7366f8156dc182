"""G1 to G4: faults of runs with rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from unfreeze.core.schema import WarningEvent
from unfreeze.drill.fault import Fault, Outcome, must_refuse, said
from unfreeze.drill.sandbox import Sandbox
from unfreeze.job.rewarded import Rewarding
from unfreeze.report.events import of_kind, read_events
from unfreeze.report.rollouts.answers import Answer
from unfreeze.report.rollouts.watched import Watched
from unfreeze.rollout.sampled import Sampled

SILENT = "no group of the first 3 steps has answers with different rewards"


def refused(code: str, says: str, **fields: Any) -> Callable[[Sandbox], Outcome]:
    """Return a plant: a run whose reward function returns `code` must stop with that message."""

    def plant(sandbox: Sandbox) -> Outcome:
        return must_refuse(lambda: sandbox.grpo(code, sandbox.fresh("run"), **fields), says=says)

    return plant


def followed_length(sandbox: Sandbox) -> Outcome:
    """A reward that is the length of an answer, while answers grow from step to step."""
    watched = Watched(sandbox.fresh("run"))
    heard: list[str] = []
    for step in range(1, 9):
        texts = [["word " * (5 + step + i) for i in range(8)] for _ in range(8)]
        answers: list[Answer] = [
            {"step": step, "group": group, "answer": i, "text": text, "reward": float(len(text))}
            for group, each in enumerate(texts)
            for i, text in enumerate(each)
        ]
        heard += watched.look(step, answers)
    return said(Watched.look, "".join(heard), says="The reward follows length (r = +1.00")


def trainer_off(sandbox: Sandbox) -> Outcome:
    """Log-probabilities of the sampler that are .001 nats off, as by kernels that compute something else."""
    run, of = sandbox.fresh("run"), Sampled.of

    def off(done: Any) -> Sampled:
        done.sampled_logprobs[0] += 1e-3
        return of(done)

    with patch.object(Sampled, "of", staticmethod(off)):
        sandbox.grpo("len(completion) % 7", run)
    warnings = [event["message"] for event in of_kind(read_events(run / "events.jsonl"), WarningEvent)]
    line = "".join(words for words in warnings if "sampler" in words)
    return said(Rewarding.watch_gap, line, says="trainer and sampler differ by 0.001 nats")


FAULTS = [
    Fault("G1", "a task that the model never solves", refused("float('Zwinger' in completion)", SILENT)),
    Fault("G1", "a reward that is constant", refused("1.0", f"{SILENT} (all 1")),
    Fault("G2", "a reward that is NaN", refused("float('nan')", "no reward (16 not a number)")),
    Fault(
        "G2",
        "a reward that never ends",
        refused(
            "[0 for _ in iter(int, 1)]",
            "no reward (4 timeout, 12 skipped)",
            grading={"seconds": 0.3},
            training={"steps": 1},
        ),
    ),
    Fault("G3", "a reward that follows length", followed_length),
    Fault("G4", "a trainer that computes other log-probabilities", trainer_off),
]
