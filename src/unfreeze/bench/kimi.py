"""config.json of a small model in Kimi-K2-Thinking's on-disk format: what moe, load and decode measure on.

As published: hidden 1024, 8 layers (the first dense), 128 experts of width 512, top-8, one shared expert,
vocabulary 8192; 0.9 GB with INT4 experts.
"""

from __future__ import annotations

from typing import Any

SIZES: dict[str, int] = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "intermediate_size": 2560,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 8192,
}
CHECKED = {"num_hidden_layers": 2, "n_routed_experts": 16}
"""What is smaller in the checkpoint that the float64 comparison runs on: in float64 all 128 experts of 8
layers would be 11 GB."""


def config(**sizes: int) -> dict[str, Any]:
    """config.json of the checkpoint; `sizes` replace those of SIZES."""
    return {
        **SIZES,
        **sizes,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 262144,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "factor": 64.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": 32,
                        "dynamic": False,
                        "actorder": None,
                        "block_structure": None,
                        "observer": "minmax",
                        "observer_kwargs": {},
                    },
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    }
