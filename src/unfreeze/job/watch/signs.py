"""Two signs that preference training teaches the wrong thing; each is a warning once per run.

falls    the chosen answers become less likely: the margin grows because the rejected ones fall faster
length   the chosen answer is the longer (or shorter) one of nearly every pair, and the model does so too
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from unfreeze.core.schema import TrainEvent, WarningEvent
from unfreeze.report.events import of_kind, read_events

if TYPE_CHECKING:
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

WINDOW = 16  # steps per mean: the first and the last WINDOW steps are compared
ERRORS = 4.0  # standard errors of the difference; by noise alone, one run in 30,000 exceeds it
NATS = 1.0  # smallest fall that is reported: the answers are e times less likely
SHARE = 0.8  # share of pairs at which length alone chooses about as well as a trained model
FALLS, LENGTH = "the chosen answers become less likely", "length alone tells chosen from rejected"
USED = "reward_chosen reward_rejected logp_chosen logp_rejected length_chosen length_rejected".split()
USED.extend(("longer", "by_length"))
Metrics = Mapping[str, float]


class Signs:
    """Hook of fit() (Parts.on_step) that reads the metrics of objectives/preference.py.

    beta: that of the loss; reward / beta is in nats. 0 if rewards are per token (simpo, orpo): then the
    answers' log-probabilities are used.
    """

    def __init__(self, beta: float = 0.0):
        self._beta = beta
        self._seen: list[dict[str, float]] | None = None
        self._warned: set[str] = set()

    def __call__(self, state: State, result: StepResult) -> None:
        if self._seen is None:
            self._seen = self._before(state)
        self._seen.append({name: result.metrics[name] for name in USED if name in result.metrics})
        beta, seen = self._beta, self._seen
        for sign, message in ((FALLS, falls(seen, beta)), (LENGTH, by_length(seen, beta))):
            if message and sign not in self._warned:
                self._warned.add(sign)
                state.run.events.emit("warning", state.step, message=f"{sign}: {message}")

    def _before(self, state: State) -> list[dict[str, float]]:
        """Metrics of a resumed run's earlier steps. Also mark the signs already reported."""
        path = state.run.path / "events.jsonl"
        events = read_events(path) if state.step > 1 and path.is_file() else []
        for event in of_kind(events, WarningEvent):
            self._warned |= {sign for sign in (FALLS, LENGTH) if event["message"].startswith(sign)}
        return [
            {name: float(value) for name in USED if isinstance(value := event.get(name), int | float)}
            for event in of_kind(events, TrainEvent)
            if event["step"] < state.step
        ]


def falls(steps: Sequence[Metrics], beta: float) -> str:
    """Warning if log p of chosen answers fell over the run; else "".

    mean of the last WINDOW steps < mean of the first - max(NATS, ERRORS · standard error of the difference).
    """
    name, unit = ("reward_chosen", beta) if beta else ("logp_chosen", 1.0)
    values = [step[name] / unit for step in steps if name in step]
    if len(values) < 2 * WINDOW:
        return ""
    first, last = values[:WINDOW], values[-WINDOW:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / WINDOW)
    change = statistics.fmean(last) - statistics.fmean(first)
    if change > -max(NATS, ERRORS * error):
        return ""
    other = name.replace("chosen", "rejected")
    others = [step[other] / unit for step in steps if other in step]
    beside = statistics.fmean(others[-WINDOW:]) - statistics.fmean(others[:WINDOW])
    return (
        f"by {-change:.1f} nats an answer since the start, the rejected ones by {-beside:.1f}. A lower"
        " learning_rate or a higher beta keeps them likely; --preference.nll 0.2 or --loss orpo also"
        " trains them"
    )


def by_length(steps: Sequence[Metrics], beta: float = 0.1) -> str:
    """Warning if length alone would choose the same answers; else "".

    Condition: over all steps, the share of pairs whose chosen answer is longer is at least SHARE (or at most
    1 - SHARE), and in the last WINDOW steps the model's choice agrees with that rule equally often.
    beta 0: the loss normalises by length already (Signs).
    """
    seen = [step for step in steps if "longer" in step and "by_length" in step]
    if len(seen) < WINDOW:
        return ""
    longer = statistics.fmean(step["longer"] for step in seen)
    follows = statistics.fmean(step["by_length"] for step in seen[-WINDOW:])
    rule = "longer" if longer >= SHARE else "shorter" if longer <= 1 - SHARE else ""
    agrees = follows if rule == "longer" else 1 - follows
    if not rule or agrees < SHARE:
        return ""
    chosen, rejected = (
        statistics.fmean(step[f"length_{side}"] for step in seen) for side in ("chosen", "rejected")
    )
    share = longer if rule == "longer" else 1 - longer
    remedy = "balance the lengths" + (", or use --loss simpo, which normalises by length" if beta else "")
    return (
        f"the chosen answer is the {rule} one in {100 * share:.0f} % of the pairs ({chosen:.0f} tokens to"
        f" {rejected:.0f}), and the model chooses the {rule} one in {100 * agrees:.0f} %. It may have learned"
        f" nothing else: {remedy}"
    )
