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
"""model_type -> what is missing, for a config whose fields don't say it. docs/families.md has them."""

_OF_TYPES: dict[str, str] = {
    # what is missing <- model types, from transformers' modeling files
    "layers with a recurrent state (linear attention)": "minimax olmo_hybrid rwkv xlstm",
    "layers with a recurrent state (Mamba)": "jamba mamba falcon_mamba",
    "layers with a recurrent state (Mamba-2)": "bamba falcon_h1 mamba2 zamba zamba2",
    "layers with a recurrent state (RG-LRU)": "recurrent_gemma",
    "layers with a recurrent state (Mamba-2) and an MLP beside the experts": "granitemoehybrid",
    "layers of short convolutions": "lfm2 lfm2_moe lfm2_vl",
    "a gate on attention's output": "afmoe laguna",
    "routing by sparsemixer, layer norms with biases": "phimoe",
    "embeddings for each layer, keys and values that layers share, mixed streams (AltUp)": (
        "gemma3n gemma3n_text"
    ),
    "a text model that rotates by three axes beside a vision tower": (
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni glm4v glm4v_text glm4v_moe"
        " glm4v_moe_text glm46v ernie4_5_vl_moe ernie4_5_vl_moe_text paddleocr_vl hunyuan_vl"
    ),
    "a text model beside a speech encoder": "qwen3_omni_moe qwen3_omni_moe_thinker phi4_multimodal",
    "layers that attend to an image (cross attention)": "mllama mllama_text_model",
    "attention and MLP side by side, layer norms without a bias": "cohere cohere2",
    "attention and MLP side by side, layer norms with biases": "phi gpt_neox gptj codegen falcon",
    "layer norms with biases": "stablelm starcoder2 nemotron dbrx persimmon",
    "layer norms without parameters": "olmo",
    "an MLP without a gate": "arcee apertus",
    "ternary weights and rounded activations": "bitnet",
    "positions that are added to the embeddings": "gpt2 gpt_bigcode gpt_neo opt biogpt xglm openai-gpt",
    "attention with biases of distance (ALiBi)": "bloom mpt",
    "experts that return their input, two attentions in a layer": "longcat_flash",
    "a file for this family (its parts are those of others)": (
        "gemma cwm hyperclovax ernie4_5 glm glm4 helium exaone4 exaone_moe dots1 hy_v3 solar_open"
        " glm4_moe_lite minicpm3 youtu axk1 granitemoeshared granite_swa granitemoe_swa olmoe"
        " flex_olmo mellum hunyuan_v1_dense hunyuan_v1_moe"
    ),
    "an encoder": (
        "bert roberta xlm-roberta electra deberta deberta-v2 albert distilbert modernbert t5 mt5"
        " bart mbart pegasus t5gemma t5gemma2 whisper marian"
    ),
    "a decoder that only the release's own code describes": (
        "chatglm baichuan qwen internlm internlm2 minicpm deepseek orion phi-msft phi3_v rwkv5"
    ),
}
OTHERS: dict[str, str] = {name: words for words, names in _OF_TYPES.items() for name in names.split()}
"""The same for more model types; of these nothing stands in docs/families.md."""


def missing(config: Mapping[str, Any]) -> str:
    """What of a model is not built, by its own fields, else by its model_type: "… is not built".

    "" where nothing is known of it.
    """
    text = config.get("text_config")
    given = text if isinstance(text, Mapping) else config
    found = asked(given)
    if not found:
        types = [table.get("model_type") for table in (config, given)]
        known = OTHERS | NAMED
        found = [known[name] for name in types if isinstance(name, str) and name in known][:1]
    return f"{', '.join(found)} {'is' if len(found) == 1 else 'are'} not built" if found else ""


def asked(config: Mapping[str, Any]) -> list[str]:
    """The parts that its fields ask for, each with the field: "sparse attention … (index_topk)"."""
    first = [(words, next((name for name in names if config.get(name)), "")) for words, names in PARTS]
    return [f"{words} ({name})" for words, name in first if name]
