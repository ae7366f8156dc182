"""Table [experts] of a pretraining run: how tokens choose experts while it trains, and the loss beside it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from unfreeze.config.parse import Frozen
from unfreeze.core.field import about


class Experts(Frozen):
    """Choice of experts in training, and their auxiliary loss."""

    choice: Literal["best", "drawn"] = Field(
        default="best",
        description=(
            "experts of a token in training: those of the best scores, or drawn in proportion to the scores."
            " Validation and answers always take the best"
        ),
        json_schema_extra=about("Learning", since="0.2"),
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description="with choice drawn: shares are score^(1 / temperature); towards 0 they become the best",
        json_schema_extra=about("Learning", since="0.2"),
    )
    balance_loss: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the auxiliary loss that spreads tokens over experts (Switch, OLMoE: 0.01); 0: none."
            " With several micro-batches it costs a forward pass a step"
        ),
        json_schema_extra=about("Learning", since="0.2"),
    )

    @model_validator(mode="after")
    def _consistent(self) -> Experts:
        if self.temperature != 1 and self.choice == "best":
            raise ValueError(
                f"experts.temperature = {self.temperature:g} has no effect with experts.choice = best: give"
                " --experts.choice drawn, or leave the temperature out"
            )
        return self
