"""Families with Mamba-2 layers: cases for test_families.py, a config.json for test_config_fields.py."""

from cases_moe import GRANITE, MIXTRAL
from family_case import COMMON, Case

LINEAR, FULL = "linear_attention", "full_attention"
GRANITE_4 = {
    **MIXTRAL,
    **GRANITE,
    "layer_types": [LINEAR, FULL, LINEAR],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 4,
}
GRANITE_4_NAMES = (
    ("mlp.shared_experts.", "shared_mlp."),
    (".mlp.input_linear.", ".shared_mlp.input_linear."),
    (".mlp.output_linear.", ".shared_mlp.output_linear."),
    (".mlp.", ".block_sparse_moe."),
    ("gate.", "router."),
    ("decay.", ""),
)

CASES = {
    "granite4": Case("GraniteMoeHybrid", GRANITE_4, renamed=GRANITE_4_NAMES),
    "granite4-dense-rotated-limits-tied": Case(
        "GraniteMoeHybrid",
        {
            **GRANITE_4,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "time_step_limit": (0.05, 2.0),
            "tie_word_embeddings": True,
        },
        renamed=GRANITE_4_NAMES,
    ),
    "granite4-no-conv-bias": Case(
        "GraniteMoeHybrid",
        {
            **GRANITE_4,
            "layer_types": [LINEAR, LINEAR, FULL],
            "mamba_conv_bias": False,
            "mamba_expand": 1,
            "mamba_d_conv": 2,
        },
        renamed=GRANITE_4_NAMES,
    ),
}

CONFIGS = {
    "granitemoehybrid": (
        COMMON
        | dict.fromkeys(GRANITE, 0.5)
        | {
            "attention_bias": False,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "shared_intermediate_size": 512,
            "layer_types": ["mamba", "attention"] * 4,
            "position_embedding_type": "rope",
            "mamba_n_heads": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_head": 64,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
        }
    )
}
