"""Groups modules and parameters by their name on disk. No torch: `inspect` counts by groups.

The groups: attention, mlp (dense), shared_experts, experts. The router, embeddings and norms stay frozen;
lm_head and the indexer of sparse attention do unless they are named.
"""

from __future__ import annotations

import re

INDEXER = "indexer"
CONNECTIONS = "hyper_connections"
"""Mixing of residual streams (models/blocks/streams.py)."""
GROUPS = (
    "attention",
    INDEXER,
    "mlp",
    "shared_experts",
    "experts",
    "router",
    "lm_head",
    "embeddings",
    "norms",
    CONNECTIONS,
)

ROUTER = (
    r"\.(mlp|moe|block_sparse_moe|feed_forward|mixer|ffn|passes\.[0-9]+)\.gate(\.|$)"
    r"|\.(router|shared_expert_gate|moe_statics|e_score_correction_bias|expert_bias)(\.|$)"
)

ATTENTION = frozenset(("self_attn", "linear_attn", "mamba", "conv", "attn"))
"""Attention, and what a hybrid has in its place."""
MIXERS = frozenset("q_proj k_proj v_proj o_proj in_proj out_proj conv1d decay A_log dt_bias D".split())
"""Parts of attention and of Mamba-2 in a layer that names all its mixers alike (Nemotron-H)."""


def group_of(name: str) -> str:
    """The group of a module or parameter, by its checkpoint name."""
    parts = name.split(".")
    if INDEXER in parts:
        return INDEXER
    if any(part.startswith("hc_") or part.endswith("_hc") for part in parts):
        return CONNECTIONS
    if any("norm" in part for part in parts) or parts[-1] == "layer_scalar":
        return "norms"
    if not {"embed_tokens", "embeddings", "embed"}.isdisjoint(parts):
        return "embeddings"
    if "lm_head" in parts or parts[0] == "head":
        return "lm_head"
    if not ATTENTION.isdisjoint(parts) or ("mixer" in parts and not MIXERS.isdisjoint(parts)):
        return "attention"
    if re.search(ROUTER, name):
        return "router"
    if not {"shared_experts", "shared_expert", "shared_mlp"}.isdisjoint(parts):
        return "shared_experts"
    if "experts" in parts or "input_linear" in parts or "output_linear" in parts:
        return "experts"
    return "mlp"
