"""The order in which an epoch visits documents: a pure function of (seed, epoch).

So two numbers suffice for a cursor. Axes: N documents, F files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from unfreeze.core.errors import ConfigError


class Order(Protocol):
    """An order of visiting documents.

    identity: everything that must be unchanged for an epoch to have the same order. Plain JSON, stored in the
    cursor.
    """

    identity: dict[str, Any]

    def __call__(self, epoch: int) -> list[int]: ...


class Shuffled:
    """Every document once per epoch, in a new order each epoch."""

    def __init__(self, count: int, seed: int):
        self.count, self.identity = count, {"seed": seed}

    def __call__(self, epoch: int) -> list[int]:
        return np.random.default_rng([self.identity["seed"], epoch]).permutation(self.count).tolist()


class Mixed:
    """Visit file f weights_F[f] times per epoch.

    Weight 2 shows each of its documents twice; 0.25 shows a new quarter of them each epoch.

    Each file is an endless sequence of its own shuffled passes, and an epoch takes the next weight *
    documents from it. So over any number of epochs, the counts of two documents of a file differ by at most
    one. Then the epoch is shuffled as a whole.
    Raises ConfigError if the weights don't match the files or would select no documents.
    """

    def __init__(self, sources_N: np.ndarray, weights_F: Sequence[float], seed: int):
        files = int(sources_N.max(initial=-1)) + 1
        if len(weights_F) < files:
            raise ConfigError(
                f"data.weights has {len(weights_F)} numbers for {files} data files",
                next="one weight per file, in the same order",
            )
        if not all(np.isfinite(weight) and weight >= 0 for weight in weights_F) or not any(
            weight > 0 for weight in weights_F
        ):
            raise ConfigError(
                f"data.weights is {list(weights_F)}: finite numbers, 0 or more, not all 0",
                next="--data.weights 1 0.5",
            )
        self._members = [np.flatnonzero(sources_N == file) for file in range(len(weights_F))]
        self._weights = list(weights_F)
        self.identity: dict[str, Any] = {"seed": seed, "data_weights": self._weights}

    def __call__(self, epoch: int) -> list[int]:
        seed = self.identity["seed"]
        chosen = np.concatenate([self._taken(file, epoch) for file in range(len(self._weights))])
        return np.random.default_rng([seed, epoch]).permutation(chosen).tolist()

    def _taken(self, file: int, epoch: int) -> np.ndarray:
        """Return an epoch's share of this file's endless sequence of documents.

        Elements floor(weight * n * epoch) up to floor(weight * n * (epoch + 1)).
        """
        members, weight = self._members[file], self._weights[file]
        if not len(members):
            return members
        begin, end = (int(weight * len(members) * e) for e in (epoch, epoch + 1))
        passes = {
            number: self._pass(file, number)
            for number in range(begin // len(members), -(-end // len(members)))
        }
        row = np.concatenate([*passes.values(), members[:0]])
        offset = (begin // len(members)) * len(members)
        return row[begin - offset : end - offset]

    def _pass(self, file: int, number: int) -> np.ndarray:
        return np.random.default_rng([self.identity["seed"], file, number]).permutation(self._members[file])
