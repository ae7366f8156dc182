"""Loss spikes and gradient-norm spikes: seen before the update, said, and as configured skipped or stopped at; with the rows that made them.

judge = SpikeGuard(model, objective, folder, on_spike="skip", describe=…)      fit(…, judge=judge)
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError
from unfreeze.train.step import Objective, Verdict

if TYPE_CHECKING:
    from unfreeze.models import Decoder

OnSpike = Literal["warn", "skip", "stop"]
Describe = Callable[[list[int]], dict[str, Any]]
"""Token ids of one document -> what else is known of it, as JSON: {"row": its number in the data file, "text": …}."""

SUSPECTS = "suspects.jsonl"
"""In the run folder: a line per document of a step that spiked or was not finite, the worst first; see write_suspects."""
WINDOW = 64  # steps the present one is compared with
HISTORY = 16  # and at least so many: the median of fewer is no measure
DEVIATIONS = 8.0  # robust standard deviations. Of Gaussian noise one step in 10^15 lies beyond; batch losses have heavier tails
MIN_LOSS_SPREAD = 0.1  # nats per token: an overfitted loss of 0.01 +- 0.003 may meet a hard row without an alarm
MIN_NORM_SPREAD = 1.0  # of the median: gradient norms of short rows differ several times over; an alarm needs 9 times the median at least
MAX_SKIPPED = 8  # steps in a row: more is no bad row but a run that no longer trains
LISTED = 8  # documents of a step that are written out


class Spike(UserError):
    """A loss or gradient norm far above those of the steps before, where the run was asked to stop at it. The update was not made."""


def threshold(values: Sequence[float], min_spread: float) -> float:
    """median + 8 max(1.4826 MAD, min_spread), MAD the median of |x - median|: one outlier in the window moves it hardly at all.

    1.4826 MAD is the standard deviation of Gaussian noise (Rousseeuw and Croux 1993).
    """
    median = statistics.median(values)
    return median + DEVIATIONS * max(1.4826 * statistics.median(abs(value - median) for value in values), min_spread)


class SpikeGuard:
    """A Judge (train/step.py). Warns of a step whose loss or gradient norm exceeds `threshold` of the last WINDOW steps; HISTORY at least.

    on_spike  "warn": the update is made. "skip": it is not, neither weights, optimizer nor balancing bias move. "stop": raises Spike.
    max_norm  the clip limit: a gradient norm below it is no alarm, whatever the others were (clipping leaves it alone).
    history   (loss, gradient norm) of the steps before, oldest first: a resumed run judges as one that was never broken.
    Every value joins the window, a spike's too, so a level that has risen for good stops alarming after half a window.
    """

    def __init__(
        self, model: Decoder, objective: Objective, folder: Path, *, on_spike: OnSpike, max_norm: float = 0.0, step: int = 0,
        describe: Describe | None = None, history: Iterable[tuple[float, float]] = (),
    ):  # fmt: skip
        self._model, self._objective, self._folder = model, objective, folder
        self._on_spike, self._max_norm, self._describe, self._step = on_spike, max_norm, describe, step
        self._window: deque[tuple[float, float]] = deque(history, maxlen=WINDOW)
        self._skipped = 0

    def __call__(self, micro_batches: Sequence[Batch], loss: float, grad_norm: float) -> Verdict:
        self._step += 1
        reason = self._reason(loss, grad_norm)
        self._window.append((loss, grad_norm))
        if not reason:
            self._skipped = 0
            return Verdict()
        write_suspects(self._folder, self._step, reason, rank_documents(self._model, micro_batches, self._objective), self._describe)
        rows = f"its rows are in {SUSPECTS}"
        if self._on_spike == "stop":
            raise Spike(f"step {self._step}: {reason}; the weights were not updated, {rows}",
                        next=f"look at them, lower learning_rate, or go on with --on-spike skip: {self._folder / SUSPECTS}")  # fmt: skip
        if self._on_spike == "warn":
            return Verdict(warning=f"{reason}; {rows}")
        self._skipped += 1
        if self._skipped > MAX_SKIPPED:
            raise Spike(f"step {self._step}: {reason}, and the {MAX_SKIPPED} steps before it were skipped for the same: the run no longer trains",
                        next="resume from a save before it with a lower learning_rate")  # fmt: skip
        return Verdict(apply=False, warning=f"{reason}; the update was skipped, {rows}")

    def _reason(self, loss: float, grad_norm: float) -> str:
        if len(self._window) < HISTORY:
            return ""
        losses, norms = zip(*self._window, strict=True)
        limits = threshold(losses, MIN_LOSS_SPREAD), threshold(norms, MIN_NORM_SPREAD * statistics.median(norms))
        reasons = []
        if loss > limits[0]:
            reasons.append(f"loss {loss:.4g} is above {limits[0]:.4g}, the median of {len(losses)} steps is {statistics.median(losses):.4g}")
        if grad_norm > max(limits[1], self._max_norm):
            reasons.append(f"gradient norm {grad_norm:.4g} is above {limits[1]:.4g}, the median is {statistics.median(norms):.4g}")
        return "; ".join(reasons)


@torch.no_grad()
def rank_documents(model: Decoder, micro_batches: Sequence[Batch], objective: Objective) -> list[dict[str, Any]]:
    """Every document of a step: {"micro_batch", "document" (both from 1), "loss" (its mean), "supervised", "tokens"}, the highest loss first.

    One forward pass; an objective sees one document's weights at a time.
    """
    found = []
    for number, host_batch in enumerate(micro_batches, start=1):
        batch = host_batch.to(model.device)
        hidden_TD = model.hidden(batch)
        starts, lengths = batch.starts_S.tolist(), batch.lengths()
        for document, (start, length) in enumerate(zip(starts, lengths, strict=True), start=1):
            weights_T = torch.zeros_like(batch.weights_T)
            weights_T[start : start + length] = batch.weights_T[start : start + length]
            loss = objective(hidden_TD, model.lm_head, replace(batch, weights_T=weights_T))
            found.append({
                "micro_batch": number,
                "document": document,
                "loss": _number(loss.sum) / loss.count if loss.count else None,
                "supervised": int(weights_T.gt(0).sum()),
                "tokens": host_batch.tokens_T[start : start + length].tolist(),
            })  # fmt: skip
    return sorted(found, key=lambda entry: -1.0 if entry["loss"] is None else entry["loss"], reverse=True)


def write_suspects(folder: Path, step: int, reason: str, documents: Sequence[dict[str, Any]], describe: Describe | None = None) -> None:
    """Append up to LISTED documents to <folder>/suspects.jsonl, a JSON object a line: step, reason, of (documents in all), and the entry's own.

    A document whose loss is not finite has "loss": null.
    """
    lines = []
    for entry in documents[:LISTED]:
        loss = entry.get("loss")
        finite = {"loss": loss if loss is not None and abs(loss) < float("inf") else None}
        known = describe(entry["tokens"]) if describe is not None else {}
        lines.append(
            json.dumps({"step": step, "reason": reason, "of": len(documents), **entry, **finite, **known}, ensure_ascii=False, allow_nan=False)
        )
    with (folder / SUSPECTS).open("a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def _number(tensor: Tensor) -> float:
    return float(tensor.detach())
