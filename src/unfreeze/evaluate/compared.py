"""Held-out pairs: the preference loss and its metrics, as sums over examples that are divided once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.evaluate.by_row import ByRow, RowSums, example_rows
from unfreeze.evaluate.perplexity import dealt_batches
from unfreeze.models import Decoder
from unfreeze.objectives.preference import CHOSEN, Objective
from unfreeze.parallel.processes.collectives import ALONE, Group

LIKELIER = "logp_likelier"
"""Per-row log-probability of the likelier answer; for labelled answers, where one is desirable."""


@dataclass(frozen=True)
class Compared:
    """The mean loss and the mean metrics (accuracy, …) of all held-out examples."""

    loss: float
    tokens: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    by_row: ByRow | None = None

    @property
    def scores(self) -> dict[str, float | None]:
        """Return the scores of an eval event."""
        scores = {"loss": self.loss, **{name: self.metrics[name] for name in ("accuracy", "margin")}}
        if self.by_row is None or LIKELIER not in self.by_row.sums:
            return {**scores}
        return {**scores, LIKELIER: self.by_row.mean(LIKELIER)}


@torch.no_grad()
def compared(
    model: Decoder, batches: Iterable[Batch], group: Group = ALONE, *, objective: Objective
) -> Compared:
    """Return sum_e loss_e / E over all batches, dealt out to the processes; every process gets the result.

    Raises DataError if nothing is held out. The model is unchanged (Decoder.looking).
    """
    sums: dict[str, float] = {"loss": 0.0, "examples": 0.0, "tokens": 0.0}
    by_row = RowSums(largest=(LIKELIER,))
    with model.looking():
        for host_batch in dealt_batches(batches, group):
            batch = host_batch.to(model.device)
            loss = objective(model.hidden(batch), model.lm_head, batch)
            # a process that has no batch left still computes with the others, but counts nothing
            counts = float(bool(host_batch.weights_T.any()))
            new = {"loss": loss.sum, "examples": loss.count, **loss.metrics}
            new["tokens"] = float(host_batch.weights_T.gt(0).sum())
            for name, value in new.items():
                sums[name] = sums.get(name, 0.0) + counts * float(value)
            if counts and loss.each is not None and (row_E := example_rows(host_batch)) is not None:
                ones_E = torch.ones(len(row_E))
                for name, value_E in {"loss": loss.each, **loss.scores}.items():
                    by_row.add(row_E, name, value_E, wanted_of(host_batch) if name == LIKELIER else ones_E)
    if group.size > 1:
        total = torch.tensor(list(sums.values()), dtype=torch.float64, device=model.device)
        group.sum_([total])
        sums = dict(zip(sums, total.tolist(), strict=True))
    examples, tokens, loss = sums.pop("examples"), sums.pop("tokens"), sums.pop("loss")
    if not examples:
        raise DataError(
            "no pair is held out; at least one is needed", next="unfreeze data show FILE --model MODEL"
        )
    means = {name: value / examples for name, value in sums.items()}
    return Compared(loss / examples, int(tokens), means, by_row.gathered(group, model.device))


def wanted_of(batch: Batch) -> torch.Tensor:
    """Return [E]: 1 for a pair or a desirable answer, 0 for an undesirable one."""
    side_S, number_S = batch.documents["side"], batch.documents["example"]
    wanted_E = torch.zeros(batch.examples or 0)
    wanted_E[number_S[(side_S == CHOSEN) & (number_S >= 0)]] = 1.0
    return wanted_E
