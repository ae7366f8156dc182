"""Batch and Loss, the two records that all parts of training exchange.

T tokens of a step (all documents end to end), S sequences (documents).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unfreeze.core.torch_types import ints


def send(host: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on `device`, without waiting for the copy.

    To CUDA it goes through pinned memory: a copy from pageable memory would stop the host.
    """
    if torch.device(device).type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """One flat packed batch: S documents laid end to end in one dimension of T tokens. There is no padding.

    tokens_T     int64, the inputs.
    targets_T    int64, targets_T[t] is the token that should follow tokens_T[t] (already shifted; see
                 data/packing/batches.py).
    weights_T    float32, 0 where position t is not supervised (prompt tokens, the last position of a
                 document).
    positions_T  int64, restarts at 0 with each document; what rotary embeddings see.
    starts_S     int64 on the *host*: index in T where each document begins, starts_S[0] == 0. Document
                 boundaries are known on the host; reading them from the device would synchronise.
    found        a cache: (weights_T, the positions where it is above 0). `to` fills it while the batch is on
                 the host, so that the device is not synchronised. Read it through supervised(); it is valid
                 only while weights_T is that same tensor.
    extras       name -> a tensor with T rows, for objectives that read more than targets: a teacher's
                 log-probabilities, for example.
    documents    name -> a tensor with S entries, on the *host*: what is known of whole documents, such as
                 which answer of a pair one is.
    examples     what the loss is divided by where it counts whole examples: pairs of answers. None: it counts
                 tokens, and the divisor is the sum of weights_T.
    """

    tokens_T: Tensor
    targets_T: Tensor
    weights_T: Tensor
    positions_T: Tensor
    starts_S: Tensor
    found: tuple[Tensor, Tensor] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    documents: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    examples: int | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with everything but starts_S and documents on `device`."""
        names = ("tokens_T", "targets_T", "weights_T", "positions_T")
        sent = {name: send(getattr(self, name), device) for name in names}
        extras = {name: send(tensor, device) for name, tensor in self.extras.items()}
        found = (sent["weights_T"], send(self.supervised(), device))
        return replace(self, **sent, found=found, extras=extras)

    def supervised(self) -> Tensor:
        """int64: the positions whose weight is above 0, on the batch's device.

        Already known if `to` sent the batch.
        """
        if self.found is not None and self.found[0] is self.weights_T:
            return self.found[1]
        return self.weights_T.gt(0).nonzero().squeeze(1)

    def per_document(self, values_N: Tensor) -> Tensor:
        """[S]: the sum over each document, in a fixed order, so with the same bits each time.

        values_N: a value for each position of supervised().
        """
        rows_N = self.supervised()
        starts_S = send(self.starts_S, rows_N.device)
        first_S = torch.searchsorted(rows_N, starts_S)
        end_S = torch.cat([first_S[1:], first_S.new_full((1,), len(rows_N))])
        return torch.segment_reduce(values_N, "sum", lengths=end_S - first_S, unsafe=True)

    @property
    def count(self) -> float:
        """What the batch adds to the divisor of its step: its examples, or the sum of weights_T."""
        return float(self.weights_T.sum()) if self.examples is None else float(self.examples)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens_T.numel()

    def lengths(self) -> list[int]:
        """Length of each document, S numbers that sum to T."""
        starts = ints(self.starts_S)
        return [end - start for start, end in zip(starts, [*starts[1:], self.num_tokens], strict=True)]


@dataclass
class Loss:
    """A SUM over supervised tokens, and the sum of their weights; or over examples, and how many there are.

    The sum is divided once, by the count over all micro-batches and devices, in train/step.py.

    sum      float32 scalar, differentiable.
    count    sum of weights_T (Batch.count). Counts add over micro-batches and devices; means do not.
    metrics  further SUMS over the same tokens (e.g. {"correct": …}); divided by the same global count when
             logged.
    each     the loss of each example, in the order of Batch.documents["example"], where it counts examples;
             where it counts tokens and no gradient is asked for, the sum of each document, [S].
    scores   name -> a value for each of the same examples: measures of held-out rows.
    count and metrics are numbers, or scalars on the device: train/step.py reads all of them at once, at the
    end of a step.
    """

    sum: Tensor
    count: float | Tensor
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict[str, float | Tensor])
    each: Tensor | None = None
    scores: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
