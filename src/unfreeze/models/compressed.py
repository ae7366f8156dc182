"""Compressed attention with its parts, as DeepSeek-V4's layers have it (blocks/compressed.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unfreeze.models.configs.deepseek_v4 import COMPRESSED, HEAVY, rates
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.compressed import CompressedAttention, Compressor
    from unfreeze.models.factory import Factory


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
    """The part that makes a layer's entries, with an indexer where it chooses among them."""
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
