"""The fields of LoRA adapters."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Scaling = Literal["alpha/r", "alpha/sqrt(r)"]


def scale_of(rank: int, alpha: float, scaling: Scaling) -> float:
    """alpha / r, or alpha / sqrt(r) where rank-stabilised.

    Kalajdzievski 2023: there the update keeps its size as r grows.
    """
    return alpha / rank if scaling == "alpha/r" else alpha / math.sqrt(rank)


class LoraConfig(BaseModel):
    """Low-rank adapters: ΔW = scale · B A beside each target, the base frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16,
        description="columns of B = rows of A; 1 to 4096. 16: between PEFT's default (8) and QLoRA's (64)",
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0,
        description=(
            "numerator of the scale; above 0. 2 x rank, as recommended by Biderman et al. 2024,"
            " arXiv:2405.09673"
        ),
    )
    targets: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description=(
            "all-linear (every linear layer and all routed experts, not lm_head, embeddings, router),"
            " experts, attention, mlp (dense), shared_experts, or module names and globs such as *.q_proj or"
            " *.experts.down_proj. all-linear learns more than attention alone (Biderman et al. 2024,"
            " arXiv:2405.09673)"
        ),
    )
    experts_rank: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None,
        description=(
            "rank of the routed experts' adapters; none: as `rank`. Kimi-K2 has 0.637 B adapter parameters"
            " per unit of it"
        ),
    )
    scaling: Scaling = Field(
        default="alpha/r",
        description=(
            "scale of the update: alpha/r (LoRA), or alpha/sqrt(r) (rank-stabilised, for ranks above"
            " about 64)"
        ),
    )

    def rank_of(self, group: str) -> int:
        """experts_rank for routed experts where it is set, else rank."""
        return self.experts_rank if group == "experts" and self.experts_rank is not None else self.rank

    def scale_of(self, group: str) -> float:
        """The scale of a group's updates, by `scaling`."""
        return scale_of(self.rank_of(group), self.alpha, self.scaling)
