"""The routed experts of a layer through their merged weights, one expert at a time.

E experts, D model width, I expert width; [N, M] a matrix, [2I, D] or [D, I].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.lora import ExpertLowRank
from unfreeze.adapters.merge_aware.codes import FEW, Kept
from unfreeze.adapters.merge_aware.matrix import Lengths, Rounding, product, rounded, rounded_codes
from unfreeze.kernels.expert_mlp import ExpertFactors, expert_mlp
from unfreeze.kernels.expert_mlp.straight import straight_expert_mlp
from unfreeze.kernels.expert_mlp.workspace import Computed
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.swiglu.activation import Activation
from unfreeze.models.blocks.experts import Experts, WholeExpertAdapter
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
        self._lengths: dict[int, Lengths] = {}  # of each expert: found in forward, used again in backward
        E, N, M = self.base.shape
        self.shape, self.device = (E, N, M), self.A.device

    def fill(self, experts: Sequence[int], out: Tensor) -> None:
        for position, expert in enumerate(experts):
            known = self._lengths.setdefault(expert, {})
            rounded(self.base[expert], self.change(expert), self.rounding, out[position], known)

    def codes(self) -> Packed:
        """All of it, in its format."""
        every = [rounded_codes(self.base[e], self.change(e), self.rounding) for e in range(self.shape[0])]
        names = every[0].parts
        return Packed(every[0].codec, {n: torch.stack([own.parts[n] for own in every]) for n in names})

    def change(self, expert: int) -> Tensor:
        """ΔW float32 [N, M]."""
        A, B = self.A[expert], self.B[expert]
        if self.activation is None:
            return product(A, B, self.scale)
        whole = torch.empty(self.shape[1:], device=self.device)
        for rows, a, b in zip(self.activation.split(whole, 0), A.chunk(2), B.chunk(2), strict=True):
            rows.copy_(product(a, b, self.scale))
        return whole


class RoundedExperts(ExpertLowRank, WholeExpertAdapter):
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
        self.gate_up_start = self.down_start = None  # refused together (config/lora.py)
        self.codes: Kept[tuple[Tensor | Packed, Tensor | Packed]] = Kept()

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
        if ids_TK.numel() <= FEW * len(experts.held) and (kept := self.kept(experts)) is not None:
            gate_up, down, factors = kept
            return expert_mlp(
                x_TD,
                ids_TK,
                weights_TK,
                gate_up,
                down,
                factors,
                impl=experts.impl,
                reuse=reuse,
                activation=experts.activation,
                gate_up_bias=gate_up_bias,
            )
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

    def kept(self, experts: Experts) -> tuple[Tensor | Packed, Tensor | Packed, ExpertFactors] | None:
        """Ŵ of gate_up and down and the factors of what is not rounded, for a pass that is only looked at."""
        if not self.codes.wanted:
            return None

        def compute() -> tuple[Tensor | Packed, Tensor | Packed]:
            gate_up, down = (
                weight.codes() if isinstance(weight, RoundedStack) else weight
                for weight in self.merged(experts)
            )
            return gate_up, down

        own = (self.gate_up_A, self.gate_up_B, self.down_A, self.down_B)
        weights = self.codes.get(own, (self.scale, self.down_scale), compute)
        none: dict[str, Any] = {}
        if experts.first in self.roundings:
            none |= {"gate_up_A": None, "gate_up_B": None}
        if "down_proj" in self.roundings:
            none |= {"down_A": None, "down_B": None}
        return *weights, replace(self.factors(), **none)

    def merged(self, experts: Experts) -> tuple[Any, Any]:
        """Ŵ of gate_up and down: a RoundedStack, or the base's weight if it is not rounded."""
        gate_up, down = experts.gate_up_proj.value(), experts.down_proj.value()
        first, second = self.roundings.get(experts.first), self.roundings.get("down_proj")
        both = experts.activation if experts.before > 1 else None
        if first is not None and self.gate_up_A is not None and self.gate_up_B is not None:
            gate_up = RoundedStack(gate_up, self.gate_up_A, self.gate_up_B, self.scale, first, both)
        if second is not None and self.down_A is not None and self.down_B is not None:
            down = RoundedStack(down, self.down_A, self.down_B, self.down_scale, second)
        return gate_up, down
