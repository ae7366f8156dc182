"""Detect spikes of loss and gradient norm before the update.

They are reported with the rows that caused them; depending on the config the step is skipped or the run
stops.

judge = SpikeGuard(model, objective, folder, on_spike="skip", describe=…)      fit(…, judge=judge)
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError
from unfreeze.models import Decoder
from unfreeze.models.recompute import RecomputePolicy
from unfreeze.train.step import Objective, Verdict
from unfreeze.train.suspects import SUSPECTS, Describe, rank_documents, write_suspects

OnSpike = Literal["warn", "skip", "stop"]
WINDOW = 64  # number of steps from which the noise is estimated
HISTORY = 16  # number of steps whose median is the level; with fewer steps nothing is judged
# in robust standard deviations. For Gaussian noise one step in 10^15 exceeds it; batch losses have heavier
# tails
DEVIATIONS = 8.0
MIN_LOSS_SPREAD = (
    0.1  # nats per token: an overfitted loss of 0.01 +- 0.003 may meet a hard row without an alarm
)
# for the logarithm: exp(8 * 0.275) = at least 9 times the level, because norms of short rows differ
# several-fold
MIN_NORM_SPREAD = 0.275
MAX_SKIPPED = 6  # steps in a row: more than this is not a bad row but a run that no longer trains


class Spike(UserError):
    """A loss or gradient norm far above the steps before, in a run configured to stop at it.

    The update was not made.
    """


def threshold(values: Sequence[float], min_spread: float) -> float:
    """Return level + 8 max(spread, min_spread).

        level   median of the last HISTORY values
        spread  1.0483 median |x_i - x_(i-1)| over all of them

    1.0483 = 1.4826 / sqrt 2 makes the spread the standard deviation for Gaussian noise. Differences ignore
    the trend of a falling loss, which a deviation from the median would count as noise. One outlier hardly
    moves a median.
    """
    spread = 1.0483 * statistics.median(abs(after - before) for before, after in pairwise(values))
    return statistics.median(values[-HISTORY:]) + DEVIATIONS * max(spread, min_spread)


class SpikeGuard:
    """A Judge (train/step.py) of a step's loss and gradient norm, by `threshold` of the last WINDOW steps.

    The gradient norm is judged by its logarithm, because norms differ by factors.

        on_spike  "warn": the update is made. "skip": it is not; weights, optimizer and balancing bias stay
                  unchanged. "stop": raises Spike
        max_norm  the clip limit: a gradient norm below it never alarms, because clipping leaves it unchanged
        shown     the folder as named in messages, if different
        history   (loss, gradient norm) of the steps before, oldest first, so that a resumed run judges like
                  an uninterrupted one

    Every value joins the window, a spike's too, so a level that has risen permanently stops alarming after
    HISTORY / 2 steps.
    """

    def __init__(
        self,
        model: Decoder,
        objective: Objective,
        folder: Path,
        *,
        recompute: RecomputePolicy,
        on_spike: OnSpike,
        max_norm: float = 0.0,
        step: int = 0,
        describe: Describe | None = None,
        history: Iterable[tuple[float, float]] = (),
        shown: Path | None = None,
    ):
        self._model, self._objective, self._folder, self._recompute = model, objective, folder, recompute
        self._on_spike, self._max_norm, self._describe, self._step = on_spike, max_norm, describe, step
        self._window: deque[tuple[float, float]] = deque(history, maxlen=WINDOW)
        self._skipped, self._shown = 0, shown

    def __call__(self, micro_batches: Sequence[Batch], loss: float, grad_norm: float) -> Verdict:
        self._step += 1
        reason = self._reason(loss, grad_norm)
        self._window.append((loss, grad_norm))
        if not reason:
            self._skipped = 0
            return Verdict()
        documents = rank_documents(self._model, micro_batches, self._objective, self._recompute)
        write_suspects(self._folder, self._step, reason, documents, self._describe)
        rows = f"its rows are in {SUSPECTS}"
        if self._on_spike == "stop":
            raise Spike(
                f"step {self._step}: {reason}; the weights were not updated, {rows}",
                next=(
                    "look at them, lower learning_rate, or continue with --watch.on-spike skip:"
                    f" {(self._shown or self._folder) / SUSPECTS}"
                ),
            )
        if self._on_spike == "warn":
            return Verdict(warning=f"{reason}; {rows}")
        self._skipped += 1
        if self._skipped > MAX_SKIPPED:
            raise Spike(
                f"step {self._step}: {reason}, and the {MAX_SKIPPED} steps before it were skipped for the"
                " same: the run no longer trains",
                next="resume from a save before it with a lower learning_rate",
            )
        return Verdict(apply=False, warning=f"{reason}; the update was skipped, {rows}")

    def _reason(self, loss: float, grad_norm: float) -> str:
        if len(self._window) < HISTORY:
            return ""
        losses, logs = zip(*((each, math.log(max(norm, 1e-30))) for each, norm in self._window), strict=True)
        limit, norm_limit = threshold(losses, MIN_LOSS_SPREAD), math.exp(threshold(logs, MIN_NORM_SPREAD))
        reasons: list[str] = []
        if loss > limit:
            reasons.append(
                f"loss {loss:.4g} is above {limit:.4g}, the level was"
                f" {statistics.median(losses[-HISTORY:]):.4g}"
            )
        if grad_norm > max(norm_limit, self._max_norm):
            level = math.exp(statistics.median(logs[-HISTORY:]))
            reasons.append(
                f"gradient norm {grad_norm:.4g} is above {norm_limit:.4g}, the level was {level:.4g}"
            )
        return "; ".join(reasons)
