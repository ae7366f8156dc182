"""The families without experts: cases for test_families.py, a config.json for test_config_fields.py."""

from family_case import COMMON, LLAMA3, Case

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
}
