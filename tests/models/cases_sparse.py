"""Families whose attention chooses keys, or whose windows have heads of their own: cases for test_families.py,
a config.json for test_config_fields.py."""

from cases_moe import CONFIGS as CONFIGS_MOE
from cases_moe import EXPERTS, MLA
from family_case import COMMON, YARN, Case

DSA = {
    **MLA,
    "q_lora_rank": 40,
    "index_topk": 4,  # the longest document of a case has 12 tokens
    "index_n_heads": 16,
    "index_head_dim": 16,
}
MIMO = {
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
}
V4 = {
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 48,
    "sliding_window": 5,
    "o_groups": 2,
    "o_lora_rank": 24,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 2,  # of at most six entries
    "hc_sinkhorn_iters": 4,
    "partial_rotary_factor": 0.25,
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "swiglu_limit": 0.5,
}
V4_NAMES = (("norm.hc_head.", "hc_head."), ("position_bias.weight", "position_bias"))

CASES = {
    "deepseek-v32": Case("DeepseekV32", {**DSA, "n_group": 1, "topk_group": 1}),
    "deepseek-v32-full-documents": Case(
        "DeepseekV32",
        {
            **DSA,
            "index_topk": 12,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": YARN,
        },
    ),
    "glm-moe-dsa": Case("GlmMoeDsa", DSA),
    "glm-moe-dsa-shared": Case(
        "GlmMoeDsa",
        {
            **DSA,
            "num_hidden_layers": 4,
            "index_topk": 3,
            "index_n_heads": 20,
            "index_head_dim": 24,
            "indexer_types": ["full", "shared", "full", "shared"],
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v4": Case("DeepseekV4", V4, renamed=V4_NAMES),
    "deepseek-v4-tables-by-name": Case(
        "DeepseekV4",
        {
            **V4,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
                "compress": {
                    "partial_rotary_factor": 0.25,
                    **{name: value for name, value in YARN.items() if "mscale" not in name},
                },
            },
        },
        renamed=V4_NAMES,
    ),
    "deepseek-v4-all-entries-yarn": Case(
        "DeepseekV4",
        {
            **V4,
            "index_topk": 6,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 20,
            "layer_types": None,
            "mlp_layer_types": None,
            "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 2},
            "rope_parameters": {name: value for name, value in YARN.items() if "mscale" not in name},
            "compress_rope_theta": 50000.0,
        },
        renamed=V4_NAMES,
    ),
    "mimo-v2-flash": Case("MiMoV2Flash", MIMO),
    "mimo-v2-flash-groups-biases": Case(
        "MiMoV2Flash",
        {
            **MIMO,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "attention_value_scale": None,
            "sliding_window_size": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}
CONFIGS = {
    "deepseek_v32": CONFIGS_MOE["kimi_k2"]
    | {"routed_scaling_factor": 1.5, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 32},
    "glm_moe_dsa": (
        COMMON
        | EXPERTS
        | {
            "num_key_value_heads": 8,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "index_topk": 6,
            "index_n_heads": 16,
            "index_head_dim": 32,
            "indexer_rope_interleave": True,
            "index_topk_freq": 2,
            "index_skip_topk_offset": 1,
            "index_topk_pattern": None,
            "indexer_types": ["full", "shared", "full", "shared", "full", "shared", "full", "shared"],
            "mlp_layer_types": [
                "dense",
                "sparse",
                "sparse",
                "sparse",
                "sparse",
                "sparse",
                "sparse",
                "sparse",
            ],
            "num_nextn_predict_layers": 0,
        }
    ),
    "deepseek_v4": {name: value for name, value in COMMON.items() if name != "intermediate_size"}
    | {
        "num_key_value_heads": 1,
        "head_dim": 64,
        "moe_intermediate_size": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "num_hash_layers": 3,
        "num_nextn_predict_layers": 1,
        "attention_bias": False,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 8,
        "o_groups": 4,
        "o_lora_rank": 64,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "index_topk": 6,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "sliding_window": 3,
        "swiglu_limit": 0.5,
        "compress_rope_theta": 160000,
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 0],
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 64,
            "type": "yarn",
        },
    },
    "mimo_v2_flash": (
        {name: value for name, value in COMMON.items() if name != "rope_theta"}
        | EXPERTS
        | {
            "head_dim": 64,
            "v_head_dim": 32,
            "n_routed_experts": 64,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "swa_rope_theta": 10000,
            "partial_rotary_factor": 0.334,
            "attention_value_scale": 0.707,
            "sliding_window": 3,
            "sliding_window_size": 3,
            "attention_chunk_size": 3,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1],
            "hybrid_block_size": None,
            "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 64,
            "swa_v_head_dim": 32,
            "n_shared_experts": None,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 5000000,
                    "partial_rotary_factor": 0.334,
                },
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": 10000,
                    "partial_rotary_factor": 0.334,
                },
            },
        }
    ),
}
