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

NEMOTRON = {
    "layers_block_type": [LINEAR, "moe", FULL, "mlp"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "ssm_state_size": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "chunk_size": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 80,
    "routed_scaling_factor": 2.5,
}
NEMOTRON_NAMES = (("embed_tokens.", "embeddings."), ("model.norm.", "model.norm_f."), ("decay.", ""))

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
    "nemotron-h": Case("NemotronH", NEMOTRON, renamed=NEMOTRON_NAMES),
    "nemotron-h-latent-groups-limits": Case(  # Nemotron 3 Super's experts, and limits that hold
        "NemotronH",
        {
            **NEMOTRON,
            "moe_latent_size": 32,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "n_groups": 8,
            "time_step_limit": [0.05, 2.0],
        },
        renamed=NEMOTRON_NAMES,
    ),
    "nemotron-h-dense-biases": Case(  # Nemotron-H 56B's order of layers
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": [LINEAR, "mlp", LINEAR, "mlp", FULL, "mlp"],
            "num_hidden_layers": 6,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
        },
        renamed=NEMOTRON_NAMES,
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
    ),
    "nemotron_h": (
        {name: value for name, value in COMMON.items() if name not in ("hidden_act", "rms_norm_eps")}
        | {
            "hybrid_override_pattern": "ME*-ME*-",
            "layer_norm_epsilon": 1e-3,
            "head_dim": 64,
            "attention_bias": False,
            "mlp_bias": False,
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "ssm_state_size": 32,
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 128,
            "expand": 2,
            "time_step_limit": [0.0, 10.0],
            "time_step_min": 0.001,
            "time_step_max": 0.1,
            "time_step_floor": 0.0001,
            "use_bias": False,
            "use_conv_bias": True,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 512,
            "moe_latent_size": 128,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "residual_in_fp32": False,
            "rescale_prenorm_residual": True,
            "mamba_proj_bias": False,
            "num_nextn_predict_layers": 0,
            "sliding_window": None,
        }
    ),
}
