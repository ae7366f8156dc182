"""Names of DeepSeek-V4's tensors. Ours are those of transformers' modules; releases have names of their own.

transformers writes a mixture: the releases' names behind "model.", and attn.norm for attn.kv_norm.
"""

from __future__ import annotations

from dataclasses import replace

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.models import deepseek_v3, llama
from unfreeze.models.shape import Shape

_DISK, _OURS = "layers.{layer}.", "model.layers.{layer}."
_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
}
"""Modules: each has a weight, and the parts of its format."""
_SINGLE = {
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.ape": "self_attn.compressor.position_bias.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    **{
        f"hc_{half}_{part}": f"{half}_hc.{part}"
        for half in ("attn", "ffn")
        for part in ("fn", "base", "scale")
    },
}
_EXPERTS = (("w1", "gate_up_proj", 0), ("w3", "gate_up_proj", 1), ("w2", "down_proj", None))
_LAYERS = (
    *(StackRule(f"{_DISK}{disk}.{{part}}", f"{_OURS}{ours}.{{part}}") for disk, ours in _NAMES.items()),
    *(StackRule(_DISK + disk, _OURS + ours) for disk, ours in _SINGLE.items()),
    *(
        StackRule(
            f"{_DISK}ffn.experts.{{expert}}.{disk}.{{part}}", f"{_OURS}mlp.experts.{ours}.{{part}}", half
        )
        for disk, ours, half in _EXPERTS
    ),
)
RELEASED = (
    *_LAYERS,
    StackRule("embed.weight", "model.embed_tokens.weight"),
    StackRule("norm.weight", "model.norm.weight"),
    StackRule("head.weight", "lm_head.weight"),
    *(StackRule(f"hc_head_{part}", f"model.norm.hc_head.hc_{part}") for part in ("fn", "base", "scale")),
)
_BIAS = "self_attn.compressor.{inner}position_bias"
TRANSFORMERS = (
    *(replace(rule, disk=f"model.{rule.disk}") for rule in _LAYERS),
    StackRule(_OURS + "attn.norm.weight", _OURS + "self_attn.kv_norm.weight"),
    *(
        StackRule(_OURS + name, _OURS + name + ".weight")
        for name in (_BIAS.format(inner=inner) for inner in ("", "indexer."))
    ),
    *(
        StackRule(f"model.hc_head.hc_{part}", f"model.norm.hc_head.hc_{part}")
        for part in ("fn", "base", "scale")
    ),
)
RULES = (*RELEASED, *TRANSFORMERS, *deepseek_v3.FUSED)


def ignored(shape: Shape) -> tuple[str, ...]:
    """Multi-token prediction heads."""
    return (*llama.ignored(shape), r"(model\.)?mtp\..*")
