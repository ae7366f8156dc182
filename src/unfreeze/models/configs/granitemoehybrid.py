"""config.json of Granite 4: the kinds of its layers, and the sizes of the Mamba-2 ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.models import granitemoe, llama, mamba, mixtral
from unfreeze.models.allowed import Fields, names
from unfreeze.models.layer_types import FULL, LINEAR, layer_types
from unfreeze.models.shape import Shape, require

FIELDS = Fields(
    absent={
        **granitemoe.FIELDS.absent,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": mamba.NO_LIMITS,
    },
    read=names("num_key_value_heads layer_types position_embedding_type"),
    null=names("num_key_value_heads"),
    only={"normalization_function": lambda config: "rmsnorm"},
    silent=names("mamba_chunk_size init_method"),
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json: intermediate_size is an expert's; no experts if num_local_experts is 0."""
    kinds = layer_types(mamba.renamed_kinds(config), lambda index: LINEAR, (FULL, LINEAR))
    mamba.check(sizes(config))
    moe = mixtral.moe_shape(config) if config["num_local_experts"] else None
    return replace(llama.shape(config), family="granitemoehybrid", moe=moe, layer_types=kinds)


def sizes(config: Mapping[str, Any]) -> mamba.Sizes:
    """Sizes of its Mamba-2 layers."""
    channels, heads = config["mamba_expand"] * require(config, "hidden_size"), config["mamba_n_heads"]
    width = config["mamba_d_head"]
    return mamba.Sizes(
        groups=("mamba_n_groups", config["mamba_n_groups"]),
        heads=("mamba_n_heads", heads),
        state=config["mamba_d_state"],
        width=channels // heads if width == "auto" else width,
        channels=("mamba_expand x hidden_size", channels),
        taps=config["mamba_d_conv"],
        conv_bias=config["mamba_conv_bias"],
        bias=config["mamba_proj_bias"],
        limits=mamba.limits(config),
        eps=config["rms_norm_eps"],
    )
