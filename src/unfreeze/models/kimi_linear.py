"""Kimi Linear: Kimi Delta Attention; every fourth layer has latent attention without rotation; many experts.

Source: arXiv:2510.26692; names and fields as in the release Kimi-Linear-48B-A3B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama, mixtral, mla
from unfreeze.models.configs import kimi_linear as config_json
from unfreeze.models.layer_types import LINEAR
from unfreeze.models.shape import Shape

if TYPE_CHECKING:
    from unfreeze.models.blocks.kda import KimiDeltaAttention
    from unfreeze.models.factory import Factory
    from unfreeze.models.layer import Layer

_MOE, _MLP = "model.layers.{layer}.block_sparse_moe.", "model.layers.{layer}.mlp."
_MIXER = "model.layers.{layer}.self_attn."
_DENSE = ("gate_proj", "up_proj", "down_proj")
RULES = (
    *mixtral.RULES,
    StackRule(f"{_MOE}gate.e_score_correction_bias", f"{_MLP}gate.e_score_correction_bias"),
    StackRule(f"{_MOE}shared_experts.{{which}}.{{part}}", f"{_MLP}shared_experts.{{which}}.{{part}}"),
    # a dense layer: the release's name, then the one that transformers writes
    *(StackRule(f"{at}{name}.{{part}}", f"{_MLP}{name}.{{part}}") for at in (_MLP, _MOE) for name in _DENSE),
    *(StackRule(_MIXER + name, f"{_MIXER}decay.{name}") for name in ("A_log", "dt_bias")),
)
RENAMED = tuple((f"self_attn.{name}", f"self_attn.forget_gate.{name}") for name in ("f_a_proj", "f_b_proj"))
ignored = deepseek_v3.ignored
FIELDS = config_json.FIELDS
shape = config_json.shape


def any_rotates(shape: Shape) -> bool:
    """False: neither kind of layer has positions."""
    return False


def layer(shape: Shape, index: int, make: Factory) -> Layer:
    """Decoder layer `index`: KDA or latent attention, then a dense MLP or routed and shared experts."""
    from unfreeze.models.blocks.mla import UnrotatedMLA

    linear = shape.layer_types[index] == LINEAR
    mixer = (
        delta_attention(shape, index, make)
        if linear
        else mla.attention(shape, index, make, kind=UnrotatedMLA)
    )
    return llama.block(shape, mixer, deepseek_v3.mlp(shape, index, make, deepseek_v3.router), make)


def delta_attention(shape: Shape, index: int, make: Factory) -> KimiDeltaAttention:
    """KDA with the config's linear_… sizes."""
    from unfreeze.models.blocks.kda import KimiDeltaAttention
    from unfreeze.models.blocks.recurrent import SigmoidGatedNorm

    config, name, D = shape.config, f"model.layers.{index}.self_attn", shape.hidden_size
    H, k, taps = (int(config[f"linear_{size}"]) for size in ("num_heads", "head_dim", "conv_kernel_dim"))
    sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (D, H * k)) | {
        "f_a_proj": (D, k),
        "f_b_proj": (k, H * k),
        "b_proj": (D, H),
        "g_a_proj": (D, k),
        "g_b_proj": (k, H * k),
        "o_proj": (H * k, D),
    }
    return KimiDeltaAttention(
        index,
        H,
        k,
        decay=make.channel_decay(H, k),
        o_norm=make.norm(k, shape.rms_norm_eps, SigmoidGatedNorm),
        **{part: make.linear(f"{name}.{part}", *size) for part, size in sizes.items()},
        **{f"{part}_conv1d": make.short_conv(H * k, taps, silu=True) for part in "qkv"},
    )
