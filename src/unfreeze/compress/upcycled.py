"""The mixture that a dense family becomes, and its config.json.

Llama and Mistral become Mixtral, which always divides the weights of the chosen by their sum. Qwen2 becomes
Qwen2-MoE and Qwen3 becomes Qwen3-MoE, with norm_topk_prob true: without it the weights sum to less than one.

Fields that the two config classes default differently (rope_theta, sliding_window, rms_norm_eps, …) are
written out, and the new file is read again and compared with the old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.models.layer_types import FULL
from unfreeze.models.parts import ASSEMBLED
from unfreeze.models.shape import Shape

SHARED = 64
"""Width of Qwen2-MoE's shared expert: every routed expert has the whole MLP, so it can be small. 64 is the
narrowest that tensor-parallel servers and GPU kernels divide well."""


@dataclass(frozen=True)
class Mixture:
    """A family of mixtures: its model_type and class in transformers. shared: it has a shared expert."""

    model_type: str
    architecture: str
    shared: bool = False


MIXTRAL = Mixture("mixtral", "MixtralForCausalLM")
OF_DENSE = {
    "llama": MIXTRAL,
    "mistral": MIXTRAL,
    "qwen2": Mixture("qwen2_moe", "Qwen2MoeForCausalLM", shared=True),
    "qwen3": Mixture("qwen3_moe", "Qwen3MoeForCausalLM"),
}
KNOWN = ", ".join(f"{dense} → {mixture.model_type}" for dense, mixture in OF_DENSE.items())
DROPPED = ("auto_map", "_name_or_path", "name_or_path", "mlp_bias", "architectures", "model_type")
SAME = (
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_positions"),
    *("rms_norm_eps", "initializer_range", "tied", "rope", "ropes", "softcap"),
)
"""Fields of the shape that the mixture must have like the dense model."""


def family_of(manifest: Manifest) -> Mixture:
    """The mixture of a dense checkpoint. Raises ConfigError for a family without one, with the list."""
    model_type = str(manifest.config.get("model_type"))
    if model_type == ASSEMBLED:
        raise ConfigError(
            f"{manifest.path} has other parts than its family's, which a mixture would not keep",
            next="upcycle first, then give the mixture its parts: unfreeze swap",
        )
    if model_type not in OF_DENSE:
        raise ConfigError(
            f"{manifest.path} is a {model_type}, which has no mixture here; known: {KNOWN}",
            next="take a release of one of these families",
        )
    return OF_DENSE[model_type]


def config_of(manifest: Manifest, old: Shape, experts: int, top_k: int) -> dict[str, Any]:
    """config.json of the mixture. Raises ConfigError for biases that Mixtral doesn't have."""
    mixture, raw = family_of(manifest), manifest.config
    config = {name: value for name, value in {**raw, **old.config}.items() if name not in DROPPED}
    if mixture is MIXTRAL:
        for name in ("attention_bias", "mlp_bias"):
            if old.config.get(name):
                raise ConfigError(
                    f"config.json: {name} is true, and a mixtral has no such biases",
                    next="take a llama or mistral release without them",
                )
        config.pop("attention_bias", None)
        config |= {"num_local_experts": experts, "sliding_window": old.config.get("sliding_window")}
    else:
        config |= {"num_experts": experts, "moe_intermediate_size": old.intermediate_size}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if mixture.shared:
        config["shared_expert_intermediate_size"] = min(SHARED, old.intermediate_size)
        config["qkv_bias"] = True
    config |= {
        "num_experts_per_tok": top_k,
        "num_key_value_heads": old.num_kv_heads,
        "head_dim": old.head_dim,
        "output_router_logits": False,
    }
    if not config.get("rope_parameters") and not config.get("rope_theta"):
        config["rope_theta"] = 10000.0  # the default of the dense families; Mixtral's is 1e6
    config = {"architectures": [mixture.architecture], "model_type": mixture.model_type, **config}
    _compare(old, models.shape(config))
    return config


def _compare(old: Shape, new: Shape) -> None:
    """Raise CheckpointError if the mixture's config.json says another attention, norm or vocabulary."""
    other = [name for name in SAME if getattr(old, name) != getattr(new, name)]
    if _kinds(old) != _kinds(new):
        other.append("layer_types")
    if other:
        raise CheckpointError(
            f"the mixture's config.json would differ from the dense model's in {', '.join(other)}",
            next="report it with the model's config.json",
        )


def _kinds(shape: Shape) -> tuple[tuple[str, ...], object]:
    kinds = shape.layer_types or (FULL,) * shape.num_layers
    window = shape.config.get("sliding_window") if set(kinds) != {FULL} else None
    return kinds, window
