"""The fields of `unfreeze distill`: those of sft, the teacher, and how far from it is measured."""

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
    """How far the student's next-token distribution is from the teacher's."""

    divergence: Literal["forward", "reverse", "jsd"] = Field(
        default="forward",
        description=(
            "forward: KL(teacher ‖ student), covers all that the teacher finds likely; reverse: KL(student ‖"
            " teacher), keeps to its likeliest words (MiniLLM); jsd: between them, by beta"
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
            "of both softmaxes; the loss is multiplied by its square. 1: the models' own distributions; 2 to"
            " 4 show more of unlikely words"
        ),
        json_schema_extra=about("Teacher", alias="temperature"),
    )
    alpha: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "share of cross entropy with the data's own words; 0: the teacher alone. loss = alpha · CE + (1"
            " - alpha) · temperature² · divergence"
        ),
        json_schema_extra=about("Teacher", alias="alpha"),
    )

    top_k: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="with prepare: the k likeliest words kept per token; the rest is kept as one",
        json_schema_extra=about("Teacher", was="top_k", of_run=False),
    )
    coding: Literal["compact", "float32"] = Field(
        default="compact",
        description="with prepare: compact takes at most 120 bytes a token at top_k 32, float32 260",
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
        description="with on_policy: temperature of the student's answers; 0 is greedy",
        json_schema_extra=about("Teacher", was="answer_temperature"),
    )
    gamma: float | None = Field(
        default=None,
        gt=0,
        description=(
            "the student as corrector of the teacher: p ∝ teacher · student^gamma, trained on the data's"
            " likelihood; unset: distillation"
        ),
        json_schema_extra=about("Teacher", was="gamma"),
    )
    relations: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the difference of relations among queries, keys and values (MiniLMv2); 0: none; 0.1"
            " helps short runs. Widths and heads may differ"
        ),
        json_schema_extra=about("Teacher", was="relations"),
    )
    hidden: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the squared difference of hidden states, through a matrix trained with the model"
            " (TinyBERT); 0: none"
        ),
        json_schema_extra=about("Teacher", was="hidden"),
    )
    layers: str = Field(
        default="",
        pattern=r"^(\d+:\d+(,\d+:\d+)*)?$",
        description=(
            "for relations and hidden: STUDENT:TEACHER, counted from 1, several with commas; unset: the last"
            " of each"
        ),
        json_schema_extra=about("Teacher", was="layers"),
    )
    relation_heads: int | None = Field(
        default=None,
        ge=1,
        description=(
            "parts that queries, keys and values are divided into; unset: parts of 16 numbers, at most 64"
        ),
        json_schema_extra=about("Teacher", was="relation_heads"),
    )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """`layers` as numbers."""
        pairs = [pair.split(":") for pair in self.layers.split(",") if pair]
        return tuple((int(own), int(their)) for own, their in pairs)

    @property
    def words(self) -> str:
        """What is minimised, in words: 'forward KL, temperature 1'."""
        if self.gamma is not None:
            return f"the likelihood of the data where both speak, teacher · student^{self.gamma:g}"
        kind = {"forward": "forward KL", "reverse": "reverse KL", "jsd": f"JSD with beta {self.beta:g}"}
        more = {"alpha": "of cross entropy", "relations": "of relations", "hidden": "of hidden states"}
        given = [f"{getattr(self, name):g} {of}" for name, of in more.items() if getattr(self, name)]
        own = [f"{self.on_policy:g} of the steps on its own answers"] * bool(self.on_policy)
        return ", ".join([kind[self.divergence], f"temperature {self.temperature:g}", *given, *own])

    @property
    def mixture(self) -> float:
        """beta of objectives.divergence: 0 forward KL, 1 reverse KL."""
        return {"forward": 0.0, "reverse": 1.0, "jsd": self.beta}[self.divergence]


class Config(sft.Config):
    """Everything a distillation depends on."""

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
            "ask the teacher once and write its answers to this folder, without training. A later run takes"
            " the folder as its teacher"
        ),
        json_schema_extra=about("Teacher", of_run=False),
    )
    distillation: Distillation = Distillation()
    endpoint: EndpointConfig = EndpointConfig()

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As sft's. The base as a teacher has adapters to be switched off, and something else to learn."""
        if "distillation.beta" in fields and fields.get("distillation.divergence") != "jsd":
            raise ValueError(
                "distillation.beta is of divergence = jsd alone: give --distillation.divergence jsd,"
                " or remove it"
            )
        of_own = "distillation.answer_temperature" in fields
        if of_own and not fields.get("distillation.on_policy"):
            raise ValueError(
                "distillation.answer_temperature is of on_policy alone: give --distillation.on-policy 0.5,"
                " or remove it"
            )
        if fields.get("distillation.on_policy") and fields.get("distillation.alpha"):
            raise ValueError(
                "alpha is the share of the data's own words, and on_policy has others: give one of the two"
            )
        corrects = fields.get("distillation.gamma") is not None
        if corrects:
            others = [name.partition(".")[2] for name in fields if name.startswith("distillation.")]
            others = [name for name in others if name != "gamma"] + ["prepare"] * bool(fields.get("prepare"))
            if others:
                raise ValueError(
                    f"gamma trains the likelihood of teacher and student together, without {others[0]}:"
                    " remove one of the two"
                )
        reads = [name for name in ("relations", "hidden") if fields.get(f"distillation.{name}")]
        unread = [name for name in ("layers", "relation_heads") if fields.get(f"distillation.{name}")]
        if unread and not reads:
            raise ValueError(
                f"{unread[0]} is of relations and hidden alone: give --distillation.relations 1, or remove it"
            )
        if fields.get("teacher") == BASE:
            if fields.get("train") == "all":
                raise ValueError(
                    f"teacher = {BASE} is the model with its adapters off, and train = all has none: give"
                    " another teacher, or train adapters"
                )
            if not (corrects or fields.get("distillation.alpha") or fields.get("adapter")):
                raise ValueError(
                    f"teacher = {BASE} and alpha = 0: the model is its own teacher, and nothing would be"
                    " learned; give alpha above 0, or an adapter to begin with"
                )
        return super().completed(fields)

    def record(self) -> dict[str, Any]:
        """As every run's; a teacher in a folder is found from any directory."""
        fields = super().record()
        return fields | {"teacher": fields["teacher"] if self.teacher == BASE else portable(self.teacher)}
