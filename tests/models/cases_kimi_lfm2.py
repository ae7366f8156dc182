"""Kimi Linear and LFM2: cases for test_families.py, a config.json for test_config_fields.py."""

from cases_moe import MLA
from family_case import COMMON, Case

KIMI = {
    **{name: size for name, size in MLA.items() if name not in ("n_routed_experts", "first_k_dense_replace")},
    "num_local_experts": 8,
    "linear_head_dim": 16,
    "linear_num_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")
KIMI_NAMES = {
    "renamed": (
        *((name, "conv1d") for name in CONVS),
        *((f"self_attn.{name}", f"self_attn.forget_gate.{name}") for name in ("f_a_proj", "f_b_proj")),
        ("self_attn.decay.", "self_attn.forget_gate."),
    ),
    "fused": CONVS,
}
LFM2 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 8,
    "norm_eps": 1e-4,
}
LFM2_NAMES = (
    ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
    ("mlp.gate_proj", "mlp.w1"),
    ("mlp.up_proj", "mlp.w3"),
    ("mlp.down_proj", "mlp.w2"),
    ("mlp.", "feed_forward."),
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("model.norm.", "model.embedding_norm."),
)
LFM2_MOE = {
    **{name: value for name, value in LFM2.items() if not name.startswith("block")},
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_dense_layers": 1,
}

CASES = {
    "kimi-linear": Case("KimiLinear", KIMI, **KIMI_NAMES),
    "kimi-linear-groups": Case(
        "KimiLinear",
        {
            **{name: value for name, value in KIMI.items() if not name.endswith("layer_types")},
            "linear_attn_config": {
                "kda_layers": [1, 2],
                "full_attn_layers": [3],
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 3,
            },
            "first_k_dense_replace": 2,
            "num_expert_group": 4,
            "topk_group": 2,
            "q_lora_rank": 40,
            "num_shared_experts": 2,
            "moe_renormalize": False,
        },
        **KIMI_NAMES,
    ),
    "lfm2": Case("Lfm2", LFM2, renamed=LFM2_NAMES),
    "lfm2-biases-untied": Case(
        "Lfm2",
        {
            **{name: value for name, value in LFM2.items() if name != "layer_types"},
            "full_attn_idxs": [0, 2],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_ff_dim": 99,
            "block_ffn_dim_multiplier": 1.3,
            "tie_embedding": False,
        },
        renamed=LFM2_NAMES,
    ),
    "lfm2-width-as-said": Case("Lfm2", {**LFM2, "block_auto_adjust_ff_dim": False}, renamed=LFM2_NAMES),
    "lfm2-moe": Case("Lfm2Moe", LFM2_MOE, renamed=LFM2_NAMES),
    "lfm2-moe-no-bias": Case(
        "Lfm2Moe",
        {
            **LFM2_MOE,
            "layer_types": ["full_attention", "conv", "conv"],
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
        renamed=LFM2_NAMES,
    ),
}
_USUAL = {name: value for name, value in COMMON.items() if name not in ("rms_norm_eps", "num_hidden_layers")}
_LFM2 = _USUAL | {"num_hidden_layers": 3, "norm_eps": 1e-3, "conv_L_cache": 3, "conv_bias": False}
CONFIGS = {
    "kimi_linear": COMMON
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "model_max_length": 4096,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [3],
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "num_experts": 64,
        "num_experts_per_token": 2,
        "num_expert_group": 4,
        "topk_group": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 256,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
    },
    "lfm2": _LFM2
    | {
        "block_auto_adjust_ff_dim": True,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0,
        "block_multiple_of": 8,
        "block_out_init_scale": 1.0,
        "block_use_swiglu": True,
        "block_use_xavier_init": True,
        "conv_dim": 64,
        "conv_dim_out": 64,
        "conv_use_xavier_init": True,
        "full_attn_idxs": [1],
        "num_heads": 4,
        "use_pos_enc": True,
    },
    "lfm2_moe": _LFM2
    | {
        "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 256,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}
READ = {
    "kimi_linear": {"rms_norm_eps"},
    "lfm2": {"norm_eps", "rope_theta"},
    "lfm2_moe": {"norm_eps", "rope_theta"},
}
"""Fields that move the numbers of a family that has no rms_norm_eps or does not rotate."""
