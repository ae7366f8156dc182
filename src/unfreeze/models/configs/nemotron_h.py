"""config.json of Nemotron-H and Nemotron 3: the kinds of its layers and the sizes of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models import llama, mamba
from unfreeze.models.allowed import Fields, names
from unfreeze.models.fields import NEXT, shown
from unfreeze.models.layer_types import FULL, LINEAR, layer_types
from unfreeze.models.shape import MoEShape, Shape

MOE, MLP = "moe", "mlp"
LETTERS = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}
FIELDS = Fields(
    absent={
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mlp_bias": False,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_limit": mamba.NO_LIMITS,
        "use_conv_bias": True,
        "use_bias": False,
        "n_routed_experts": 8,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    read=names("hybrid_override_pattern layers_block_type layer_types partial_rotary_factor"),
    null=names("moe_latent_size"),
    only={
        "mlp_hidden_act": lambda config: "relu2",
        "mamba_hidden_act": lambda config: "silu",
        "attention_bias": lambda config: False,
        "tie_word_embeddings": lambda config: False,  # transformers ties nothing, whatever it says
        "sliding_window": lambda config: None,
        "n_shared_experts": lambda config: 1,
        "attention_head_dim": lambda config: config["head_dim"],
        "norm_eps": lambda config: config["layer_norm_epsilon"],
        "rms_norm_eps": lambda config: config["layer_norm_epsilon"],
        "num_local_experts": lambda config: config["n_routed_experts"],
    },
    silent=names("""
        chunk_size expand time_step_min time_step_max time_step_floor time_step_rank mamba_ssm_cache_dtype
        rescale_prenorm_residual num_logits_to_keep use_mamba_kernels moe_shared_expert_overlap auto_map
        num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
    """),
    neutral={"residual_in_fp32": False, "mamba_proj_bias": False},
)


def kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The mixer of each layer: layers_block_type, or a letter each in hybrid_override_pattern."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern") or ""
    if listed is None:
        unknown = [letter for letter in pattern if letter not in LETTERS]
        if unknown or not pattern:
            what = f"holds {shown(unknown[0])}; known: {' '.join(LETTERS)}" if unknown else "is missing"
            raise CheckpointError(f"config.json: hybrid_override_pattern {what}", next=NEXT)
        listed = [LETTERS[letter] for letter in pattern]
    length = {"num_hidden_layers": len(listed), **config}
    declared = mamba.renamed_kinds({**length, "layer_types": listed})
    return layer_types(declared, lambda index: LINEAR, tuple(LETTERS.values()))


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json; num_hidden_layers may be absent."""
    of_layers = kinds(config)
    filled = {**config, "num_hidden_layers": len(of_layers), "rms_norm_eps": config["layer_norm_epsilon"]}
    mamba.check(sizes(config))
    moe = MoEShape(
        num_experts=int(config["n_routed_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        num_shared_experts=1,
        dense_layers=frozenset(index for index, kind in enumerate(of_layers) if kind != MOE),
        latent=int(config.get("moe_latent_size") or 0),
        matrices=2,
    )
    base = replace(llama.shape(filled), family="nemotron_h", layer_types=of_layers)
    return replace(base, moe=moe if MOE in of_layers else None)


def sizes(config: Mapping[str, Any]) -> mamba.Sizes:
    """Sizes of its Mamba-2 layers."""
    heads, width = config["mamba_num_heads"], config["mamba_head_dim"]
    return mamba.Sizes(
        groups=("n_groups", config["n_groups"]),
        heads=("mamba_num_heads", heads),
        state=config["ssm_state_size"],
        width=width,
        channels=("mamba_num_heads x mamba_head_dim", heads * width),
        taps=config["conv_kernel"],
        conv_bias=config["use_conv_bias"],
        bias=config["use_bias"],
        limits=mamba.limits(config),
        eps=config["layer_norm_epsilon"],
    )
