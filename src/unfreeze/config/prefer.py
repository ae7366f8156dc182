"""Fields of `unfreeze prefer`: those of sft, and the loss over pairs or labels."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from unfreeze.config import sft
from unfreeze.config.parse import Files, Frozen
from unfreeze.core.field import about

BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0, "orpo": 0.1}
"""Default beta per loss. The papers of DPO and KTO and TRL use 0.1; SimPO 2.0 to 2.5; ORPO's lambda 0.1."""
ADAPTER_RATE, ALL_RATE = 2e-5, 1e-6
ONLY = {
    "gamma": ("simpo",),
    "label_smoothing": ("dpo",),
    "nll": ("dpo", "ipo", "simpo"),
    "reference": ("dpo", "ipo", "kto"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Fields that only some losses have."""


class Preference(Frozen):
    """The preference loss and its parameters (formulas: objectives/preference.py)."""

    loss: Literal["dpo", "ipo", "kto", "simpo", "orpo"] = Field(
        default="dpo",
        description=(
            "dpo, ipo: pairs against a reference; kto: answers with a label; simpo, orpo: pairs without a"
            " reference"
        ),
        json_schema_extra=about("Preference", alias="loss", first=True),
    )
    reference: Literal["live", "cached"] = Field(
        default="live",
        description=(
            "for dpo, ipo and kto. live: run the starting model in each step; cached: run it once before the"
            " first step (faster, no copy of the model)"
        ),
        json_schema_extra=about("Preference", was="reference"),
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description=(
            "dpo, ipo, kto: pull towards the reference; simpo, orpo: weight of the comparison. 0.1 as in the"
            " papers, 2.0 for simpo"
        ),
        json_schema_extra=about("Preference", was="beta"),
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        description="for simpo: margin by which the chosen answer should win; half of beta is usual",
        json_schema_extra=about("Preference", was="gamma"),
    )
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="for dpo: share of the pairs assumed to have swapped answers",
        json_schema_extra=about("Preference", was="label_smoothing"),
    )
    nll: float = Field(
        default=0.0,
        ge=0,
        description=(
            "for dpo, ipo and simpo: weight of the chosen answer's cross entropy, which keeps it likely."
            " Llama 3 uses 0.2"
        ),
        json_schema_extra=about("Preference", was="nll"),
    )
    desirable_weight: float = Field(
        default=1.0,
        gt=0,
        description="for kto: weight of answers whose label is true",
        json_schema_extra=about("Preference", was="desirable_weight"),
    )
    undesirable_weight: float = Field(
        default=1.0,
        gt=0,
        description="for kto: weight of answers whose label is false; balance it by the counts of both"
        " labels",
        json_schema_extra=about("Preference", was="undesirable_weight"),
    )


class Data(sft.Data):
    """Rows with two answers, or with one answer and a label."""

    files: Files = Field(
        min_length=1,
        description=(
            "files of rows (.jsonl .json .csv .parquet .arrow; prompt/chosen/rejected, chosen/rejected as"
            " messages, or for kto prompt/completion/label); folders, patterns such as 'd/*.jsonl', or"
            " hf:org/name[:config][:split]"
        ),
    )
    truncation: Literal["tail", "head", "error", "drop"] = Field(
        default="tail",
        description=(
            "prompt and answer longer than sequence_length: cut the tail or head, stop with an error,"
            " or drop the row"
        ),
    )


class Optimizer(sft.Optimizer):
    """Optimizer with default learning rates for preference: a tenth of sft's or less."""

    learning_rate: float = Field(
        default=ADAPTER_RATE, gt=0, description="peak learning rate; with train = all the default is 1e-6"
    )


class Config(sft.Config):
    """All fields of a preference run."""

    data: Data
    optimizer: Optimizer = Optimizer()
    preference: Preference = Preference()

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As in sft, with this loss's beta and learning rate. A field of another loss is an error."""
        loss = fields.get("preference.loss", "dpo")
        for name, losses in ONLY.items():
            if f"preference.{name}" in fields and loss not in losses:
                raise ValueError(
                    f"preference.{name} needs loss = {' or '.join(losses)}: remove it, or change loss"
                )
        rate = ALL_RATE if fields.get("train") == "all" else ADAPTER_RATE
        own = {"preference.beta": BETA.get(str(loss), 0.1), "optimizer.learning_rate": rate}
        return super().completed({**own, **fields})
