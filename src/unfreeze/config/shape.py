"""[shape] of `unfreeze pretrain`: the sizes of a model that starts from random weights.

Fields are named as in Hugging Face's config.json. `model/config.json` of the run is written from them, with
the vocabulary of the tokenizer (models/from_shape.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field
from tyro.conf import FlagConversionOff

from unfreeze.config.columns import AsTable
from unfreeze.config.parse import Frozen
from unfreeze.core.field import about

PART = '{"at": "layers.*.self_attn", "part": "sliding_window", "window": 64}'
"""A part as a flag's value."""


def entries(value: Any) -> Any:
    """Convert a table or NAME=JSON texts to ("head_dim=32", …).

    Raises ValueError for a text without "=", and for a name given twice.
    """
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        value = [f"{name}={json.dumps(of)}" for name, of in table.items()]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    pairs = [str(item).strip() for item in cast(list[Any], value)]
    if wrong := next((pair for pair in pairs if not all(pair.partition("="))), None):
        raise ValueError(f"{wrong!r} is not NAME=VALUE, such as head_dim=32")
    names = [pair.partition("=")[0] for pair in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} is given twice")
    return tuple(pairs)


def parsed(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return name -> value of NAME=JSON texts; a value that is not JSON is a text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def listed(value: Any) -> Any:
    """Convert tables or JSON texts, one or several, to a tuple of JSON texts, one a part.

    Raises ValueError for a text that is no JSON table.
    """
    if isinstance(value, (str, Mapping)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    texts: list[str] = []
    for item in cast(list[Any], value):
        try:
            table = json.loads(item) if isinstance(item, str) else item
        except ValueError:
            table = None
        if not isinstance(table, Mapping):
            raise ValueError(f"{item!r:.60} is not a part, such as {PART}")
        texts.append(json.dumps(table, ensure_ascii=False))
    return tuple(texts)


def _shape(size: str = "", *, first: bool = False) -> Any:
    return about("Model and data", alias=size, first=first, since="0.2")


class Shape(Frozen):
    """Sizes of a new model. Left out: `family` is "", and `model` names a folder.

    A key that is none of these is a field of config.json.
    """

    REST: ClassVar[str] = "config"
    """Field for the keys of [shape] in a file that are no fields here."""

    family: str = Field(
        default="",
        description=(
            "family of a new model: llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, deepseek_v3,"
            " chain_of_experts"
        ),
        json_schema_extra=_shape(first=True),
    )
    num_hidden_layers: int = Field(default=4, ge=1, description="layers", json_schema_extra=_shape())
    hidden_size: int = Field(
        default=128,
        ge=1,
        description="width of the model; a multiple of the heads",
        json_schema_extra=_shape(),
    )
    num_attention_heads: int = Field(default=4, ge=1, description="heads", json_schema_extra=_shape())
    num_key_value_heads: int | None = Field(
        default=None,
        ge=1,
        description="heads of keys and values; default: all heads",
        json_schema_extra=_shape(),
    )
    intermediate_size: int | None = Field(
        default=None,
        ge=1,
        description="width of a dense MLP; default: 8/3 of hidden_size, up to a multiple of 64",
        json_schema_extra=_shape(),
    )
    num_experts: int = Field(
        default=0,
        ge=0,
        description="experts per layer, in families that have them",
        json_schema_extra=_shape(),
    )
    num_experts_per_tok: int | None = Field(
        default=None, ge=1, description="experts that a token uses; default 2", json_schema_extra=_shape()
    )
    moe_intermediate_size: int | None = Field(
        default=None,
        ge=1,
        description="width of an expert; default: intermediate_size / num_experts_per_tok",
        json_schema_extra=_shape(),
    )
    tie_word_embeddings: Annotated[bool, FlagConversionOff] = Field(
        default=True,
        description="one matrix for embedding and output: True or False",
        json_schema_extra=_shape(),
    )
    config: Annotated[tuple[str, ...], BeforeValidator(entries), AsTable()] = Field(
        default=(),
        description="further fields of config.json, NAME=JSON: head_dim=64 num_shared_experts=1",
        json_schema_extra=_shape(),
    )
    parts: Annotated[tuple[str, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="parts in place of the family's own, one JSON table each; --help parts lists them",
        json_schema_extra=_shape(),
    )

    @property
    def assembly(self) -> list[dict[str, Any]]:
        """The tables of `parts`."""
        return [json.loads(text) for text in self.parts]
