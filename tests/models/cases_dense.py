"""The families without experts: cases for test_families.py, a config.json for test_config_fields.py."""

from family_case import COMMON, LLAMA3, NESTED, VISION, YARN, Case

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
}

GEMMA = {**GROUPED, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 4}
GEMMA_4 = {
    **GROUPED,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 4,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
QWEN_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}

CASES = {
    "llama": Case("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-gqa-tied": Case(
        "Llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ),
    "llama-3-rope-biases": Case(
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama-linear-rope": Case(
        "Llama",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
        },
    ),
    "qwen2-tied": Case(
        "Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ),
    "qwen2-untied-yarn": Case(
        "Qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e6,
            },
        },
    ),
    "qwen3": Case("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}),
    "qwen3-tied": Case(
        "Qwen3",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "mistral": Case("Mistral", {**GROUPED, "sliding_window": None}),
    "mistral-window": Case("Mistral", {**GROUPED, "head_dim": 24, "sliding_window": 4}),
    "ministral-window": Case("Ministral", {**GROUPED, "head_dim": 16, "sliding_window": 5}),
    "ministral-mixed": Case(
        "Ministral",
        {
            **GROUPED,
            "head_dim": 24,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": Case("Granite", {**GROUPED, **MULTIPLIERS}),
    "granite-biases-tied": Case(
        "Granite",
        {
            **GROUPED,
            **MULTIPLIERS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
    ),
    "seed-oss": Case("SeedOss", {**GROUPED, "head_dim": 24}),
    "seed-oss-biases": Case(
        "SeedOss", {**GROUPED, "head_dim": 16, "attention_out_bias": True, "mlp_bias": True}
    ),
    "smollm3": Case("SmolLM3", {**GROUPED, "no_rope_layer_interval": 2}),
    "smollm3-window": Case(
        "SmolLM3",
        {
            **GROUPED,
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 4,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
    "olmo2": Case("Olmo2", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "olmo2-gqa-biases": Case("Olmo2", {**GROUPED, "attention_bias": True, "tie_word_embeddings": True}),
    "nanochat": Case("NanoChat", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "nanochat-gqa-biases": Case(
        "NanoChat", {**GROUPED, "attention_bias": True, "final_logit_softcapping": 3.0}
    ),
    "phi3": Case("Phi3", GROUPED),
    "phi3-partial-window": Case(
        "Phi3",
        {
            **GROUPED,
            "sliding_window": 4,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3-longrope-tied": Case(
        "Phi3",
        {
            **GROUPED,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 8,  # one of the documents is longer
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0],
                "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 13.0],
            },
        },
    ),
    "ministral3": Case("Ministral3", {**GROUPED, "head_dim": 16}),
    "ministral3-grows-and-slides": Case(
        "Ministral3",
        {
            **GROUPED,
            "head_dim": 24,
            "sliding_window": 4,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.3},
        },
    ),
    "mistral3": Case(
        "Mistral3",
        {
            "text_config": {**GROUPED, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": False,
        },
        model="Mistral3ForConditionalGeneration",
        renamed=NESTED,
    ),
    "mistral3-ministral3": Case(
        "Mistral3",
        {
            "text_config": {
                **GROUPED,
                "head_dim": 16,
                "model_type": "ministral3",
                "tie_word_embeddings": True,
            },
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8},
            "tie_word_embeddings": True,
        },
        model="Mistral3ForConditionalGeneration",
        renamed=NESTED,
    ),
    "qwen3-vl": Case(
        "Qwen3VL",
        {
            "text_config": {
                **GROUPED,
                "model_type": "qwen3_vl_text",
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 5e5,
                    "mrope_section": [4, 2, 2],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": QWEN_VISION,
        },
        model="Qwen3VLForConditionalGeneration",
        renamed=NESTED,
    ),
    "qwen3-vl-tied-biases": Case(
        "Qwen3VL",
        {
            "text_config": {
                **GROUPED,
                "model_type": "qwen3_vl_text",
                "head_dim": 24,
                "attention_bias": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 3, 3]},
            },
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": True,
        },
        model="Qwen3VLForConditionalGeneration",
        renamed=NESTED,
    ),
    "gemma2-window": Case("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma2-untied-biases": Case(
        "Gemma2",
        {
            **GEMMA,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3-window": Case(
        "Gemma3",
        {**GEMMA, "sliding_window_pattern": 2, "final_logit_softcapping": 3.0},
        config="Gemma3TextConfig",
    ),
    "gemma3-linear-softcap": Case(
        "Gemma3",
        {
            **GEMMA,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        config="Gemma3TextConfig",
    ),
    "gemma3-nested": Case(
        "Gemma3",
        {
            "text_config": {**GEMMA, "model_type": "gemma3_text", "sliding_window_pattern": 3},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
        model="Gemma3ForConditionalGeneration",
        renamed=NESTED,
    ),
    "olmo3-window": Case("Olmo3", {**GROUPED, "sliding_window": 4}),
    "olmo3-yarn": Case(
        "Olmo3",
        {
            **GROUPED,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "olmo3-plain": Case(
        "Olmo3",
        {
            **GROUPED,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
    ),
    "gemma4-window": Case("Gemma4", GEMMA_4, config="Gemma4TextConfig"),
    # no layer differs: per_layer_config is {}
    "gemma4-one-width": Case("Gemma4", {**GEMMA_4, "global_head_dim": 16}, config="Gemma4TextConfig"),
    "gemma4-values-are-keys": Case(
        "Gemma4",
        {
            **GEMMA_4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
        },
        config="Gemma4TextConfig",
    ),
    "gemma4-nested": Case(
        "Gemma4",
        {
            "text_config": {
                **GEMMA_4,
                "model_type": "gemma4_text",
                "use_bidirectional_attention": "vision",
                "pad_token_id": 0,
            },
            "vision_config": None,
            "audio_config": None,
        },
        model="Gemma4ForConditionalGeneration",
        renamed=NESTED,
    ),
}

LLAMA3_AS_PUBLISHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": (
        COMMON
        | {
            "head_dim": 64,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": LLAMA3_AS_PUBLISHED,
            "pretraining_tp": 1,
        }
    ),
    "qwen2": (
        COMMON
        | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "rope_scaling": None}
    ),
    "qwen3": COMMON | {"head_dim": 64, "use_sliding_window": False},
    "mistral": COMMON | {"head_dim": 64, "sliding_window": None},
    "ministral": COMMON
    | {"head_dim": 64, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "granite": COMMON | {name: 0.5 for name in MULTIPLIERS} | {"attention_bias": False, "mlp_bias": False},
    "seed_oss": COMMON
    | {
        "head_dim": 64,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "residual_dropout": 0.1,
    },
    "smollm3": COMMON
    | {
        "no_rope_layers": [1, 1, 1, 0] * 2,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "olmo2": COMMON | {"attention_bias": False},
    "nanochat": COMMON | {"hidden_act": "relu2", "final_logit_softcapping": 15.0, "attention_bias": False},
    "phi3": COMMON | {"sliding_window": None, "original_max_position_embeddings": 4096, "resid_pdrop": 0.0},
    "ministral3": COMMON
    | {
        "head_dim": 64,
        "sliding_window": None,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen3_vl_text": {
        "model_type": "qwen3_vl",
        "image_token_id": 5,
        "vision_start_token_id": 7,
        "vision_config": QWEN_VISION,
        "text_config": COMMON
        | {
            "model_type": "qwen3_vl_text",
            "head_dim": 64,
            "attention_bias": False,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]},
        },
    },
    "gemma2": {name: value for name, value in COMMON.items() if name != "hidden_act"}
    | {
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 100,
        "sliding_window": 6,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {name: value for name, value in COMMON.items() if name != "hidden_act"}
    | {
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 100,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "olmo3": COMMON
    | {
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 4,
        "attention_bias": False,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4_text": {name: value for name, value in COMMON.items() if name not in ("hidden_act", "rope_theta")}
    | {
        "head_dim": 64,
        "global_head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 6,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
    },
}
