"""The routed experts of a layer through their merged weights, one expert at a time.

E experts, D model width, I expert width; [N, M] a matrix, [2I, D] or [D, I].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.lora import ExpertLowRank
from unfreeze.adapters.merge_aware.matrix import Rounding, product, rounded
from unfreeze.kernels.expert_mlp.straight import straight_expert_mlp
from unfreeze.kernels.expert_mlp.workspace import Computed
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.swiglu.activation import Activation
from unfreeze.models.blocks.experts import Experts
from unfreeze.quant.codec import Packed


@dataclass
class RoundedStack(Computed):
    """Ŵ_e = Q(W_e + scale · B_e A_e) of E experts.

    A [E, P R, M], B [E, N, R]; P = 2 with an activation of gate and up: the first R rows of A and the first
    I of B are gate's. The rows of W and Ŵ are laid out as the activation has them. activation None: P = 1.
    """

    base: Tensor | Packed
    A: Tensor
    B: Tensor
    scale: float
    rounding: Rounding
    activation: Activation | None = None

    def __post_init__(self) -> None:
        E, N, M = self.base.shape
        self.shape, self.device = (E, N, M), self.A.device

    def fill(self, experts: Sequence[int], out: Tensor) -> None:
        for position, expert in enumerate(experts):
            rounded(self.base[expert], self.change(expert), self.rounding, out[position])

    def change(self, expert: int) -> Tensor:
        """ΔW float32 [N, M]."""
        A, B = self.A[expert], self.B[expert]
        if self.activation is None:
            return product(A, B, self.scale)
        whole = torch.empty(self.shape[1:], device=self.device)
        for rows, a, b in zip(self.activation.split(whole, 0), A.chunk(2), B.chunk(2), strict=True):
            rows.copy_(product(a, b, self.scale))
        return whole


class RoundedExperts(ExpertLowRank):
    """The factors of an ExpertLowRank, the same parameters, for experts trained as they will be merged.

    roundings: projection -> its rounding; one that is not named has ordinary LoRA.
    """

    def __init__(self, adapter: ExpertLowRank, roundings: Mapping[str, Rounding]):
        nn.Module.__init__(self)
        self.names, self.roundings = adapter.names, dict(roundings)
        self.gate_up_rank, self.down_rank = adapter.gate_up_rank, adapter.down_rank
        self.scale, self.down_scale = adapter.scale, adapter.down_scale
        self.gate_up_A, self.gate_up_B = adapter.gate_up_A, adapter.gate_up_B
        self.down_A, self.down_B = adapter.down_A, adapter.down_B

    def output(
        self,
        experts: Experts,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None,
        gate_up_bias: Tensor | None,
    ) -> Tensor:
        """The experts' whole output (models/blocks/experts.py: WholeExpertAdapter)."""
        return straight_expert_mlp(
            x_TD,
            ids_TK,
            weights_TK,
            *self.merged(experts),
            self.factors(),
            reuse,
            experts.activation,
            gate_up_bias,
        )

    def merged(self, experts: Experts) -> tuple[Any, Any]:
        """Ŵ of gate_up and of down: RoundedStack, or the base's weight of a projection that is not rounded."""
        gate_up, down = experts.gate_up_proj.value(), experts.down_proj.value()
        first, second = self.roundings.get(experts.first), self.roundings.get("down_proj")
        both = experts.activation if experts.before > 1 else None
        if first is not None and self.gate_up_A is not None and self.gate_up_B is not None:
            gate_up = RoundedStack(gate_up, self.gate_up_A, self.gate_up_B, self.scale, first, both)
        if second is not None and self.down_A is not None and self.down_B is not None:
            down = RoundedStack(down, self.down_A, self.down_B, self.down_scale, second)
        return gate_up, down
