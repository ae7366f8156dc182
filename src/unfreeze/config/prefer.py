"""The fields of `unfreeze prefer`: those of sft, and what is minimised over pairs or labels."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from unfreeze.config import sft
from unfreeze.config.parse import Files, Frozen
from unfreeze.core.field import about

BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0, "orpo": 0.1}
"""Of each loss: DPO's and KTO's papers and TRL have 0.1; SimPO's authors 2.0 to 2.5; ORPO's lambda is 0.1."""
ADAPTER_RATE, ALL_RATE = 2e-5, 1e-6
ONLY = {
    "gamma": ("simpo",),
    "label_smoothing": ("dpo",),
    "nll": ("dpo", "ipo", "simpo"),
    "reference": ("dpo", "ipo", "kto"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Fields of some losses alone."""


class Preference(Frozen):
    """What is minimised over answers that are compared (objectives/preference.py has the formulas)."""

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
            "for dpo, ipo and kto. live: the starting model is asked in each step; cached: once before the"
            " first (faster, no copy of the model)"
        ),
        json_schema_extra=about("Preference", was="reference"),
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description=(
            "dpo, ipo, kto: strength of the reference; simpo, orpo: weight of the comparison. 0.1 as in the"
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
        description="for dpo: share of the pairs assumed to be swapped",
        json_schema_extra=about("Preference", was="label_smoothing"),
    )
    nll: float = Field(
        default=0.0,
        ge=0,
        description=(
            "for dpo, ipo and simpo: weight of the chosen answer's own loss, which keeps it likely. Llama 3"
            " uses 0.2"
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
        description="for kto: weight of answers whose label is false; balance it with the numbers of both",
        json_schema_extra=about("Preference", was="undesirable_weight"),
    )


class Data(sft.Data):
    """Rows of two answers, or of an answer with a label."""

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
            "prompt and answer longer than sequence_length: cut the tail or head, stop, or drop the row"
        ),
    )


class Optimizer(sft.Optimizer):
    """With the rates of preference, a tenth of sft's and less."""

    learning_rate: float = Field(
        default=ADAPTER_RATE, gt=0, description="peak learning rate; with train = all the default is 1e-6"
    )


class Config(sft.Config):
    """Everything a preference run depends on."""

    data: Data
    optimizer: Optimizer = Optimizer()
    preference: Preference = Preference()

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As sft's, with beta and the learning rate of this loss. A field of another loss is an error."""
        loss = fields.get("preference.loss", "dpo")
        for name, losses in ONLY.items():
            if f"preference.{name}" in fields and loss not in losses:
                raise ValueError(
                    f"preference.{name} is of loss = {' or '.join(losses)} alone: remove it, or change loss"
                )
        rate = ALL_RATE if fields.get("train") == "all" else ADAPTER_RATE
        own = {"preference.beta": BETA.get(str(loss), 0.1), "optimizer.learning_rate": rate}
        return super().completed({**own, **fields})
