"""The fields of `unfreeze distill`: those of sft, the teacher, and the divergence from it."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from unfreeze.config import sft
from unfreeze.config.endpoint import EndpointConfig
from unfreeze.config.parse import Folder, Frozen, ModelName
from unfreeze.config.training import portable
from unfreeze.core.field import about

BASE = "base"


class Distillation(Frozen):
    """Loss between the student's next-token distribution and the teacher's."""

    divergence: Literal["forward", "reverse", "jsd"] = Field(
        default="forward",
        description=(
            "forward: KL(teacher ‖ student), covers everything likely for the teacher; reverse: KL(student ‖"
            " teacher), keeps to its likeliest tokens (MiniLLM); jsd: between both, by beta"
        ),
        json_schema_extra=about("Teacher", was="divergence"),
    )
    beta: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="with jsd: the teacher's share of the mixture; 0.5 as in TRL",
        json_schema_extra=about("Teacher", was="beta"),
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description=(
            "temperature of both softmaxes; the loss is multiplied by its square. 1: the models' own"
            " distributions; 2 to 4 give unlikely tokens more weight"
        ),
        json_schema_extra=about("Teacher", alias="temperature"),
    )
    alpha: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "share of cross entropy with the data's tokens; 0: the teacher alone. loss = alpha · CE + (1"
            " - alpha) · temperature² · divergence"
        ),
        json_schema_extra=about("Teacher", alias="alpha"),
    )

    top_k: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="with prepare: likeliest tokens stored per position; all others are stored as one sum",
        json_schema_extra=about("Teacher", was="top_k", of_run=False),
    )
    coding: Literal["compact", "float32"] = Field(
        default="compact",
        description="with prepare: format on disk; at top_k 32 compact takes at most 120 bytes a token,"
        " float32 260",
        json_schema_extra=about("Teacher", was="coding", of_run=False),
    )

    on_policy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "share of the steps on the student's own answers, scored by the teacher (GKD's lambda); 0: the"
            " data's answers only"
        ),
        json_schema_extra=about("Teacher", was="on_policy"),
    )
    answer_temperature: float = Field(
        default=1.0,
        ge=0,
        description="with on_policy: temperature of the student's answers; 0: greedy",
        json_schema_extra=about("Teacher", was="answer_temperature"),
    )
    gamma: float | None = Field(
        default=None,
        gt=0,
        description=(
            "train the student to correct the teacher: p ∝ teacher · student^gamma, with the data's"
            " likelihood as loss; unset: distillation"
        ),
        json_schema_extra=about("Teacher", was="gamma"),
    )
    relations: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the MiniLMv2 loss: relations among queries, keys and values; 0: none; 0.1 helps short"
            " runs. Widths and heads of the models can differ"
        ),
        json_schema_extra=about("Teacher", was="relations"),
    )
    hidden: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the TinyBERT loss: squared difference of hidden states, through a trained projection;"
            " 0: none"
        ),
        json_schema_extra=about("Teacher", was="hidden"),
    )
    layers: str = Field(
        default="",
        pattern=r"^(\d+:\d+(,\d+:\d+)*)?$",
        description=(
            "for relations and hidden: layer pairs STUDENT:TEACHER, counted from 1, separated by commas;"
            " unset: the last layers"
        ),
        json_schema_extra=about("Teacher", was="layers"),
    )
    relation_heads: int | None = Field(
        default=None,
        ge=1,
        description=(
            "for relations: heads that queries, keys and values are divided into; unset: heads of 16 numbers,"
            " at most 64 heads"
        ),
        json_schema_extra=about("Teacher", was="relation_heads"),
    )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """`layers` as pairs of numbers."""
        pairs = [pair.split(":") for pair in self.layers.split(",") if pair]
        return tuple((int(own), int(their)) for own, their in pairs)

    @property
    def words(self) -> str:
        """The loss in words, such as 'forward KL, temperature 1'."""
        if self.gamma is not None:
            return f"the data's likelihood under teacher · student^{self.gamma:g}"
        kind = {"forward": "forward KL", "reverse": "reverse KL", "jsd": f"JSD with beta {self.beta:g}"}
        names_of_weights = {
            "alpha": "of cross entropy",
            "relations": "of relations",
            "hidden": "of hidden states",
        }
        weights = [
            f"{getattr(self, name):g} {of}" for name, of in names_of_weights.items() if getattr(self, name)
        ]
        own = [f"{self.on_policy:g} of the steps on its own answers"] * bool(self.on_policy)
        return ", ".join([kind[self.divergence], f"temperature {self.temperature:g}", *weights, *own])

    @property
    def mixture(self) -> float:
        """beta of objectives.divergence: 0 forward KL, 1 reverse KL."""
        return {"forward": 0.0, "reverse": 1.0, "jsd": self.beta}[self.divergence]


class Config(sft.Config):
    """All fields of a distillation run."""

    teacher: ModelName = Field(
        description=(
            "checkpoint folder, Hub id, run or adapter folder with the same tokenizer; base: the model"
            " without its adapters; a folder from --prepare; or, with --prepare, the address of an"
            " OpenAI-compatible server"
        ),
        json_schema_extra=about("Teacher", first=True),
    )
    prepare: Folder = Field(
        default="",
        description=(
            "run the teacher once and store its outputs in this folder, without training. A later run takes"
            " the folder as its teacher"
        ),
        json_schema_extra=about("Teacher", of_run=False),
    )
    distillation: Distillation = Distillation()
    endpoint: EndpointConfig = EndpointConfig()

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As in sft, plus checks of the distillation fields.

        The base as teacher needs adapters to switch off, and another term in the loss or a given adapter.
        """
        if "distillation.beta" in fields and fields.get("distillation.divergence") != "jsd":
            raise ValueError(
                "distillation.beta needs divergence = jsd: give --distillation.divergence jsd, or remove"
                " distillation.beta"
            )
        of_own = "distillation.answer_temperature" in fields
        if of_own and not fields.get("distillation.on_policy"):
            raise ValueError(
                "distillation.answer_temperature needs on_policy: give --distillation.on-policy 0.5, or"
                " remove distillation.answer_temperature"
            )
        if fields.get("distillation.on_policy") and fields.get("distillation.alpha"):
            raise ValueError(
                "alpha needs the data's answers, but on_policy replaces them: give only one of the two"
            )
        corrects = fields.get("distillation.gamma") is not None
        if corrects:
            others = [name.partition(".")[2] for name in fields if name.startswith("distillation.")]
            others = [name for name in others if name != "gamma"] + ["prepare"] * bool(fields.get("prepare"))
            if others:
                raise ValueError(
                    f"gamma trains the joint likelihood of teacher and student and cannot be combined with"
                    f" {others[0]}: remove one of the two"
                )
        reads = [name for name in ("relations", "hidden") if fields.get(f"distillation.{name}")]
        unread = [name for name in ("layers", "relation_heads") if fields.get(f"distillation.{name}")]
        if unread and not reads:
            raise ValueError(
                f"{unread[0]} needs relations or hidden: give --distillation.relations 1, or remove"
                f" {unread[0]}"
            )
        if fields.get("teacher") == BASE:
            if fields.get("train") == "all":
                raise ValueError(
                    f"teacher = {BASE} is the model with its adapters off, but train = all has no"
                    " adapters: give another teacher, or train adapters"
                )
            if not (corrects or fields.get("distillation.alpha") or fields.get("adapter")):
                raise ValueError(
                    f"teacher = {BASE} and alpha = 0: the model is its own teacher and would learn"
                    " nothing; give alpha above 0, or an adapter to start from"
                )
        return super().completed(fields)

    def record(self) -> dict[str, Any]:
        """As for every run, with a teacher folder as absolute path."""
        fields = super().record()
        return fields | {"teacher": fields["teacher"] if self.teacher == BASE else portable(self.teacher)}
