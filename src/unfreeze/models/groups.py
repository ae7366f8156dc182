"""Groups modules and parameters by their name on disk. No torch: `inspect` counts by groups.

The groups: attention, mlp (dense), shared_experts, experts. The router, lm_head, embeddings and norms stay
frozen unless lm_head is named.
"""

from __future__ import annotations

import re

GROUPS = ("attention", "mlp", "shared_experts", "experts", "router", "lm_head", "embeddings", "norms")

ROUTER = (
    r"\.(mlp|moe|block_sparse_moe)\.gate(\.|$)"
    r"|\.(router|shared_expert_gate|moe_statics|e_score_correction_bias)(\.|$)"
)


def group_of(name: str) -> str:
    """The group of a module or parameter, by its checkpoint name."""
    parts = name.split(".")
    if any("norm" in part for part in parts) or parts[-1] == "layer_scalar":
        return "norms"
    if "embed_tokens" in parts:
        return "embeddings"
    if "lm_head" in parts:
        return "lm_head"
    if not {"self_attn", "linear_attn", "mamba"}.isdisjoint(parts):
        return "attention"
    if re.search(ROUTER, name):
        return "router"
    if not {"shared_experts", "shared_expert", "shared_mlp"}.isdisjoint(parts):
        return "shared_experts"
    if "experts" in parts or "input_linear" in parts or "output_linear" in parts:
        return "experts"
    return "mlp"
