"""Kimi Linear: Kimi Delta Attention; every fourth layer has latent attention without rotation; many experts.

Source: arXiv:2510.26692; names and fields as in the release Kimi-Linear-48B-A3B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.core.errors import CheckpointError
from unfreeze.models import deepseek_v3, llama, mixtral, mla
from unfreeze.models.allowed import Fields, names
from unfreeze.models.fields import NEXT, Whole, shown
from unfreeze.models.layer_types import FULL, LINEAR, layer_types
from unfreeze.models.shape import Shape, require

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
SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Sizes in linear_attn_config -> transformers' names for them outside."""
LISTS = ("kda_layers", "full_attn_layers")
OTHER_NAMES: dict[str, tuple[str, object]] = {
    "max_position_embeddings": ("model_max_length", 1048576),
    "norm_topk_prob": ("moe_renormalize", True),
    "n_group": ("num_expert_group", 1),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_shared_experts": ("num_shared_experts", 1),
    "num_local_experts": ("num_experts", 256),
}
"""DeepSeek-V3's name -> (Kimi Linear's, its default). A config with both must have the same value in both."""


def _same(name: str, own: str) -> Callable[[Mapping[str, Any]], object]:
    return lambda config: config.get(own, config[name])


FIELDS = Fields(
    absent={
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 1024,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
    },
    read=names("linear_attn_config layer_types mlp_layer_types first_k_dense_replace")
    | {own for own, _ in OTHER_NAMES.values()},
    only={
        "mla_use_nope": lambda config: True,
        "moe_router_activation_func": lambda config: "sigmoid",
        "topk_method": lambda config: "noaux_tc",
        "moe_layer_freq": lambda config: 1,
        **{name: deepseek_v3.MLA_SIZES[name] for name in ("num_key_value_heads", "qk_head_dim")},
        **{name: _same(name, own) for name, (own, _) in OTHER_NAMES.items()},
    },
    silent=names("auto_map use_grouped_topk head_dim"),  # head_dim is no size of its layers
)


def any_rotates(shape: Shape) -> bool:
    """False: neither kind of layer has positions."""
    return False


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; those in linear_attn_config stand above those outside, as in transformers.

    Raises CheckpointError for a linear_attn_config that contradicts itself or the fields beside it.
    """
    table = _linear(config)
    config = {
        **{name: value for name, value in config.items() if not name.startswith("rope_")},  # nothing rotates
        **{name: config.get(own, config.get(name, usual)) for name, (own, usual) in OTHER_NAMES.items()},
        **{own: table[name] for name, own in SIZES.items() if name in table},
    }
    full = table.get("full_attn_layers", range(5, config["num_hidden_layers"] + 1, 4))
    kinds = layer_types(config, lambda index: FULL if index + 1 in full else LINEAR, (FULL, LINEAR))
    if LISTS[1] in table and {index + 1 for index, kind in enumerate(kinds) if kind == FULL} != {*full}:
        raise CheckpointError("config.json: layer_types and linear_attn_config differ", next=NEXT)
    dense = int(config.get("first_k_dense_replace", 1))
    mlps = layer_types(
        config, lambda i: "dense" if i < dense else "sparse", ("dense", "sparse"), "mlp_layer_types"
    )
    sizes = deepseek_v3.shape({**config, "first_k_dense_replace": 0, "rope_interleave": True})
    assert sizes.moe is not None
    moe = replace(sizes.moe, dense_layers=frozenset(i for i, kind in enumerate(mlps) if kind == "dense"))
    return replace(sizes, family="kimi_linear", layer_types=kinds, moe=moe)


def _linear(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """linear_attn_config, checked: each layer is in one of its two lists, which count from 1."""
    table, layers = config.get("linear_attn_config") or {}, int(require(config, "num_hidden_layers"))
    for name, value in table.items():
        good = isinstance(value, list) if name in LISTS else name in SIZES and Whole(1, 2**20)(value)
        if not good:
            raise CheckpointError(
                f"config.json: linear_attn_config.{name} {shown(value)} is not built", next=NEXT
            )
    listed = [layer for name in LISTS for layer in table.get(name, ())]
    if listed and sorted(listed, key=str) != sorted(range(1, layers + 1), key=str):
        raise CheckpointError(
            f"config.json: {' and '.join(LISTS)} of linear_attn_config must hold each layer from 1 to"
            f" {layers:,} once",
            next=NEXT,
        )
    return table if listed else {name: value for name, value in table.items() if name not in LISTS}


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
