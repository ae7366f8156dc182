"""The fields of `unfreeze prefer`: those of sft, and what is minimised over pairs or labels."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from unfreeze.config import sft
from unfreeze.config.parse import Files, Frozen
from unfreeze.config.training import FIRST, FLAT, HELP

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
    )
    reference: Literal["live", "cached"] = Field(
        default="live",
        description=(
            "of dpo, ipo and kto: live asks the model as it began in each step; cached once before the first,"
            " and keeps the numbers in the run: steps are faster, and train = all needs no copy of the model"
        ),
    )
    beta: float = Field(
        default=0.1,
        gt=0,
        description=(
            "how strongly the reference holds (dpo, ipo, kto: higher is nearer to it), or the weight of the"
            " comparison (simpo, orpo); 0.1, of simpo 2.0, as their papers have it"
        ),
    )
    gamma: float = Field(
        default=1.0,
        ge=0,
        description="of simpo: the margin by which the chosen answer should win; its authors: half of beta",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="of dpo: the share of pairs that are taken to be swapped"
    )
    nll: float = Field(
        default=0.0,
        ge=0,
        description=(
            "of dpo, ipo and simpo: weight of fine-tuning on the chosen answer, -log p / tokens, added to the"
            " loss; without it the chosen answer may become less likely, too. Llama 3 has 0.2, RPO's paper 1"
        ),
    )
    desirable_weight: float = Field(
        default=1.0, gt=0, description="of kto: the weight of answers whose label is true"
    )
    undesirable_weight: float = Field(
        default=1.0,
        gt=0,
        description=(
            "of kto: the weight of the others; its authors keep (true ones · desirable_weight) / (others ·"
            " undesirable_weight) within 1 to 1.33"
        ),
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
        description="prompt and answer over sequence_length: cut the tail or head, stop, or drop the row",
    )


class Optimizer(sft.Optimizer):
    """With the rates of preference, a tenth of sft's and less."""

    learning_rate: float = Field(
        default=ADAPTER_RATE,
        gt=0,
        description=(
            "peak learning rate; of adapters 2e-5, a tenth of sft's; for train = all the default is 1e-6 (as"
            " TRL's DPO)"
        ),
    )


class Config(sft.Config):
    """Everything a preference run depends on."""

    FLAT: ClassVar[dict[str, str]] = FLAT | {name: f"preference.{name}" for name in Preference.model_fields}
    HELP: ClassVar[dict[str, tuple[str, ...]]] = {"Preference": tuple(Preference.model_fields), **HELP}
    FIRST: ClassVar[tuple[str, ...]] = ("loss", *FIRST)

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
                    f"{name} is of loss = {' or '.join(losses)} alone: remove it, or change loss"
                )
        rate = ALL_RATE if fields.get("train") == "all" else ADAPTER_RATE
        own = {"preference.beta": BETA.get(str(loss), 0.1), "optimizer.learning_rate": rate}
        return super().completed({**own, **fields})
