"""Small models of parts, and what their tests share: random weights, norms too, and the documents."""

from typing import Any

import torch

from unfreeze import models
from unfreeze.models.parts import LAYER, PARTS
from unfreeze.models.parts.listing import place

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.125,
}
EXPERTS = {
    "base_model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
SMALLER: dict[str, dict[str, Any]] = {"sliding_window": {"window": 5}}
"""Options of a part for documents of a dozen tokens."""
LAYERS = [name for name, part in PARTS.items() if part.slot == LAYER and name != "shorten"]
"""Layers with other norms; test_shorten.py has the other one."""


def entry(name: str, **options: Any) -> dict[str, Any]:
    """The part at every layer."""
    return {"at": place(PARTS[name].slot), "part": name, **(options or SMALLER.get(name, {}))}


def config_of(*entries: dict[str, Any], **fields: Any) -> dict[str, Any]:
    own = {"model_type": "unfreeze_parts", "base_model_type": "llama", "parts": list(entries)}
    return {**BASE, **own, **fields}


def randomized(model: models.Decoder, seed: int = 0) -> models.Decoder:
    """Initial values; norms' gains are random too, so that each of them matters."""
    models.initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def built(*entries: dict[str, Any], dtype=torch.float32, **fields: Any) -> models.Decoder:
    return randomized(models.from_config(config_of(*entries, **fields), dtype, "cpu"))


def gradients(model: models.Decoder, batch, recompute=models.plain) -> dict[str, torch.Tensor]:
    """Of the log-probabilities along a random direction, by name."""
    model.zero_grad()
    probe = torch.randn(model.shape.vocab_size, generator=torch.Generator().manual_seed(1))
    logits = model.logits(model.hidden(batch, recompute))
    (logits.log_softmax(-1) * probe.to(logits.dtype)).sum().div(len(logits)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
