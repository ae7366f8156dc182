"""Held-out pairs: the loss of preference and its metrics, as sums over examples that are divided once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.evaluate.perplexity import dealt
from unfreeze.models import Decoder
from unfreeze.objectives.preference import Objective
from unfreeze.parallel.collectives import ALONE, Group


@dataclass(frozen=True)
class Compared:
    """Of all held-out examples: the mean loss, and the means of the objective's metrics (accuracy, …)."""

    loss: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def scores(self) -> dict[str, float | None]:
        """What an eval event says."""
        return {"loss": self.loss, **{name: self.metrics[name] for name in ("accuracy", "margin")}}


@torch.no_grad()
def compared(
    model: Decoder, batches: Iterable[Batch], group: Group = ALONE, *, objective: Objective
) -> Compared:
    """sum_e loss_e / E over all batches, dealt out among the processes; every process gets the result.

    Raises DataError where nothing is held out. The model is as before (Decoder.looking).
    """
    sums: dict[str, float] = {"loss": 0.0, "examples": 0.0, "tokens": 0.0}
    with model.looking():
        for host_batch in dealt(batches, group):
            batch = host_batch.to(model.device)
            loss = objective(model.hidden(batch), model.lm_head, batch)
            # where a process has none left it computes with the others, and counts nothing
            counts = float(bool(host_batch.weights_T.any()))
            new = {"loss": loss.sum, "examples": loss.count, **loss.metrics}
            new["tokens"] = float(host_batch.weights_T.gt(0).sum())
            for name, value in new.items():
                sums[name] = sums.get(name, 0.0) + counts * float(value)
    if group.size > 1:
        total = torch.tensor(list(sums.values()), dtype=torch.float64, device=model.device)
        group.sum_([total])
        sums = dict(zip(sums, total.tolist(), strict=True))
    examples, tokens, loss = sums.pop("examples"), sums.pop("tokens"), sums.pop("loss")
    if not examples:
        raise DataError("no pair is held out, at least 1 needed", next="unfreeze data show FILE")
    return Compared(loss / examples, int(tokens), {name: value / examples for name, value in sums.items()})
