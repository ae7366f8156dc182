"""The fields of `unfreeze distill`: those of sft, the teacher, and how far from it is measured."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from unfreeze.config import sft
from unfreeze.config.endpoint import EndpointConfig
from unfreeze.config.parse import Folder, Frozen, ModelName
from unfreeze.config.training import FIRST, FLAT, HELP, portable

BASE = "base"


class Distillation(Frozen):
    """How far the student's next-token distribution is from the teacher's."""

    divergence: Literal["forward", "reverse", "jsd"] = Field(
        default="forward",
        description=(
            "forward: KL(teacher ‖ student), which covers all that the teacher finds likely (Hinton et al.);"
            " reverse: KL(student ‖ teacher), which keeps to what it finds likeliest (MiniLLM); jsd: between"
            " them, by beta"
        ),
    )
    beta: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="of jsd, as TRL's: the teacher's share of the mixture; 0.5 is TRL's default",
    )
    temperature: float = Field(
        default=1.0,
        gt=0,
        le=100,
        description=(
            "of both softmaxes; the loss is multiplied by its square, which keeps the gradient's size; 1 is"
            " the model's own distribution, 2 to 4 show more of unlikely words"
        ),
    )
    alpha: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "share of cross entropy with the data's own words: alpha · CE + (1 - alpha) · temperature² ·"
            " divergence; 0: the teacher alone, which recovered 92 % of the gap to a known teacher, 0.5 78 %"
            " (docs/teach_measured.md)"
        ),
    )

    top_k: int = Field(
        default=32,
        ge=1,
        le=4096,
        description="with prepare: words kept of each token, the likeliest; the rest is kept as one",
    )
    coding: Literal["compact", "float32"] = Field(
        default="compact",
        description="with prepare: compact takes at most 120 bytes a token at top_k 32, float32 260",
    )

    on_policy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "share of the steps that are on the student's own answers to the data's prompts (GKD's lambda,"
            " TRL's lmbda): sampled as it is then, scored by the teacher; 0: the data's answers alone"
        ),
    )
    answer_temperature: float = Field(
        default=1.0, ge=0, description="of on_policy: temperature of the student's answers; 0 is greedy"
    )
    gamma: float | None = Field(
        default=None,
        gt=0,
        description=(
            "the student as corrector of the teacher: p ∝ teacher · student^gamma, whose likelihood of the"
            " data is trained and measured; unset: distillation"
        ),
    )
    relations: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of how far relations among queries, keys and values are apart (MiniLMv2), added to the"
            " loss; 0: none; 0.1 helped while steps were few, and 1 harmed (docs/inside_measured.md). Widths"
            " and heads of the two models may differ"
        ),
    )
    hidden: float = Field(
        default=0.0,
        ge=0,
        description=(
            "weight of the squared difference of hidden states, through a matrix that is learnt with the"
            " model (TinyBERT), added to the loss; 0: none"
        ),
    )
    layers: str = Field(
        default="",
        pattern=r"^(\d+:\d+(,\d+:\d+)*)?$",
        description=(
            "of relations and hidden: STUDENT:TEACHER, layers from 1, more with commas; unset: both last"
            " ones. MiniLMv2 found the last one best of a teacher of 12 layers, and the 19th or 21st of 24"
        ),
    )
    relation_heads: int | None = Field(
        default=None,
        ge=1,
        description=(
            "pieces that queries, keys and values are cut into; unset: as many as leave 16 numbers in each,"
            " at most 64 (MiniLMv2: 48 and 64, better than as many as heads of attention)"
        ),
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

    FLAT: ClassVar[dict[str, str]] = FLAT | {
        "teacher": "teacher",
        "prepare": "prepare",
        **{name: f"distillation.{name}" for name in Distillation.model_fields},
        **{name: f"endpoint.{name}" for name in EndpointConfig.model_fields},
    }
    HELP: ClassVar[dict[str, tuple[str, ...]]] = {
        "Teacher": ("teacher", "prepare", *Distillation.model_fields),
        **HELP,
        "Server": tuple(EndpointConfig.model_fields),
    }
    FIRST: ClassVar[tuple[str, ...]] = ("teacher", *FIRST)

    teacher: ModelName = Field(
        description=(
            "a checkpoint folder, a Hugging Face id, a run or an adapter's folder, with the model's own"
            f" tokenizer; {BASE}: the model itself with its adapters off; a folder that prepare wrote; or,"
            " with prepare, the address of an OpenAI-compatible server (http://…)"
        )
    )
    prepare: Folder = Field(
        default="",
        description=(
            "folder for what the teacher says of every token; instead of training, ask it once and write"
            " that. Training takes the folder as its teacher"
        ),
    )
    distillation: Distillation = Distillation()
    endpoint: EndpointConfig = EndpointConfig()

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """As sft's. The base as a teacher has adapters to be switched off, and something else to learn."""
        if "distillation.beta" in fields and fields.get("distillation.divergence") != "jsd":
            raise ValueError("beta is of divergence = jsd alone: give --divergence jsd, or remove beta")
        of_own = "distillation.answer_temperature" in fields
        if of_own and not fields.get("distillation.on_policy"):
            raise ValueError("answer_temperature is of on_policy alone: give --on-policy 0.5, or remove it")
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
                f"{unread[0]} is of relations and hidden alone: give --relations 1, or remove it"
            )
        if fields.get("teacher") == BASE:
            if fields.get("train") == "all":
                raise ValueError(
                    f"teacher = {BASE} is the model with its adapters off, and train = all has none: give"
                    " another teacher, or train adapters"
                )
            if not (corrects or fields.get("distillation.alpha") or fields.get("adapter")):
                raise ValueError(
                    f"teacher = {BASE} and alpha = 0: the model begins as its own teacher, and nothing would"
                    " be learned; give alpha above 0, so that the data teaches and the teacher holds it"
                    " near, or an adapter to begin with"
                )
        return super().completed(fields)

    def record(self) -> dict[str, Any]:
        """As every run's; a teacher in a folder is found from any directory."""
        fields = super().record()
        for name in ("prepare", "top_k", "coding", *EndpointConfig.model_fields):  # of no run
            del fields[name]
        return fields | {"teacher": fields["teacher"] if self.teacher == BASE else portable(self.teacher)}
