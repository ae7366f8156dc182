"""DeepSeek-V4: compressed attention, residual streams, and experts that the first layers choose by the token.

Releases have names of their own (deepseek_v4_names.py). Prediction heads (mtp.*) are carried along.
Source: DeepSeek-V4's report; transformers 5.23, models/deepseek_v4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unfreeze.models.compressed import attention
from unfreeze.models.configs import deepseek_v4 as config_json
from unfreeze.models.deepseek_v4_names import RULES, ignored
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.moe import MoE
    from unfreeze.models.factory import Ends, Factory
    from unfreeze.models.layer import Layer

__all__ = ["FIELDS", "RULES", "ends", "ignored", "layer", "shape"]

FIELDS = config_json.FIELDS
shape = config_json.shape
SCALED_BY = ()
"""Scalings that --rope-scaling may write: none. In releases, layers with entries are scaled already."""


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    from unfreeze.models.blocks.streams import StreamLayer

    D, eps = shape.hidden_size, shape.rms_norm_eps
    return StreamLayer(
        attn_hc=make.hyper_connection(shape),
        ffn_hc=make.hyper_connection(shape),
        self_attn=attention(shape, index, make),
        mlp=experts(shape, index, make),
        input_layernorm=make.norm(D, eps),
        post_attention_layernorm=make.norm(D, eps),
    )


def ends(shape: Shape, make: Factory) -> Ends:
    """An embedding that fills all streams, and a norm of their weighted sum."""
    from unfreeze.models.blocks.streams import StreamEmbedding, StreamHead, StreamNorm
    from unfreeze.models.factory import Ends

    norm, eps = make.norm(shape.hidden_size, shape.rms_norm_eps, StreamNorm), shape.config["hc_eps"]
    options: dict[str, Any] = {"streams": shape.streams, "eps": float(eps), "norm_eps": shape.rms_norm_eps}
    norm.hc_head = StreamHead(shape.hidden_size, device=make.device, **options)
    table = StreamEmbedding(shape.vocab_size, shape.hidden_size, shape.streams, **make.table)
    return Ends(table, norm, make.head(shape))


def experts(shape: Shape, index: int, make: Factory) -> MoE:
    """Experts within a limit, beside a shared one; the first layers choose them by the token."""
    from unfreeze.kernels.expert_mlp import ClampedSwiGLU
    from unfreeze.models.blocks.moe import HashMoE, ReadMoE
    from unfreeze.models.blocks.nonlinearity import clamped_silu
    from unfreeze.models.blocks.routers import HashRouter, Router, RoutingRule

    config, name, hashed = (
        shape.config,
        f"model.layers.{index}.mlp",
        index in config_json.hashed_layers(shape.config),
    )
    limit, scale = float(config["swiglu_limit"]), float(config["routed_scaling_factor"])
    rule = RoutingRule("sqrtsoftplus", None if hashed else "E", normalize=True, added=1e-20, scale=scale)
    gate = make.router(shape, rule, HashRouter if hashed else Router)
    if isinstance(gate, HashRouter):
        gate.of_tokens(shape.vocab_size)
    activation = ClampedSwiGLU(alpha=1.0, limit=limit, added=0.0)
    width = int(config["moe_intermediate_size"])
    shared = make.mlp(f"{name}.shared_experts", shape.hidden_size, width, activation=clamped_silu(limit))
    routed = make.experts_of(shape, name, activation=activation)
    return (HashMoE if hashed else ReadMoE)(index, gate=gate, experts=routed, shared_experts=shared)
