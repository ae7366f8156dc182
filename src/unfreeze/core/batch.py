"""Batch and Loss, the two records that the parts of training exchange.

T tokens of a step (all documents end to end), S sequences (documents).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unfreeze.core.draws import Draw
from unfreeze.core.torch_types import ints


def send(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy a host tensor to `device` without waiting.

    For CUDA the tensor is pinned first: a copy from pageable memory would block the host.
    """
    if torch.device(device).type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """One packed batch: S documents end to end in one dimension of T tokens, without padding.

    tokens_T     int64, the inputs.
    targets_T    int64, targets_T[t] is the token that should follow tokens_T[t] (already shifted; see
                 data/packing/batches.py).
    weights_T    float32, 0 where position t is not supervised (prompt tokens, the last position of a
                 document).
    positions_T  int64, restarts at 0 with each document; input of the rotary embeddings.
    starts_S     int64 on the *host*: index in T where each document starts, starts_S[0] == 0. Document
                 boundaries are known on the host; reading them from the device would synchronise.
    nonzero      a cache: (weights_T, the positions where it is above 0). `to` fills it while the batch is on
                 the host, so that the device is not synchronised. Read it through supervised(); it is valid
                 only while weights_T is that same tensor.
    extras       name -> a tensor with T rows, for objectives that read more than targets: for example a
                 teacher's log-probabilities.
    documents    name -> a tensor with S entries, on the *host*: facts about whole documents, such as their
                 side in a pair of answers.
    draw         key of the noise that routers choose experts with; None: they take the best
    examples     divisor of a loss over examples, such as pairs of answers. None: the loss is over tokens, and
                 its divisor is the sum of weights_T.
    """

    tokens_T: Tensor
    targets_T: Tensor
    weights_T: Tensor
    positions_T: Tensor
    starts_S: Tensor
    nonzero: tuple[Tensor, Tensor] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    documents: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    examples: int | None = None
    draw: Draw | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Copy the batch to `device`, except starts_S and documents."""
        names = ("tokens_T", "targets_T", "weights_T", "positions_T")
        sent = {name: send(getattr(self, name), device) for name in names}
        extras = {name: send(tensor, device) for name, tensor in self.extras.items()}
        nonzero = (sent["weights_T"], send(self.supervised(), device))
        return replace(self, **sent, nonzero=nonzero, extras=extras)

    def supervised(self) -> Tensor:
        """int64 positions whose weight is above 0, on the batch's device.

        Cached if `to` copied the batch.
        """
        if self.nonzero is not None and self.nonzero[0] is self.weights_T:
            return self.nonzero[1]
        return self.weights_T.gt(0).nonzero().squeeze(1)

    def per_document(self, values_N: Tensor) -> Tensor:
        """Sum over each document [S], in a fixed order, so that it is bit-identical each time.

        values_N: one value per position of supervised().
        """
        rows_N = self.supervised()
        starts_S = send(self.starts_S, rows_N.device)
        first_S = torch.searchsorted(rows_N, starts_S)
        end_S = torch.cat([first_S[1:], first_S.new_full((1,), len(rows_N))])
        return torch.segment_reduce(values_N, "sum", lengths=end_S - first_S, unsafe=True)

    @property
    def count(self) -> float:
        """The batch's part of its step's divisor: its examples, or the sum of weights_T."""
        return float(self.weights_T.sum()) if self.examples is None else float(self.examples)

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return self.tokens_T.numel()

    def lengths(self) -> list[int]:
        """Lengths of the S documents; they sum to T."""
        starts = ints(self.starts_S)
        return [end - start for start, end in zip(starts, [*starts[1:], self.num_tokens], strict=True)]


@dataclass
class Loss:
    """A SUM over supervised tokens with the sum of their weights, or over examples with their number.

    The sum is divided once, by the count over all micro-batches and devices, in train/step.py.

    sum           float32 scalar, differentiable.
    count         sum of weights_T (Batch.count). Counts add over micro-batches and devices; means do not.
    metrics       further SUMS over the same tokens (e.g. {"correct": …}); divided by the same global count
                  when logged.
    metric_count  the divisor of `metrics`, if it is another one: a loss over answers has means over tokens.
    largest       name -> a number of 0 or more, of which the largest of all micro-batches and devices is
                  logged.
    each          of a loss over examples: one value per example, in the order of Batch.documents["example"].
                  Of a loss over tokens, without gradient only: the sum of each document, [S]. Else None.
    scores        name -> one value per example: measures of held-out rows.

    All but sum and each are numbers or scalars on the device. train/step.py reads them all at once at the end
    of a step.
    """

    sum: Tensor
    count: float | Tensor
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict[str, float | Tensor])
    metric_count: float | Tensor | None = None
    largest: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    each: Tensor | None = None
    scores: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
