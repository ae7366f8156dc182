"""An output head that is more than W h. T tokens, D model width, V vocabulary.

Losses, scores and samples all go through the head, so an operation added here reaches them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unfreeze.kernels.linear_cross_entropy import DenseHead
from unfreeze.kernels.linear_cross_entropy.softcap import softcapped
from unfreeze.kernels.recompute import Reuse
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.saved import Skip
from unfreeze.quant.codec import Codec

if TYPE_CHECKING:
    from unfreeze.kernels.decode_step.program import Row
    from unfreeze.models.blocks.recording import Recording


class Head(Linear):
    """z = factor · (W h + adapter(h)), then c · tanh(z / c): logits within ±c.

    factor   1 / logits_scaling (Granite)
    softcap  c (Gemma 2, arXiv:2408.00118, section 2); None: z itself
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        factor: float = 1.0,
        softcap: float | None = None,
        codec: Codec | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        held: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, codec=codec, dtype=dtype, device=device, held=held)
        self.factor, self.softcap = factor, softcap

    def forward(self, x_TI: Tensor, reuse: Reuse | Skip | None = None) -> Tensor:
        # scale the narrow side: D elements per token, not V
        logits_TV = self.product(x_TI if self.factor == 1 else x_TI * self.factor, reuse)
        return logits_TV if self.softcap is None else softcapped(logits_TV, self.softcap)

    def product(self, x_TI: Tensor, reuse: Reuse | Skip | None = None) -> Tensor:
        """W h + adapter(h): checkpoints call this lm_head."""
        return super().forward(x_TI, reuse)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """The logits."""
        logits = super().record(to, x, factor=self.factor)
        if self.softcap is not None:
            cap = self.softcap

            def call(rows: int) -> None:
                logits.tensor[:rows] = softcapped(logits.tensor[:rows], cap)

            to.program.call(call)
        return logits

    def dense_head(self) -> DenseHead | None:
        plain = super().dense_head()
        return None if plain is None else plain._replace(factor=self.factor, softcap=self.softcap)
