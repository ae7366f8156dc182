"""Qwen3-Next: three of four layers are Gated DeltaNet, the fourth is attention with a gate; many experts.

Source: the model card of Qwen3-Next-80B-A3B; arXiv:2412.06464 (Gated DeltaNet), arXiv:2505.06708 (gate).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama, qwen2_moe
from unfreeze.models.configs import qwen3_next as config_json
from unfreeze.models.layer_types import LINEAR
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.attention import GatedAttention
    from unfreeze.models.blocks.bytes import Block
    from unfreeze.models.blocks.gated_delta import GatedDeltaNet
    from unfreeze.models.factory import Ends, Factory
    from unfreeze.models.layer import Layer

_MIXER = "model.layers.{layer}.linear_attn."
DECAY = tuple(StackRule(_MIXER + name, f"{_MIXER}decay.{name}") for name in ("A_log", "dt_bias"))
RULES = (*deepseek_v3.RULES, *DECAY)
FIELDS = config_json.FIELDS
shape = config_json.shape


def ignored(shape: Shape) -> tuple[str, ...]:
    """Llama's rotary table, and the heads that predict several tokens."""
    return (*llama.ignored(shape), r"(model\.)?mtp\..*")


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`."""
    return block(shape, index, make, qwen2_moe.mlp(shape, index, make), fused=True)


def block(shape: Shape, index: int, make: Factory, mlp: Block, *, fused: bool) -> Layer:
    """The pre-norm block around Gated DeltaNet or attention. fused: with Qwen3-Next's two projections."""
    from unfreeze.models.blocks.norm import OffsetRMSNorm
    from unfreeze.models.layer import Layer

    linear = shape.layer_types[index] == LINEAR
    return Layer(
        self_attn=delta_net(shape, index, make, fused) if linear else attention(shape, index, make),
        mlp=mlp,
        input_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps, OffsetRMSNorm),
        post_attention_layernorm=make.norm(shape.hidden_size, shape.rms_norm_eps, OffsetRMSNorm),
        name="linear_attn" if linear else "self_attn",
    )


def attention(shape: Shape, index: int, make: Factory) -> GatedAttention:
    """GQA with norms of q and k and a gate; a quarter of a head rotates."""
    from unfreeze.models.blocks.attention import GatedAttention
    from unfreeze.models.blocks.norm import OffsetRMSNorm

    name, hidden, width = f"model.layers.{index}.self_attn", shape.hidden_size, shape.head_dim
    bias = bool(shape.config["attention_bias"])
    queries, keys = shape.num_heads * width, shape.num_kv_heads * width
    return GatedAttention(
        index,
        width,
        q_proj=make.linear(f"{name}.q_proj", hidden, 2 * queries, bias=bias),
        k_proj=make.linear(f"{name}.k_proj", hidden, keys, bias=bias),
        v_proj=make.linear(f"{name}.v_proj", hidden, keys, bias=bias),
        o_proj=make.linear(f"{name}.o_proj", queries, hidden, bias=bias),
        q_norm=make.norm(width, shape.rms_norm_eps, OffsetRMSNorm),
        k_norm=make.norm(width, shape.rms_norm_eps, OffsetRMSNorm),
        pairs="leading halves",
    )


def delta_net(shape: Shape, index: int, make: Factory, fused: bool) -> GatedDeltaNet:
    """Gated DeltaNet with the config's linear_… sizes."""
    from unfreeze.models.blocks.gated_delta import FusedGatedDeltaNet, GatedDeltaNet
    from unfreeze.models.blocks.recurrent import GatedNorm

    config, name, hidden = shape.config, f"model.layers.{index}.linear_attn", shape.hidden_size
    G, H = int(config["linear_num_key_heads"]), int(config["linear_num_value_heads"])
    k, v = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
    channels = 2 * G * k + H * v
    rows = (
        {"in_proj_qkvz": channels + H * v, "in_proj_ba": 2 * H}
        if fused
        else {"in_proj_qkv": channels, "in_proj_z": H * v, "in_proj_b": H, "in_proj_a": H}
    )
    return (FusedGatedDeltaNet if fused else GatedDeltaNet)(
        index,
        (G, H),
        (k, v),
        conv1d=make.short_conv(channels, int(config["linear_conv_kernel_dim"]), silu=True),
        decay=make.decay(H),
        norm=make.norm(v, shape.rms_norm_eps, GatedNorm),
        out_proj=make.linear(f"{name}.out_proj", H * v, hidden),
        **{part: make.linear(f"{name}.{part}", hidden, size) for part, size in rows.items()},
    )


def ends(shape: Shape, make: Factory) -> Ends:
    """The last norm's gain is 1 + weight, as that of all others."""
    from unfreeze.models.blocks.norm import OffsetRMSNorm
    from unfreeze.models.factory import Ends

    norm = make.norm(shape.hidden_size, shape.rms_norm_eps, OffsetRMSNorm)
    return Ends(make.embedding(shape), norm, make.head(shape))
