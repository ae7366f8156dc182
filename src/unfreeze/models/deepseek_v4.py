"""DeepSeek-V4: compressed attention, residual streams, and experts that the first layers choose by the token.

Releases have names of their own (deepseek_v4_names.py). Prediction heads (mtp.*) are carried along.
Source: DeepSeek-V4's report; transformers 5.23, models/deepseek_v4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.models import llama
from unfreeze.models.deepseek_v4_config import (
    COMPRESSED,
    FIELDS,
    HEAVY,
    hashed_layers,
    kinds,
    rates,
    rotary_tables,
)
from unfreeze.models.deepseek_v4_names import RULES, ignored
from unfreeze.models.shape import MoEShape, Shape, common, require

if TYPE_CHECKING:
    from unfreeze.models.blocks.compressed import CompressedAttention, Compressor
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.factory import Ends, Factory
    from unfreeze.models.layer import Layer

__all__ = ["FIELDS", "RULES", "ends", "ignored", "layer", "shape"]


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json. Layers alternate between two kinds of compressed attention unless it says more."""
    moe = MoEShape(
        num_experts=int(config["n_routed_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        num_shared_experts=1,
        dense_layers=frozenset(),
    )
    config = {"intermediate_size": config["moe_intermediate_size"], **config}
    main, named = rotary_tables(config)
    head_dim = int(require(config, "head_dim"))
    parts: dict[str, Any] = {"moe": moe, "ropes": named, "layer_types": kinds(config)}
    sizes = common(config, family="deepseek_v4", rope=main, head_dim=head_dim, **parts)
    return replace(sizes, streams=int(config["hc_mult"]))


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.streams import StreamLayer

    D, eps = shape.hidden_size, shape.rms_norm_eps
    return StreamLayer(
        attn_hc=make.hyper_connection(shape),
        ffn_hc=make.hyper_connection(shape),
        self_attn=attention(shape, index, make),
        mlp=experts(shape, index, make),
        input_layernorm=make.norm(D, eps),
        post_attention_layernorm=make.norm(D, eps),
    )


def ends(shape: Shape, make: Factory) -> Ends:
    """An embedding that fills all streams, and a norm of their weighted sum."""
    from unfreeze.models.blocks.streams import StreamEmbedding, StreamHead, StreamNorm
    from unfreeze.models.factory import Ends

    norm, eps = make.norm(shape.hidden_size, shape.rms_norm_eps, StreamNorm), shape.config["hc_eps"]
    options: dict[str, Any] = {"streams": shape.streams, "eps": float(eps), "norm_eps": shape.rms_norm_eps}
    norm.hc_head = StreamHead(shape.hidden_size, device=make.device, **options)
    table = StreamEmbedding(shape.vocab_size, shape.hidden_size, shape.streams, **make.table)
    return Ends(table, norm, make.head(shape))


def attention(shape: Shape, index: int, make: Factory) -> CompressedAttention:
    """A layer's attention; the kinds with a compressor rotate by the table "compress"."""
    from unfreeze.models.blocks import compressed
    from unfreeze.models.blocks.norm import PlainRMSNorm

    config, kind, name = shape.config, shape.layer_types[index], f"model.layers.{index}.self_attn"
    D, H, d, eps = shape.hidden_size, shape.num_heads, shape.head_dim, shape.rms_norm_eps
    Q, g, O = (int(config[field]) for field in ("q_lora_rank", "o_groups", "o_lora_rank"))
    o_a_proj = make.linear(f"{name}.o_a_proj", H * d // g, g * O, kind=compressed.GroupedLinear)
    assert isinstance(o_a_proj, compressed.GroupedLinear)
    o_a_proj.groups = g
    return compressed.CompressedAttention(
        index,
        compressed.Sizes(H, d, int(config["sliding_window"]), g),
        "compress" if kind in (COMPRESSED, HEAVY) else "",
        q_a_proj=make.linear(f"{name}.q_a_proj", D, Q),
        q_a_norm=make.norm(Q, eps),
        q_b_proj=make.linear(f"{name}.q_b_proj", Q, H * d),
        q_b_norm=make.norm(d, eps, PlainRMSNorm),
        kv_proj=make.linear(f"{name}.kv_proj", D, d),
        kv_norm=make.norm(d, eps),
        sinks=make.vector(H),
        o_a_proj=o_a_proj,
        o_b_proj=make.linear(f"{name}.o_b_proj", g * O, D),
        compressor=compressor(shape, kind, f"{name}.compressor", make),
    )


def compressor(shape: Shape, kind: str, name: str, make: Factory) -> Compressor | None:
    """What makes a layer's entries; compressed sparse attention has an indexer that chooses among them."""
    from unfreeze.models.blocks.compressed import Compressor, EntryIndexer, PositionBias

    if kind not in (COMPRESSED, HEAVY):
        return None
    config, D, eps, overlap = shape.config, shape.hidden_size, shape.rms_norm_eps, kind == COMPRESSED
    rate = rates(config)[kind]

    def parts(name: str, width: int) -> dict[str, Any]:
        channels = width * (1 + overlap)
        return {
            "rate": rate,
            "overlap": overlap,
            "table": "compress",
            "kv_proj": make.linear(f"{name}.kv_proj", D, channels),
            "gate_proj": make.linear(f"{name}.gate_proj", D, channels),
            "position_bias": PositionBias(rate, channels, device=make.device),
            "kv_norm": make.norm(width, eps),
        }

    indexer = None
    if overlap:
        J, i = int(config["index_n_heads"]), int(config["index_head_dim"])
        Q, inner = int(config["q_lora_rank"]), f"{name}.indexer"
        indexer = EntryIndexer(
            heads=J,
            keys=int(config["index_topk"]),
            q_b_proj=make.linear(f"{inner}.q_b_proj", Q, J * i),
            weights_proj=make.linear(f"{inner}.scorer.weights_proj", D, J),
            **parts(inner, i),
        )
    return Compressor(**parts(name, shape.head_dim), indexer=indexer)


def experts(shape: Shape, index: int, make: Factory) -> MoE:
    """Experts within a limit, beside a shared one; the first layers choose them by the token."""
    from unfreeze.kernels.expert_mlp import ClampedSwiGLU
    from unfreeze.models.blocks.moe import HashMoE, ReadMoE
    from unfreeze.models.blocks.nonlinearity import clamped_silu
    from unfreeze.models.blocks.routers import HashRouter, RoutingRule

    config, name, hashed = shape.config, f"model.layers.{index}.mlp", index in hashed_layers(shape.config)
    limit, scale = float(config["swiglu_limit"]), float(config["routed_scaling_factor"])
    rule = RoutingRule("sqrtsoftplus", None if hashed else "E", normalize=True, added=1e-20, scale=scale)
    gate = (
        make.router(shape, rule, HashRouter).of_tokens(shape.vocab_size)
        if hashed
        else make.router(shape, rule)
    )
    activation = ClampedSwiGLU(alpha=1.0, limit=limit, added=0.0)
    width = int(config["moe_intermediate_size"])
    shared = make.mlp(f"{name}.shared_experts", shape.hidden_size, width, activation=clamped_silu(limit))
    routed = make.experts_of(shape, name, activation=activation)
    return (HashMoE if hashed else ReadMoE)(index, gate=gate, experts=routed, shared_experts=shared)
