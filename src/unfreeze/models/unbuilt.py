"""Models that are not built, by the fields of config.json that say so: data.

A release is refused with the parts it has and this program has not, whatever it calls itself: Kimi-K3's text
model says model_type kimi_linear and is another. Where no field tells, the model_type does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # what is missing <- fields, any of which asks for it
    ("sparse attention with an indexer", ("index_topk", "index_n_heads")),
    ("attention over compressed keys", ("compress_ratios", "compress_rope_theta")),
    ("hyper-connections between layers", ("hc_mult",)),
    ("routing by a hash of the token", ("num_hash_layers",)),
    ("sparse attention by blocks", ("sparse_attention_config",)),
    (
        "layers with a recurrent state (linear attention)",
        ("linear_attn_config", "linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_heads"),
    ),
    ("layers with a recurrent state (Mamba-2)", ("hybrid_override_pattern", "mamba_num_heads")),
    ("a gate on attention's output", ("attn_output_gate", "mla_use_output_gate")),
    ("latent attention without rotation", ("mla_use_nope",)),
    ("attention residuals between blocks of layers", ("attn_res_block_size",)),
    ("the activation SiTU", ("activation_situ_beta",)),
    ("experts in a latent space", ("routed_expert_hidden_size", "latent_moe_use_norm")),
    ("layers of different sizes, some without attention", ("block_configs",)),
    ("embeddings for each layer", ("hidden_size_per_layer_input",)),
    ("keys and values that layers share", ("num_kv_shared_layers",)),
    ("values of another width and scale than keys", ("attention_value_scale",)),
)
NAMED: dict[str, str] = {
    "qwen3_next": "layers with a recurrent state (linear attention)",
    "kimi_linear": "layers with a recurrent state (linear attention)",
    "deepseek_v32": "sparse attention with an indexer",
    "glm_moe_dsa": "sparse attention with an indexer",
    "deepseek_v4": "attention over compressed keys, hyper-connections between layers",
    "deepseek_ref": "attention over compressed keys, hyper-connections between layers",
    "kimi_k3": "layers with a recurrent state, the activation SiTU, attention residuals",
    "nemotron_h": "layers with a recurrent state (Mamba-2)",
    "nemotron-nas": "layers of different sizes, some without attention",
    "minimax_m3": "sparse attention by blocks",
    "mimo_v2_flash": "values of another width and scale than keys",
    # transformers 5.23 has no class to hold them against, and a release's own code is not run
    "mimo": "a decoder that only the release's own code describes",
    "step3p7": "a decoder that only the release's own code describes",
}
"""model_type -> what is missing, for a config whose fields don't say it."""


def missing(config: Mapping[str, Any]) -> str:
    """What of a model is not built, by its own fields, else by its model_type: "… is not built".

    "" where nothing is known of it.
    """
    text = config.get("text_config")
    given = text if isinstance(text, Mapping) else config
    found = asked(given)
    if not found:
        types = [table.get("model_type") for table in (config, given)]
        found = [NAMED[name] for name in types if isinstance(name, str) and name in NAMED][:1]
    return f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} not built" if found else ""


def asked(config: Mapping[str, Any]) -> list[str]:
    """The parts that its fields ask for, each with the field: "sparse attention … (index_topk)"."""
    first = [(words, next((name for name in names if config.get(name)), "")) for words, names in PARTS]
    return [f"{words} ({name})" for words, name in first if name]
