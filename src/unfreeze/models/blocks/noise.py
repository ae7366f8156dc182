"""Draw experts in training: the K largest of log(q) / τ + g, with g of Gumbel's distribution.

They are K draws without replacement in proportion to q^(1/τ), the order of their values that of the draws:
expert a first with p_a, then b with p_b / (1 - p_a), and so on. For K = 1 this is the softmax of log(q) / τ.
q is what the router compares: its scores plus the selection bias less its mean, if it has one; none is below
1e-9.
Sources: Gumbel-top-k, arXiv:1903.06059; Plackett and Luce.

T tokens of a micro-batch, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unfreeze.core.batch import send
from unfreeze.core.draws import Draw, number

SMALLEST = 1e-9


def gumbel(key: int, layer: int, tokens: int, experts: int) -> Tensor:
    """g [T, E], float32 on the host: a function of its arguments alone."""
    generator = torch.Generator().manual_seed(number(key, layer))
    waits_TE = torch.empty(tokens, experts, dtype=torch.float64).exponential_(generator=generator)
    return waits_TE.log().neg().float()


@dataclass
class Noise:
    """Perturbs the scores of a micro-batch's tokens, or of those of its rows.

    It depends on the key, the layer, the token's place in the micro-batch and the expert, not on how the pass
    is cut into chunks, so a step that is run again draws the same.
    """

    draw: Draw
    tokens: int
    rows: slice | Tensor = field(default_factory=lambda: slice(None))

    def part(self, rows: slice) -> Noise:
        """Return the noise of these rows."""
        return Noise(self.draw, self.tokens, rows)

    def at(self, places_E: Tensor) -> Noise:
        """Return the noise of these of its tokens, int64 on the host."""
        assert isinstance(self.rows, slice)
        return Noise(self.draw, self.tokens, (self.rows.start or 0) + places_E)

    def __call__(self, layer: int, scores_TE: Tensor) -> Tensor:
        """log(q) / τ + g; -inf stays -inf (experts of groups that are left out)."""
        g_TE = gumbel(self.draw.key, layer, self.tokens, scores_TE.shape[1])[self.rows]
        logs_TE = scores_TE.clamp(min=SMALLEST).log() / self.draw.temperature
        logs_TE = logs_TE + send(g_TE, scores_TE.device)
        return logs_TE.masked_fill(scores_TE.isneginf(), float("-inf"))
