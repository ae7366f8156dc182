"""Fields of `unfreeze pretrain`: the common ones, with defaults for training from random weights."""

# A Config is frozen, so its fields may be of narrower types; pyright takes every attribute for mutable.
# pyright: reportIncompatibleVariableOverride=false
from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from unfreeze.config import tables
from unfreeze.config.experts import Experts
from unfreeze.config.parse import Folder
from unfreeze.config.shape import Shape
from unfreeze.config.training import TrainingConfig, portable
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import about


class Data(tables.Data):
    """Data fields; texts that are too long are split."""

    truncation: Literal["tail", "error", "drop", "split"] = Field(
        default="split",
        description="texts longer than sequence_length: cut the tail, stop with an error, drop, or split",
    )
    sequence_lengths: tuple[str, ...] = Field(
        default=(),
        description=(
            "shorter lengths at first, as LENGTH:SHARE of the steps, such as 256:0.3 512:0.3; then"
            " sequence_length. Tokens per step stay"
        ),
        json_schema_extra=about("How long", since="0.2"),
    )

    @property
    def stages(self) -> list[tuple[int, float]]:
        """(length, share of the steps) of each entry of sequence_lengths."""
        return [_stage(entry) for entry in self.sequence_lengths]

    @model_validator(mode="after")
    def _growing(self) -> Data:
        lengths = [length for length, _ in self.stages]
        if lengths != sorted(set(lengths)) or (lengths and lengths[-1] >= self.sequence_length):
            raise ValueError(
                f"data.sequence_lengths {' '.join(self.sequence_lengths)}: lengths must grow, and stay below"
                f" sequence_length {self.sequence_length}"
            )
        if (total := sum(share for _, share in self.stages)) > 1:
            raise ValueError(f"the shares of data.sequence_lengths add up to {total:g}, more than 1")
        return self


def _stage(entry: str) -> tuple[int, float]:
    """Parse LENGTH:SHARE."""
    length, _, share = entry.partition(":")
    try:
        stage = int(length), float(share)
    except ValueError:
        stage = 0, 0.0
    if stage[0] < 2 or not 0 < stage[1] <= 1:
        raise ValueError(
            f"data.sequence_lengths has {entry!r}: expected LENGTH:SHARE, such as 256:0.3 for 30 % of the"
            " steps"
        )
    return stage


class Optimizer(tables.Optimizer):
    """Optimizer with defaults for training from random weights, and load balancing of experts."""

    learning_rate: float = Field(
        default=3e-3,
        gt=0,
        description="peak learning rate; 3e-3 for models of a few million parameters, less for larger",
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="decoupled weight decay on matrices; 0.1 as in GPT-3 and Llama"
    )
    balance_rate: float = Field(
        default=0.001,
        ge=0,
        description="bias update speed of auxiliary-loss-free load balancing; 0: none (DeepSeek-V3: 0.001)",
        json_schema_extra=about("Learning", was="balance_rate"),
    )


class Memory(tables.Memory):
    """Memory fields; random weights start in float32."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto",
        description=(
            "dtype of weights and computation. auto: float32 from random weights, else bfloat16 where the"
            " hardware has bf16 matmul units; bfloat16 keeps float32 master weights"
        ),
    )


class Config(TrainingConfig):
    """All fields of a pretraining run. A new model is [shape] and a tokenizer; any other is `model`."""

    SAID_BY: ClassVar[dict[str, str]] = {"model": "tokenizer shape.family"}

    tokenizer: Folder = Field(
        default="",
        description="with [shape]: folder with the tokenizer of the new model",
        json_schema_extra=about("Model and data", first=True, since="0.2"),
    )
    shape: Shape = Shape()
    data: Data
    optimizer: Optimizer = Optimizer()
    experts: Experts = Experts()
    memory: Memory = Memory()

    @classmethod
    def completed(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Name the tokenizer's folder as the model of a run with [shape]. Refuse halves of the two."""
        tokenizer, model = fields.get("tokenizer"), fields.get("model")
        if not fields.get("shape.family"):
            if sizes := [name for name, of in fields.items() if _is_size(name, of)]:
                raise ConfigError(
                    f"{sizes[0]} is for a new model, and [shape] has no family",
                    next="give --shape.family qwen3, and --tokenizer FOLDER",
                )
            if tokenizer:
                raise ConfigError(
                    "tokenizer is for a new model, and [shape] has no family",
                    next='give [shape] family = "qwen3", or leave tokenizer out',
                )
            return fields
        if not tokenizer:
            raise ConfigError("[shape] needs a tokenizer", next="give --tokenizer FOLDER")
        if model and portable(str(model)) != portable(str(tokenizer)):
            raise ConfigError(
                f"model = {model!r} has a shape of its own, and [shape] is given",
                next="leave one of them out",
            )
        return {**fields, "model": model or tokenizer}


def _is_size(name: str, value: object) -> bool:
    """True for a field of [shape] that is not at its default."""
    table, _, field = name.partition(".")
    return table == "shape" and field in Shape.model_fields and value != Shape.model_fields[field].default
