"""Held-out loss: sums over tokens, divided once (docs/why/trust.md N8). It does not depend on the batch size.

A mean of batch means would weight a token of a small batch more than one of a large batch.
Perplexity per token depends on the tokenizer. Bits per byte of text compare models with different ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from unfreeze.core.batch import Batch, Loss
from unfreeze.core.errors import DataError
from unfreeze.evaluate.by_row import ByRow, RowSums, example_rows
from unfreeze.models import Decoder
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import ALONE, Group


@dataclass(frozen=True)
class HeldoutLoss:
    """Held-out loss over all batches.

    loss           nats per supervised token
    perplexity     exp(loss)
    bits_per_byte  None if the number of bytes is unknown
    tokens         supervised ones
    by_row         the loss of each row; None if the batches do not contain row numbers
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    by_row: ByRow | None = None

    @property
    def scores(self) -> dict[str, float | None]:
        """Return the scores of an eval event."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


@torch.no_grad()
def heldout(
    model: Decoder,
    batches: Iterable[Batch],
    *,
    bytes_total: int | None = None,
    group: Group = ALONE,
    objective: Callable[[Tensor, nn.Module, Batch], Loss] = cross_entropy,
) -> HeldoutLoss:
    """Return the loss of all batches together. Raises DataError if no token carries weight.

    loss = sum_t w_t (-log p_t) / sum_t w_t
    bits_per_byte = sum_t w_t (-log p_t) / (ln 2 * bytes_total)

        batches      packed, on the host. The division of documents into batches changes nothing but rounding
                     (relative 1e-6 in float32)
        bytes_total  UTF-8 bytes of the supervised text of all batches
        group        the processes over which batches are dealt; each gets the result of all. Every process
                     calls it with equal batches, and makes the same number of passes
        objective    another -log probability of each target: objectives.corrector, for student and teacher
                     together

    Routing is as in training, and no random number is drawn.
    The experts' counts are restored, so that an evaluation counts nowhere (docs/why/trust.md M2).
    """
    # float64 on the host: a float32 running sum loses 1e-6 after about a thousand batches
    total, weight, tokens, by_row = 0.0, 0.0, 0, RowSums()
    with model.looking():
        for host_batch in dealt_batches(batches, group):
            batch = host_batch.to(model.device)
            loss = objective(model.hidden(batch), model.lm_head, batch)
            total, weight = total + float(loss.sum), weight + float(loss.count)
            tokens += int(host_batch.weights_T.gt(0).sum())
            if loss.each is not None and (row_S := example_rows(host_batch)) is not None:
                weights_N = batch.weights_T.index_select(0, batch.supervised())
                by_row.add(row_S, "loss", loss.each, batch.per_document(weights_N.double()))
    if group.size > 1:
        sums = torch.tensor([total, weight, tokens], dtype=torch.float64, device=model.device)
        group.sum_([sums])
        total, weight, tokens = sums.tolist()
    if not tokens:
        raise DataError(
            "0 tokens of the held-out batches are supervised; at least 1 is needed",
            next="inspect them: unfreeze data show FILE --model MODEL",
        )
    loss_mean = total / weight
    return HeldoutLoss(
        loss=loss_mean,
        perplexity=math.exp(loss_mean) if loss_mean < 700 else math.inf,  # exp(709) is the largest float64
        bits_per_byte=total / math.log(2) / bytes_total if bytes_total else None,
        tokens=int(tokens),
        by_row=by_row.gathered(group, model.device),
    )


def dealt_batches(batches: Iterable[Batch], group: Group) -> Iterator[Batch]:
    """Yield every `group.size`th batch, from `group.rank` on, equally many for each process.

    A process without a batch in the last round gets the first batch with weights of 0.
    """
    first: Batch | None = None
    count = 0
    for number, batch in enumerate(batches):
        first, count = first or batch, number + 1
        if number % group.size == group.rank:
            yield batch
    if first is not None and 0 < count % group.size <= group.rank:
        yield replace(first, weights_T=torch.zeros_like(first.weights_T))
