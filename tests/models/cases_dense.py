"""The families without experts: cases for test_families.py, a config.json for test_config_fields.py."""

from family_case import COMMON, LLAMA3, Case

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
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
}
