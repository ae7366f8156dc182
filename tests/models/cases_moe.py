"""The families with experts: cases for test_families.py, a config.json for test_config_fields.py."""

from cases_dense import GEMMA_4, QWEN_VISION
from family_case import COMMON, LLAMA3, NESTED, YARN, Case

MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
QWEN_MOE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}

GLM_MOE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}

QWEN2_MOE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
MIXTRAL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MLA_2 = {name: size for name, size in MLA.items() if name != "routed_scaling_factor"}
ERNIE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 48,
}
ERNIE_NAMES = (("gate.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),)

GPT_OSS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
}

MINIMAX = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MINIMAX_NAMES = (("gate.e_score_correction_bias", "e_score_correction_bias"),)
GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
}

LLAMA4 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 5,
    "floor_scale": 4,
}
LLAMA4_NAMES = {
    "config": "Llama4TextConfig",
    "model": "Llama4ForCausalLM",
    "renamed": (
        ("mlp.shared_experts.", "feed_forward.shared_expert."),
        ("mlp.gate.", "feed_forward.router."),
        ("mlp.", "feed_forward."),
    ),
    "transposed": True,
}

MISTRAL4 = {
    **MLA_2,
    "q_lora_rank": 40,
    "first_k_dense_replace": 0,
    "rope_parameters": {
        **YARN,
        "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.3,
        "max_position_embeddings": 256,
    },
}
QWEN_VL_MOE = {
    **QWEN_MOE,
    "model_type": "qwen3_vl_moe_text",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}

GEMMA_4_MOE = {
    **GEMMA_4,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
GEMMA_4_NAMES = (
    ("moe.experts.", "experts."),
    ("moe.gate.weight", "router.proj.weight"),
    ("moe.gate.", "router."),
    ("moe.pre_norm.", "pre_feedforward_layernorm_2."),
    ("moe.post_norm.", "post_feedforward_layernorm_2."),
)

CASES = {
    "qwen3-moe": Case("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": Case("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3-moe-sparse-step": Case("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "deepseek-v3": Case("DeepseekV3", {**MLA, "q_lora_rank": 40, "n_group": 1, "topk_group": 1}),
    "deepseek-v3-groups-yarn": Case(
        "DeepseekV3", {**MLA, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "rope_parameters": YARN}
    ),
    "deepseek-v3-no-q-latent": Case(
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": None,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
        },
    ),
    "deepseek-v3-biases": Case(
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": 40,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v3-rotated-halves": Case(
        "DeepseekV3", {**MLA, "q_lora_rank": 40, "n_group": 1, "topk_group": 1, "rope_interleave": False}
    ),
    "glm4-moe": Case("Glm4Moe", GLM_MOE),
    "glm4-moe-air": Case("Glm4Moe", {**GLM_MOE, "attention_bias": True, "partial_rotary_factor": 0.25}),
    "glm4-moe-norms-groups-yarn": Case(
        "Glm4Moe",
        {
            **GLM_MOE,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen2-moe": Case("Qwen2Moe", QWEN2_MOE),
    "qwen2-moe-mixed-normalized": Case(
        "Qwen2Moe", {**QWEN2_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "qkv_bias": False}
    ),
    "mixtral": Case("Mixtral", MIXTRAL),
    "mixtral-window": Case("Mixtral", {**MIXTRAL, "sliding_window": 4}),
    "mixtral-8-experts-tied": Case(
        "Mixtral", {**MIXTRAL, "num_local_experts": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "deepseek-v2": Case("DeepseekV2", {**MLA_2, "q_lora_rank": None, "n_shared_experts": 2}),
    "deepseek-v2-groups-yarn": Case(
        "DeepseekV2",
        {
            **MLA_2,
            "q_lora_rank": 40,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 16.0,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "ernie4-5-moe": Case("Ernie4_5_Moe", ERNIE, renamed=ERNIE_NAMES),
    "ernie4-5-moe-interval": Case(
        "Ernie4_5_Moe",
        {**ERNIE, "moe_layer_interval": 2, "moe_num_shared_experts": 0, "tie_word_embeddings": False},
        renamed=ERNIE_NAMES,
    ),
    "gpt-oss": Case("GptOss", GPT_OSS, renamed=(("mlp.gate.", "mlp.router."),), transposed=True),
    "gpt-oss-window-all-full": Case(
        "GptOss",
        {
            **GPT_OSS,
            "sliding_window": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "swiglu_limit": 0.5,
            "rope_parameters": YARN,
        },
        renamed=(("mlp.gate.", "mlp.router."),),
        transposed=True,
    ),
    "minimax-m2": Case("MiniMaxM2", MINIMAX, renamed=MINIMAX_NAMES),
    "minimax-m2-all-rotated": Case(
        "MiniMaxM2", {**MINIMAX, "rotary_dim": None, "num_key_value_heads": 4}, renamed=MINIMAX_NAMES
    ),
    "granitemoe": Case(
        "GraniteMoe", {**MIXTRAL, **GRANITE}, renamed=(("mlp.", "block_sparse_moe."), ("gate.", "router."))
    ),
    "granitemoe-biases-tied": Case(
        "GraniteMoe",
        {**MIXTRAL, **GRANITE, "num_local_experts": 8, "attention_bias": True, "tie_word_embeddings": True},
        renamed=(("mlp.", "block_sparse_moe."), ("gate.", "router.")),
    ),
    "llama4-text": Case(
        "Llama4",
        # Scout's: both bounds of llama3's ramp are 1
        {**LLAMA4, "rope_parameters": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}},
        **LLAMA4_NAMES,
    ),
    "llama4-text-maverick": Case(
        "Llama4",
        {
            **LLAMA4,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attention_chunk_size": 3,
            "no_rope_layers": [1, 0, 1],
            "attn_temperature_tuning": False,
            "rope_parameters": LLAMA3,
        },
        **LLAMA4_NAMES,
    ),
    "llama4-nested": Case(
        "Llama4",
        {
            "text_config": {**LLAMA4, "model_type": "llama4_text"},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
        model="Llama4ForConditionalGeneration",
        renamed=(
            *LLAMA4_NAMES["renamed"],
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
        transposed=True,
    ),
    "mistral4": Case("Mistral4", MISTRAL4),
    "mistral4-groups-halves": Case(
        "Mistral4",
        {
            **MISTRAL4,
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 1,
            "rope_interleave": False,
            "n_shared_experts": 2,
        },
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoe",
        {"text_config": QWEN_VL_MOE, "vision_config": QWEN_VISION},
        model="Qwen3VLMoeForConditionalGeneration",
        renamed=NESTED,
    ),
    "qwen3-vl-moe-mixed-tied": Case(
        "Qwen3VLMoe",
        {
            "text_config": {
                **QWEN_VL_MOE,
                "mlp_only_layers": [0],
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": True,
        },
        model="Qwen3VLMoeForConditionalGeneration",
        renamed=NESTED,
    ),
    "gemma4-experts": Case("Gemma4", GEMMA_4_MOE, config="Gemma4TextConfig", renamed=GEMMA_4_NAMES),
    "gemma4-experts-nested": Case(
        "Gemma4",
        {
            "text_config": {
                **GEMMA_4_MOE,
                "model_type": "gemma4_text",
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "top_k_experts": 4,
                "use_bidirectional_attention": "vision",
                "pad_token_id": 0,
            },
            "vision_config": None,
            "audio_config": None,
        },
        model="Gemma4ForConditionalGeneration",
        renamed=(*GEMMA_4_NAMES, *NESTED),
    ),
}

YARN_AS_PUBLISHED = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
CONFIGS = {
    "qwen3_moe": (
        COMMON
        | EXPERTS
        | {
            "head_dim": 64,
            "num_experts": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
        }
    ),
    "kimi_k2": (
        COMMON
        | EXPERTS
        | {
            "num_key_value_heads": 8,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_scaling": YARN_AS_PUBLISHED,
            "num_nextn_predict_layers": 0,
        }
    ),
    "glm4_moe": (
        COMMON
        | EXPERTS
        | {
            "head_dim": 64,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "num_nextn_predict_layers": 0,
            "attention_bias": True,
            "use_qk_norm": False,
        }
    ),
    "qwen2_moe": (
        COMMON
        | EXPERTS
        | {
            "num_experts": 64,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "qkv_bias": True,
        }
    ),
    "mixtral": (
        COMMON
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
        }
    ),
    "deepseek_v2": (
        COMMON
        | EXPERTS
        | {
            "num_key_value_heads": 8,
            "norm_topk_prob": False,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "routed_scaling_factor": 16.0,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_scaling": YARN_AS_PUBLISHED,
        }
    ),
    "ernie4_5_moe": (
        COMMON
        | {
            "use_bias": False,
            "moe_num_experts": 64,
            "moe_k": 4,
            "moe_intermediate_size": 256,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
        }
    ),
    "gpt_oss": (
        COMMON
        | {
            "attention_bias": True,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "initial_context_length": 64,
            "sliding_window": 5,
            "swiglu_limit": 0.1,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        }
    ),
    "minimax_m2": (
        COMMON
        | {
            "head_dim": 64,
            "rotary_dim": 8,
            "num_local_experts": 64,
            "num_experts_per_tok": 4,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "use_mtp": True,
            "num_mtp_modules": 3,
            "shared_intermediate_size": 0,
            "scoring_func": "sigmoid",
        }
    ),
    "granitemoe": (
        COMMON
        | dict.fromkeys(GRANITE, 0.5)
        | {"attention_bias": False, "num_local_experts": 32, "num_experts_per_tok": 4}
    ),
    "llama4_text": (
        COMMON
        | {
            "head_dim": 64,
            "intermediate_size_mlp": 512,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [],
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 8,
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.1,
            "use_qk_norm": True,
            "for_llm_compressor": False,
            "router_jitter_noise": 0.0,
        }
    ),
    "mistral4": (
        COMMON
        | EXPERTS
        | {
            "num_key_value_heads": 8,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.3,
                "max_position_embeddings": 256,
            },
        }
    ),
    "qwen3_vl_moe_text": {
        "model_type": "qwen3_vl_moe",
        "image_token_id": 5,
        "vision_start_token_id": 7,
        "vision_config": QWEN_VISION,
        "text_config": COMMON
        | EXPERTS
        | {
            "model_type": "qwen3_vl_moe_text",
            "head_dim": 64,
            "num_experts": 64,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
        },
    },
}
