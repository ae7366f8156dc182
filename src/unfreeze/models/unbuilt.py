"""Data: fields of config.json that identify models that are not built.

A release is refused by its parts that are missing here, whatever it calls itself: Kimi-K3's text model has
model_type kimi_linear and is another model. If no field tells, the model_type does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # missing part <- fields, any of which requests it, except in a family that reads it
    ("sparse attention with an indexer", ("index_topk", "index_n_heads")),
    ("attention over compressed keys", ("compress_ratios", "compress_rope_theta")),
    ("hyper-connections between layers", ("hc_mult",)),
    ("routing by a hash of the token", ("num_hash_layers",)),
    ("sparse attention by blocks", ("sparse_attention_config",)),
    ("a gate on attention's output", ("mla_use_output_gate",)),
    ("attention residuals between blocks of layers", ("attn_res_block_size",)),
    ("the activation SiTU", ("activation_situ_beta",)),
    ("experts in a latent space", ("routed_expert_hidden_size", "latent_moe_use_norm")),
    ("layers of different sizes, some without attention", ("block_configs",)),
    ("embeddings for each layer", ("hidden_size_per_layer_input",)),
    ("keys and values that layers share", ("num_kv_shared_layers",)),
    ("values of another width and scale than keys", ("attention_value_scale",)),
)
NAMED: dict[str, str] = {
    "deepseek_ref": "attention over compressed keys, hyper-connections between layers",
    "kimi_k3": "layers with a recurrent state, the activation SiTU, attention residuals",
    "nemotron-nas": "layers of different sizes, some without attention",
    "minimax_m3": "sparse attention by blocks",
    "step3p7": "a gate for each head of attention, numbers of heads that differ by layer",
    # transformers 5.23 has no class to compare with, and a release's own code is not run
    "mimo": "a decoder that only the release's own code describes",
}
"""model_type -> the missing part, for a config whose fields don't tell. docs/reference/families.md lists
them."""

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("layers with a recurrent state (Mamba)", ("mamba_d_state", "mamba_num_heads", "state_size", "ssm_cfg")),
    ("layers with a recurrent state (RG-LRU)", ("lru_width",)),
    ("layers with a recurrent state (RWKV)", ("rescale_every",)),
    ("layers with a recurrent state (xLSTM)", ("sequence_kernel", "chunkwise_kernel")),
    (
        "layers with a recurrent state (linear attention)",
        ("linear_attn_alpha_factor", "linear_attn_config", "linear_conv_kernel_dim"),
    ),
    ("layers of short convolutions", ("conv_L_cache",)),
    ("mixed streams (AltUp)", ("altup_num_inputs",)),
    ("layers that attend to an image (cross attention)", ("cross_attention_layers",)),
    ("rotation by three axes", ("rope_parameters.mrope_section", "rope_scaling.mrope_section")),
    ("experts that return their input", ("zero_expert_num",)),
    ("attention with biases of distance", ("alibi", "attn_config.alibi", "relative_attention_num_buckets")),
    ("attention and MLP side by side", ("parallel_attn", "use_parallel_residual")),
    ("an encoder", ("is_encoder_decoder", "type_vocab_size", "encoder_layers", "classifier_pooling")),
    ("positions that are added to the embeddings", ("n_positions", "word_embed_proj_dim")),
    ("layer norms with biases", ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
    ("a speech encoder", ("audio_config",)),
    ("a vision tower", ("vision_config",)),
)
"""As PARTS, for a model_type that is not built: some built families write such a field without effect."""


def missing(config: Mapping[str, Any]) -> str:
    """The parts of a model that are not built, by its fields, else by its model_type: "… is not built".

    Returns "" if nothing is known about it.
    """
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else config
    parts = unbuilt_parts(inner)
    if not parts:
        types = [table.get("model_type") for table in (config, inner)]
        parts = [NAMED[name] for name in types if isinstance(name, str) and name in NAMED][:1]
    parts = parts or unbuilt_parts(inner, SIGNS) or unbuilt_parts(config, SIGNS)
    return f"{', '.join(parts)} {'is' if len(parts) == 1 else 'are'} not built" if parts else ""


def unbuilt_parts(
    config: Mapping[str, Any], parts: tuple[tuple[str, tuple[str, ...]], ...] = PARTS
) -> list[str]:
    """The parts that its fields request, each with the field: "sparse attention … (index_topk)"."""
    first = [(words, next((name for name in names if _value(config, name)), "")) for words, names in parts]
    return [f"{words} ({name})" for words, name in first if name]


def _value(config: Mapping[str, Any], name: str) -> object:
    """A field of config.json, or one of a table in it: "rope_scaling.mrope_section"."""
    table, _, inner = name.rpartition(".")
    holder = config.get(table) if table else config
    return holder.get(inner) if isinstance(holder, Mapping) else None


def nearest_family(config: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> str:
    """The built family that knows the most of its fields; "" for a config with few fields.

    known: model_type -> the fields that only some families know. In a tie, the family with the fewest other
    fields wins.
    """
    every = {name for fields in known.values() for name in fields}
    own = every & config.keys()
    if len(own) < FEWEST:
        return ""
    return max(known, key=lambda kind: (len(own & set(known[kind])), -len(set(known[kind]) - own), kind))


FEWEST = 6  # fields; with fewer, any family is as near as another
