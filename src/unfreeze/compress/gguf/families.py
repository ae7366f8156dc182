"""Model families that llama.cpp runs: their names there, their settings in a GGUF, and what it cannot hold.

A setting that llama.cpp does not read but has fixed in its code is refused at any other value: the file would
load and compute something else. Source: llama.cpp's src/models/*.cpp and src/llama-model.cpp (0.3.36 of
llama-cpp-python), whose names of keys are gguf's (gguf/constants.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from unfreeze.core.errors import ConfigError
from unfreeze.models import ONLY_HERE
from unfreeze.models.blocks.rope import Rope, rope_parameters, yarn_mscale
from unfreeze.models.layer_types import FULL, SLIDING
from unfreeze.models.shape import Shape

Value = int | float | bool | str | list[bool] | list[int]
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, by which llama.cpp knows them: their attention scale is hidden_size / heads."""


@dataclass(frozen=True)
class Family:
    """The form of a family in a GGUF.

    arch      its name in llama.cpp
    pairs     rows of q and k are in the order x0, x1 of each rotated pair, not all x0 first (permuted)
    one_plus  norms are stored as 1 + w
    own_head  llama.cpp needs a tensor output.weight; a tied head is written twice
    square    llama.cpp takes hidden_size for heads · head_dim
    windows   llama.cpp has its sliding windows
    biases    modules that may have a bias there, beside q, k and v
    """

    arch: str
    pairs: bool = False
    one_plus: bool = False
    own_head: bool = False
    square: bool = False
    windows: bool = False
    biases: tuple[str, ...] = ()


FAMILIES = {
    "llama": Family("llama", pairs=True, biases=("o_proj", "gate_proj", "up_proj", "down_proj")),
    "mistral": Family("llama", pairs=True),
    "qwen2": Family("qwen2", square=True),
    "qwen2_moe": Family("qwen2moe", own_head=True, square=True),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe"),
    "phi3": Family("phi3", square=True),
    "gemma2": Family("gemma2", one_plus=True, windows=True),
    "gemma3_text": Family("gemma3", one_plus=True, windows=True),
    "gemma4_text": Family("gemma4", windows=True),
    "gpt_oss": Family("gpt-oss", own_head=True, windows=True, biases=("o_proj", "gate", "experts")),
    "minimax_m2": Family("minimax-m2", own_head=True),
}


def family_of(shape: Shape) -> Family:
    """The family of a model, or a ConfigError that names what llama.cpp (or this export) does not have."""
    if shape.parts or shape.model_type in ONLY_HERE:
        raise ConfigError(
            f"a model of {shape.kind} has parts that llama.cpp does not have, so no GGUF can hold it",
            next="serve it here: unfreeze serve, or unfreeze generate",
        )
    if shape.model_type not in FAMILIES:
        raise ConfigError(
            f"GGUF of model type {shape.model_type} is not written; written: {', '.join(FAMILIES)}",
            next="convert_hf_to_gguf.py of llama.cpp; a run first: unfreeze merge RUN --to bf16 --out DIR",
        )
    for words in _not_held(shape, FAMILIES[shape.model_type]):
        raise ConfigError(
            f"{shape.model_type}: llama.cpp cannot hold {words}", next="serve it here: unfreeze serve"
        )
    return FAMILIES[shape.model_type]


def _not_held(shape: Shape, family: Family) -> Iterator[str]:
    """Values of this model's config.json that llama.cpp has fixed otherwise, one line each."""
    config, arch, rope = shape.config, family.arch, shape.rope
    kind = rope.computed.kind if rope.computed else "default"
    if shape.moe is not None and shape.moe.dense_layers and arch != "gemma4":
        yield f"layers without experts (layer {min(shape.moe.dense_layers)}) beside layers with them"
    if family.square and shape.num_heads * shape.head_dim != shape.hidden_size:
        yield f"head_dim {shape.head_dim}: it takes hidden_size / heads"
    if kind == "llama3" and not family.pairs:
        yield "rope type llama3 in this family"
    if kind == "longrope" and arch != "phi3":
        yield "rope type longrope in this family"
    if kind == "yarn":
        table = rope_parameters(config) if not shape.ropes else config["rope_parameters"][FULL]
        for name, fixed in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            if (value := table.get(name)) and float(value) != fixed:
                yield f"{name} {value}: it has {fixed:g} fixed"
    wanted = {"qwen2moe": False, "qwen3moe": True}.get(arch)
    if wanted is not None and bool(config.get("norm_topk_prob")) is not wanted:
        yield f"norm_topk_prob {str(not wanted).lower()}: it has {str(wanted).lower()} fixed"
    yield from _gemma(shape, family)
    if arch == "gpt-oss":
        if any((kind == SLIDING) != (index % 2 == 0) for index, kind in enumerate(shape.layer_types)):
            yield "layer_types: it has every second layer full, the first with a window"
        for name, fixed in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0), ("attention_bias", True)):
            if config[name] != fixed:
                yield f"{name} {config[name]}: it has {fixed} fixed"


def _gemma(shape: Shape, family: Family) -> Iterator[str]:
    """Gemma 2 and 3: a scale and a pattern of windows that llama.cpp has fixed. Gemma 4: one rotary table."""
    config, arch = shape.config, family.arch
    if arch in LARGE_GEMMA:
        large = shape.num_layers == LARGE_GEMMA[arch]
        scale = shape.hidden_size // shape.num_heads if large else shape.head_dim
        if config["query_pre_attn_scalar"] != scale:
            yield f"query_pre_attn_scalar {config['query_pre_attn_scalar']}: it has {scale} fixed"
    if arch == "gemma2":
        if not shape.tied:
            yield "a head of its own: its head is the embedding"
        if any((kind == SLIDING) != (index % 2 == 0) for index, kind in enumerate(shape.layer_types)):
            yield "layer_types: it has every second layer full, the first with a window"
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if not config.get(name):
                yield f"{name} null"
    if arch == "gemma4":
        full = config.get("rope_parameters", {}).get(FULL, {})
        if full and full.get("rope_type") != "proportional":
            yield f"rope type {full.get('rope_type')} of full layers: it has proportional"


def settings(shape: Shape, family: Family) -> Iterator[tuple[str, Value]]:
    """(key without the architecture, value) of a model."""
    config, arch, moe = shape.config, family.arch, shape.moe
    yield "context_length", context_length(shape, family)
    yield "embedding_length", shape.hidden_size
    yield "block_count", shape.num_layers
    yield "vocab_size", shape.vocab_size
    if arch == "gpt-oss" or moe is None or config.get("intermediate_size"):
        yield "feed_forward_length", shape.intermediate_size
    yield "attention.head_count", shape.num_heads
    if arch != "gemma4":
        yield "attention.head_count_kv", shape.num_kv_heads
        yield "attention.key_length", shape.head_dim
        yield "attention.value_length", shape.head_dim
    yield "attention.layer_norm_rms_epsilon", shape.rms_norm_eps
    if moe is not None:
        yield "expert_count", moe.num_experts
        yield "expert_used_count", moe.experts_per_token
        yield "expert_feed_forward_length", moe.intermediate_size
    if arch == "qwen2moe":
        yield "expert_shared_feed_forward_length", int(config["shared_expert_intermediate_size"])
    if arch == "minimax-m2":
        yield "expert_gating_func", 2  # gguf.ExpertGatingFuncType.SIGMOID
    yield from _rotary(shape, arch)
    yield from _attention(shape, arch)
    if arch == "gemma4":
        yield from _gemma4(shape)


def _rotary(shape: Shape, arch: str) -> Iterator[tuple[str, Value]]:
    """Base, width and scaling of the rotation; llama3's divisors are a tensor (tensors.py)."""
    computed = shape.rope.computed
    assert computed is not None
    yield "rope.freq_base", computed.theta
    yield "rope.dimension_count", computed.width
    if SLIDING in shape.ropes:
        local = shape.ropes[SLIDING].computed
        assert local is not None
        yield "rope.freq_base_swa", local.theta
    if computed.kind == "linear":
        yield "rope.scaling.type", "linear"
        yield "rope.scaling.factor", computed.factor
    if computed.kind == "yarn":
        yield "rope.scaling.type", "yarn"
        yield "rope.scaling.factor", computed.factor
        yield "rope.scaling.original_context_length", original_context(shape)
        # llama.cpp multiplies by YaRN's own 0.1 ln(factor) + 1
        if not math.isclose(extra := shape.rope.attention_factor / yarn_mscale(computed.factor), 1.0):
            yield "rope.scaling.attn_factor", extra
        yield "rope.scaling.yarn_beta_fast", 32.0
        yield "rope.scaling.yarn_beta_slow", 1.0
    if computed.kind == "longrope":
        yield "rope.scaling.type", "longrope"
        yield "rope.scaling.original_context_length", shape.rope.short_until
        yield "rope.scaling.attn_factor", shape.rope.attention_factor
    elif arch == "phi3":
        yield "rope.scaling.original_context_length", int(shape.config["original_max_position_embeddings"])


def original_context(shape: Shape) -> int:
    """Positions that a scaled rotation was trained with."""
    table = rope_parameters(shape.config)
    return int(table.get("original_max_position_embeddings") or shape.max_positions)


def _attention(shape: Shape, arch: str) -> Iterator[tuple[str, Value]]:
    """Windows and caps."""
    config = shape.config
    if arch == "phi3":
        yield "attention.sliding_window", int(config.get("sliding_window") or 0)
    if arch in ("gemma2", "gemma3", "gemma4", "gpt-oss"):
        yield "attention.sliding_window", int(config["sliding_window"])
    if arch in ("gemma3", "gemma4"):
        yield "attention.sliding_window_pattern", [kind == SLIDING for kind in shape.layer_types]
    if arch == "gemma2":
        yield "attn_logit_softcapping", float(config["attn_logit_softcapping"])
    if arch in ("gemma2", "gemma3", "gemma4") and shape.softcap:
        yield "final_logit_softcapping", float(shape.softcap)


def _gemma4(shape: Shape) -> Iterator[tuple[str, Value]]:
    """Gemma 4's two kinds of heads: the plain keys are those of full layers."""
    from unfreeze.models.configs.gemma4_text import full_heads

    keys, width = full_heads(shape.config, shape.layer_types)
    yield "attention.key_length", width
    yield "attention.value_length", width
    yield "attention.key_length_swa", shape.head_dim
    yield "attention.value_length_swa", shape.head_dim
    full = [kind != SLIDING for kind in shape.layer_types]
    yield (
        "attention.head_count_kv",
        shape.num_kv_heads
        if keys == shape.num_kv_heads
        else [keys if of else shape.num_kv_heads for of in full],
    )
    yield "rope.dimension_count_swa", shape.head_dim
    yield "attention.shared_kv_layers", 0
    yield "embedding_length_per_layer_input", 0


def context_length(shape: Shape, family: Family) -> int:
    """Positions that the file allows: at most the window where llama.cpp has none in this family."""
    window = shape.config.get("sliding_window")
    if SLIDING in shape.layer_types and not family.windows and window:
        return min(shape.max_positions, int(window))
    return shape.max_positions


def remarks(shape: Shape, family: Family) -> Iterator[str]:
    """Differences of llama.cpp that do not matter for short texts: said, not refused."""
    computed = shape.rope.computed
    if (length := context_length(shape, family)) < shape.max_positions:
        yield (
            f"llama.cpp has no sliding window for {family.arch}: context_length is the window, {length:,}"
            f" instead of {shape.max_positions:,}"
        )
    if computed is not None and computed.kind == "longrope":
        yield (
            "longrope: llama.cpp takes the long or the short table by the context it is started with, not by"
            " each text's length"
        )
    if (
        computed is not None
        and computed.kind == "yarn"
        and rope_parameters(shape.config).get("truncate") is False
    ):
        yield "llama.cpp rounds the ends of YaRN's ramp, which this model does not: angles differ slightly"


def divisors(rope: Rope) -> list[float]:
    """llama3's and Gemma 4's divisor of each pair's frequency; 1e30 for a pair that does not rotate."""
    assert rope.computed is not None
    theta, width = rope.computed.theta, rope.computed.width
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    return [p / f if f else 1e30 for p, f in zip(plain, rope.inverse_frequency, strict=True)]
