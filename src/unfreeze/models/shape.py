"""Shape: the sizes of a model, read from its config.json.

There are no tables of sizes: the model is built from the file.

D hidden_size, V vocab_size, H heads, G key/value heads, E experts, K experts per token, I widths of MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.rope import Rope
from unfreeze.models.parts import Placed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class MoEShape:
    """Mixture-of-experts sizes. Layers in `dense_layers` have a dense MLP, or none.

    latent    width that the experts see, if it is not hidden_size; 0: it is
    matrices  of an expert: gate, up and down, or up and down
    passes    of a token through the experts of a layer, one after the other (blocks/chain.py)
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    num_shared_experts: int
    dense_layers: frozenset[int]
    latent: int = 0
    matrices: int = 3
    passes: int = 1


@dataclass(frozen=True)
class MLAShape:
    """Multi-head latent attention: widths of the two low-rank latents and of the three parts of a head.

    q_lora_rank None: no query latent.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Shape:
    """Everything a family needs to build itself, and everything that the plan and `inspect` count with.

    rope         for all layers except those that use one of `ropes` by name (Gemma 3's local layers)
    layer_types  the kind of attention of each layer (layer_types.py); () if all are alike
    softcap      of the logits, c · tanh(z / c); None: no cap
    streams      copies of the residual between layers (blocks/streams.py)
    wrapper      model_type of the config around this text_config (wrappers.py); "": none
    parts        parts in place of the family's own, in their order (parts/)
    """

    model_type: str
    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    initializer_range: float
    tied: bool
    rope: Rope
    moe: MoEShape | None
    mla: MLAShape | None
    config: Mapping[str, Any]
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    layer_types: tuple[str, ...] = ()
    softcap: float | None = None
    streams: int = 1
    wrapper: str = ""
    parts: tuple[Placed, ...] = ()

    def tables(
        self, positions_T: Tensor, lengths_T: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor], dict[str, tuple[Tensor, Tensor]]]:
        """(cos, sin) of `rope` at integer positions [T], and those of `ropes` by name.

        lengths_T: as in Rope.tables.
        """
        named = {name: rope.tables(positions_T, lengths_T) for name, rope in self.ropes.items()}
        return self.rope.tables(positions_T, lengths_T), named

    @property
    def stream_size(self) -> int:
        """Width of the residual between layers."""
        return self.streams * self.hidden_size

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts if self.moe else 0

    @property
    def experts_per_token(self) -> int:
        return self.moe.experts_per_token if self.moe else 0

    @property
    def moe_intermediate_size(self) -> int:
        return self.moe.intermediate_size if self.moe else 0

    @property
    def kind(self) -> str:
        """'llama', or with other parts than the family's 'llama with moba, deep_norm'."""
        names = ", ".join(dict.fromkeys(part.name for part in self.parts))
        return f"{self.model_type} with {names}" if names else self.model_type

    @property
    def expert_words(self) -> str:
        """ ", 2 of 8 experts a token", and a chain's passes; "" if it has no experts."""
        if self.moe is None:
            return ""
        passes = f" in each of {self.moe.passes} passes" if self.moe.passes > 1 else ""
        return f", {self.experts_per_token} of {self.num_experts} experts a token{passes}"

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def __hash__(self) -> int:
        return id(self)


def require(config: Mapping[str, Any], field: str) -> Any:
    """config[field], or a CheckpointError that names the field."""
    if config.get(field) is None:
        raise CheckpointError(
            f"config.json has no {field!r}, which model_type {config.get('model_type')!r} needs",
            next="check the file",
        )
    return config[field]


def common(config: Mapping[str, Any], *, family: str, rope: Rope, head_dim: int, **parts: Any) -> Shape:
    """A Shape from the fields that all families spell alike.

    `config` is complete: absent fields have the family's defaults (models/allowed.py).
    """
    heads = int(require(config, "num_attention_heads"))
    return Shape(
        model_type=str(config["model_type"]),
        family=family,
        hidden_size=int(require(config, "hidden_size")),
        num_layers=int(require(config, "num_hidden_layers")),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(require(config, "intermediate_size")),
        vocab_size=int(require(config, "vocab_size")),
        max_positions=int(require(config, "max_position_embeddings")),
        rms_norm_eps=float(require(config, "rms_norm_eps")),
        initializer_range=float(config["initializer_range"]),
        tied=bool(config["tie_word_embeddings"]),
        rope=rope,
        moe=parts.get("moe"),
        mla=parts.get("mla"),
        config=dict(config),
        ropes=parts.get("ropes", {}),
        layer_types=parts.get("layer_types", ()),
        softcap=parts.get("softcap"),
    )
