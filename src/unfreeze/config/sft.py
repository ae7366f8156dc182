"""Fields of `unfreeze sft`: the common ones, adapters, and the conversion of conversations to examples."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal, cast

from pydantic import Field

from unfreeze.config import tables
from unfreeze.config.adapter import base_of, longer_of, lora_of, packed_as
from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import Folder
from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about

ALL_RATE = 2e-5
PackedFormat = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4", "nf4"]
PackedModules = Literal["experts", "all-linear", "lm_head"]
QUANTIZE = "pack the base in this format while it is loaded, tensor by tensor; unset: as it is on disk"
PACKS = "with quantize: the modules to pack; unset: the routed experts, of a dense model all linear layers"


class Data(tables.Data):
    """Data fields, with the conversion of conversations to examples."""

    turns: Literal["auto", "whole", "each", "last"] = Field(
        default="auto",
        description=(
            "examples per conversation. whole: one; each: one per assistant turn; last: the last turn only;"
            " auto: whole, or each if the chat template rewrites earlier turns"
        ),
        json_schema_extra=about("Model and data", was="turns", since="0.2"),
    )
    reasoning: Literal["auto", "inline", "drop"] = Field(
        default="auto",
        description=(
            "treatment of reasoning_content. auto: trained on in the template's format, refused if it"
            " has none; inline: as <think>…</think> in the answer; drop: left out"
        ),
        json_schema_extra=about("Model and data", was="reasoning", since="0.2"),
    )


class Optimizer(tables.Optimizer):
    """Optimizer with a default learning rate for adapters, and a tenth of it for all weights."""

    learning_rate: float = Field(
        default=2e-4, gt=0, description="peak learning rate; with train = all the default is 2e-5"
    )
    balance_rate: float = Field(
        default=0.0,
        ge=0,
        description="bias update speed of loss-free load balancing, with train = all; 0: none",
        json_schema_extra=about("Learning", since="0.2"),
    )


class Config(TrainingConfig):
    """All fields of a fine-tuning run."""

    SAID_BY: ClassVar[dict[str, str]] = {"model": "adapter"}

    train: Literal["adapters", "all"] = Field(
        default="adapters",
        description="adapters: LoRA beside the frozen base; all: every weight of an unquantized checkpoint",
        json_schema_extra=about("Model and data", first=True),
    )
    adapter: Folder = Field(
        default="",
        description=(
            "continue training this adapter (a run or adapter folder, ours or peft's). The [lora] fields"
            " come from it, and usually the model"
        ),
        json_schema_extra=about("Model and data", first=True, since="0.2"),
    )
    quantize: PackedFormat | None = Field(
        default=None, description=QUANTIZE, json_schema_extra=about("Model and data", since="0.2")
    )
    quantize_modules: tuple[PackedModules, ...] = Field(
        default=(), description=PACKS, json_schema_extra=about("Model and data", since="0.2")
    )
    data: Data
    optimizer: Optimizer = Optimizer()
    lora: LoraConfig | None = Field(default_factory=lambda: LoraConfig(), description="the adapters")

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Apply defaults of train = "all": no adapters, another learning rate.

        A [lora] field is then an error.
        """
        if "quantize_modules" in fields and not (fields.get("quantize") or fields.get("adapter")):
            raise ConfigError(
                "quantize_modules has no effect without quantize", next="--quantize int4, or leave it out"
            )
        if fields.get("train") != "all":
            if fields.get("training.indexer", "frozen") != "frozen":
                raise ConfigError(
                    'training.indexer is "trained", but adapters train; the indexer gets some where'
                    " lora.targets names it",
                    next="remove training.indexer, and give --lora.targets all-linear indexer",
                )
            for name in ("training.only", "optimizer.balance_rate"):
                if fields.get(name):
                    raise ConfigError(
                        f"{name} is for all weights, but adapters train",
                        next=f"--train all, or remove {name}",
                    )
            if fields.get("optimizer.kind") == "muon":
                raise ConfigError(
                    "optimizer.kind is muon, but adapters train: their factors A and B are no matrices of a"
                    " layer, only their product is",
                    next="--train all (sft), or leave optimizer.kind out",
                )
            if fields.get("lora", True) is None:
                raise ValueError('train = "adapters" needs [lora]; its defaults are an empty table')
            return _continued(fields)
        if fields.get("quantize"):
            raise ConfigError(
                f"quantize is {fields['quantize']}, but every weight trains, and packed weights are frozen",
                next="--train adapters, or leave --quantize out",
            )
        if fields.get("adapter"):
            raise ValueError(
                'train = "all" trains every weight and has no adapters: remove adapter, or give train ='
                ' "adapters"'
            )
        if lora_fields := [
            place for place in fields if place.startswith("lora") and fields[place] is not None
        ]:
            rate = fields.get("optimizer.learning_rate")
            raise ConfigError(
                f'train = "all" trains every weight and has no adapters, but {", ".join(lora_fields)}'
                f" {'is' if len(lora_fields) == 1 else 'are'} given",
                next="remove what is given (in a file: the whole table [lora])"
                + (
                    f", and also learning_rate = {rate:g}, or choose another: the default for all is"
                    f" {ALL_RATE:g}"
                    if rate is not None
                    else ""
                ),
            )
        return {"optimizer.learning_rate": ALL_RATE, **fields, "lora": None}


def _plain(value: Any) -> Any:
    return list(cast(Iterable[Any], value)) if isinstance(value, (list, tuple)) else value


def _continued(fields: dict[str, Any]) -> dict[str, Any]:
    """Add [lora], [rope] and the base from the adapter to continue, if there is one.

    A field of these tables that is also configured must agree.
    """
    source = fields.get("adapter")
    if not isinstance(source, str) or not source:
        return fields
    own = {f"lora.{name}": value for name, value in lora_of(source).items()}
    if (longer := longer_of(source)) is not None:
        own |= {"rope.scaling": longer.scaling, "rope.factor": longer.factor}
    if (packed := packed_as(source)) is not None:
        own |= {"quantize": packed.format, "quantize_modules": packed.modules}
    for place in own.keys() & fields.keys():
        configured, has = fields[place], own[place]
        if _plain(configured) != _plain(has):
            raise ValueError(
                f"{place} = {configured!r}, but the adapter in {source} has {has!r} and keeps it when"
                f" continued: remove {place}"
            )
    return {**({} if fields.get("model") else {"model": base_of(source)}), **fields, **own}
