"""config.json of the models that are measured: small ones made up, large ones as published."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import unfreeze
from unfreeze.checkpoint.manifest import read_json

TINY_K2 = Path(unfreeze.__file__).parent / "assets" / "tiny-k2"
Config = dict[str, Any]

SIZES: dict[str, int] = {  # as Kimi-K2, 0.9 GB with INT4 experts
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
"""The smaller sizes of the model of the float64 comparison: 8 layers of 128 experts would take 11 GB."""
DENSE_CHECKED = {"num_hidden_layers": 2, "vocab_size": 16384}
QWEN2_05B = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
QWEN25_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
GPT_OSS_20B: Config = {  # openai/gpt-oss-20b
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA_31_8B: Config = {  # meta-llama/Llama-3.1-8B
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
KIMI_K2: Config = {  # moonshotai/Kimi-K2-Thinking
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}

SHARED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
ALL_BUT_EXPERTS = ["self_attn", "shared_experts", "model.layers.0.mlp", "lm_head"]


def _packed(format: str, group_size: int, **weights: Any) -> Config:
    """A quantization_config of compressed-tensors: routed experts in 4-bit floats."""
    group = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group_size, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": SHARED,
    }


EXPERTS_IN: dict[str, Config | None] = {
    "int4": None,  # as `kimi` has it
    "fp8": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ALL_BUT_EXPERTS,
    },
    "mxfp4": _packed("mxfp4-pack-quantized", 32, strategy="group"),
    "nvfp4": _packed("nvfp4-pack-quantized", 16, strategy="tensor_group"),
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ALL_BUT_EXPERTS,
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "dynamic": {"-:.*(self_attn|shared_experts|layers\\.0\\.mlp|lm_head).*": {}},
    },
}
"""Format -> the quantization_config of a model whose routed experts are in it."""


def kimi(**sizes: int) -> Config:
    """config.json in Kimi-K2-Thinking's on-disk format, with SIZES overridden by `sizes`.

    model_type is transformers' name of the architecture, because transformers is one of the sides.
    """
    ours = read_json(TINY_K2 / "config.json")
    return {
        **ours,
        **SIZES,
        **sizes,
        "model_type": "deepseek_v3",
        "max_position_embeddings": 262144,
        "rope_scaling": ours["rope_scaling"] | {"factor": 64.0, "original_max_position_embeddings": 4096},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    }


HYBRID_SIZES: dict[str, int] = {  # as Qwen3.5-35B-A3B at half its widths: 8 layers, 6 with a state
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 8192,
}
HYBRID_CHECKED = {"num_hidden_layers": 4, "num_experts": 16}
HYBRID_BUT_EXPERTS = ["lm_head", "re:.*attn.*", "re:.*shared_expert.*", r"re:.*mlp\.gate$"]


def hybrid(**sizes: int) -> Config:
    """config.json of a Qwen3.5-MoE language model with routed experts in Kimi's INT4."""
    int4 = read_json(TINY_K2 / "config.json")["quantization_config"]
    return {
        **HYBRID_SIZES,
        **sizes,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": int4 | {"ignore": HYBRID_BUT_EXPERTS},
    }


def qwen(kind: str, sizes: Mapping[str, int], tied: bool = True) -> Config:
    """config.json of model_type qwen2, qwen3 or qwen3_moe."""
    config: Config = {
        **sizes,
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}.get(kind, kind)],
        "model_type": kind,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768 if kind == "qwen2" else 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if kind != "qwen2":
        config["attention_bias"] = False
    if kind == "qwen3_moe":
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config
