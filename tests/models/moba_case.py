"""Small models of several families whose attention is a mixture of blocks."""

from __future__ import annotations

from typing import Any

import torch

from unfreeze import models

BASE: dict[str, Any] = {
    "model_type": "unfreeze_parts",
    "base_model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.125,
    "tie_word_embeddings": False,
}
QWEN3_NEXT = {
    "base_model_type": "qwen3_next",
    "layer_types": ["full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 0.25,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"base_model_type": "qwen3"},
    "olmo2": {"base_model_type": "olmo2"},
    "phi3": {"base_model_type": "phi3", "pad_token_id": 0},
    "mistral": {"base_model_type": "mistral", "sliding_window": 20},
    "qwen3_next": QWEN3_NEXT,
}
"""Attention, norms per head, norms of all heads, one projection for q, k and v, a window, a gate."""
GATES: dict[str, dict[str, Any]] = {"mean": {}, "low_rank": {"gate": "low_rank", "rank": 8}}


def moba(at: str = "layers.*.self_attn", **options: Any) -> dict[str, Any]:
    return {"at": at, "part": "moba", "block": 8, "chosen": 3, **options}


def config(family: str = "llama", *parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**BASE, **FAMILIES[family], **fields, "parts": list(parts)}


def built(
    family: str = "llama", *parts: dict[str, Any], dtype: torch.dtype = torch.float32, **fields: Any
) -> models.Decoder:
    """A random model; gains of norms are random too."""
    model = models.build(models.shape(config(family, *parts, **fields)), dtype=dtype, device="cpu")
    models.initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model
