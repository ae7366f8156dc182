"""Checks config.json before anything is built from it.

Each field that a family reads is checked for type and range, and the sizes are checked against each other and
the files. Sizes from a file must not decide unchecked how long a loop runs or how much memory is allocated:
hidden_size 1e12 is refused, and the error shows the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unfreeze.checkpoint.manifest import Manifest
from unfreeze.core.errors import CheckpointError
from unfreeze.core.units import format_count
from unfreeze.models.shape import Shape

NEXT = "get config.json from the model's publisher again"
# limits far above the largest published: hidden sizes of 16,384 to 65,536, and 384 to 2,048 experts
WIDTH, COUNT = (2**20, 2**16)


@dataclass(frozen=True)
class Whole:
    """A whole number from `low` to `high`; true and 16.0 are not whole numbers."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"a whole number from {self.low:,} to {self.high:,}"

    def __call__(self, value: object) -> bool:
        return type(value) is int and self.low <= value <= self.high


@dataclass(frozen=True)
class Number:
    """A finite number above `low` (or at least `low`, if `closed`) and at most 1e12."""

    low: float
    closed: bool = False

    def __str__(self) -> str:
        return (
            f"a number {'from' if self.closed else 'above'} {self.low:g}{' on' if self.closed else ''}, at"
            " most 1e12"
        )

    def __call__(self, value: Any) -> bool:
        if type(value) not in (int, float) or not self.low <= value <= 1e12:  # NaN is not >= anything
            return False
        return self.closed or value > self.low


@dataclass(frozen=True)
class Of:
    """A value of one type: "true or false", "a text", "an object"."""

    type: type | tuple[type, ...]
    words: str

    def __str__(self) -> str:
        return self.words

    def __call__(self, value: object) -> bool:
        return isinstance(value, self.type)


@dataclass(frozen=True)
class Or:
    """A kind of value, or one word."""

    kind: Whole
    word: str

    def __str__(self) -> str:
        return f"{self.kind}, or {self.word!r}"

    def __call__(self, value: object) -> bool:
        return value == self.word or self.kind(value)


Kind = Whole | Number | Of | Or
FLAG, TEXT, TABLE, LAYERS, PER_LAYER = (
    Of(bool, "true or false"),
    Of(str, "a text"),
    Of(dict, "an object"),
    Of(list, "a list of layer numbers"),
    Of(list, "a list with an entry per layer"),
)
_FACTOR = Number(0)
FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), Whole(1, WIDTH)),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), Whole(1, WIDTH)),
    **dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"), Whole(1, COUNT)
    ),
    **dict.fromkeys(
        (
            "n_routed_experts",
            "num_experts",
            "moe_num_experts",
            "top_k_experts",
            "moe_k",
            "n_group",
            "topk_group",
        ),
        Whole(1, COUNT),
    ),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), Whole(1, COUNT)),
    **dict.fromkeys(
        ("num_local_experts", "num_experts_per_tok"), Whole(0, COUNT)
    ),  # Granite 4: 0, no experts
    **dict.fromkeys(
        ("n_shared_experts", "moe_num_shared_experts", "num_nextn_predict_layers", "num_mtp_layers"),
        Whole(0, 1000),
    ),
    "shared_expert_intermediate_size": Whole(0, WIDTH),
    **dict.fromkeys(("index_topk", "index_n_heads", "index_head_dim"), Whole(1, COUNT)),
    **dict.fromkeys(("index_topk_freq", "index_skip_topk_offset"), Whole(0, 10_000)),
    "index_topk_pattern": Of((str, list), "a letter per layer, F or S, or a list with an entry per layer"),
    **dict.fromkeys(("hc_mult", "hc_sinkhorn_iters"), Whole(1, 1000)),
    **dict.fromkeys(("o_groups", "o_lora_rank"), Whole(1, WIDTH)),
    **dict.fromkeys(("compress_rate_csa", "compress_rate_hca"), Whole(1, WIDTH)),
    "compress_rates": Of(dict, "an object"),
    "compress_rope_theta": Number(1),
    "hc_eps": Number(0, closed=True),
    "num_hash_layers": Whole(0, 10_000),
    "num_hidden_layers": Whole(1, 10_000),
    "full_attention_interval": Whole(1, 10_000),
    "linear_conv_kernel_dim": Whole(1, 64),
    **dict.fromkeys(
        ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
        Whole(1, COUNT),
    ),
    "first_k_dense_replace": Whole(0, 10_000),
    "decoder_sparse_step": Whole(1, 10_000),
    "moe_layer_interval": Whole(1, 10_000),
    "moe_layer_freq": Of((int, list), "a whole number, or a list with an entry per layer"),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index"), Whole(-1, 10_000)),
    "vocab_size": Whole(1, 2**24),
    "max_position_embeddings": Whole(1, 2**31),
    "original_max_position_embeddings": _FACTOR,
    "rms_norm_eps": Number(0, closed=True),
    "moe_norm_min": Number(0, closed=True),
    "initializer_range": Number(0, closed=True),
    **dict.fromkeys(("mamba_n_groups", "mamba_n_heads", "mamba_d_state", "mamba_d_conv"), Whole(1, COUNT)),
    "mamba_d_head": Or(Whole(1, COUNT), "auto"),
    "mamba_expand": Whole(1, WIDTH),
    "shared_intermediate_size": Whole(0, WIDTH),  # MiniMax-M2's is 0
    **dict.fromkeys(("mamba_conv_bias", "mamba_proj_bias"), FLAG),
    **dict.fromkeys(
        ("ssm_state_size", "mamba_num_heads", "mamba_head_dim", "n_groups", "conv_kernel"), Whole(1, COUNT)
    ),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), Whole(1, WIDTH)),
    "use_conv_bias": FLAG,
    "layer_norm_epsilon": Number(0, closed=True),
    "layers_block_type": PER_LAYER,
    "hybrid_override_pattern": TEXT,
    "time_step_limit": Of((list, tuple), "a list of two numbers"),
    "routed_scaling_factor": Number(0),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), Number(0)),
    "rotary_dim": Whole(2, COUNT),
    "intermediate_size_mlp": Whole(1, WIDTH),
    **dict.fromkeys(("attention_chunk_size", "floor_scale"), Whole(1, 2**31)),
    "interleave_moe_layer_step": Whole(1, 10_000),
    "attn_scale": Number(0, closed=True),
    "attn_temperature_tuning": Of(int, "true or false (Llama 4's first configs say 4 for true)"),
    "rope_theta": Number(1),
    "partial_rotary_factor": Number(0),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window"), FLAG
    ),
    **dict.fromkeys(("rope_interleave", "is_causal", "use_qk_norm", "qkv_bias", "use_bias"), FLAG),
    "attention_out_bias": FLAG,
    **dict.fromkeys(("sliding_window", "sliding_window_size"), Whole(0, 2**31)),
    "attention_value_scale": Number(0),
    "no_rope_layer_interval": Whole(1, 10_000),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types"), PER_LAYER),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), Number(0)),
    **dict.fromkeys(("logits_scaling", "final_logit_softcapping", "attn_logit_softcapping"), Number(0)),
    **dict.fromkeys(("query_pre_attn_scalar", "rope_local_base_freq"), Number(1, closed=True)),
    "sliding_window_pattern": Whole(1, 10_000),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), Whole(1, COUNT)),
    "attention_k_eq_v": FLAG,
    "num_kv_shared_layers": Whole(0, 10_000),
    "hidden_size_per_layer_input": Whole(0, WIDTH),
    "per_layer_config": TABLE,
    "hidden_activation": TEXT,
    **dict.fromkeys(("model_type", "hidden_act", "scoring_func", "topk_method"), TEXT),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), TABLE),
    **dict.fromkeys(("mlp_only_layers", "moe_layers", "full_attn_idxs"), LAYERS),
    **dict.fromkeys(("num_expert_group", "num_experts_per_token", "linear_num_heads"), Whole(1, COUNT)),
    **dict.fromkeys(("linear_head_dim", "block_ff_dim", "block_multiple_of"), Whole(1, WIDTH)),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache"), Whole(1, 1000)),
    "num_shared_experts": Whole(0, 1000),
    "num_dense_layers": Whole(0, 10_000),
    "model_max_length": Whole(1, 2**31),
    "norm_eps": Number(0, closed=True),
    "block_ffn_dim_multiplier": Number(0),
    **dict.fromkeys(("moe_renormalize", "conv_bias", "use_expert_bias", "tie_embedding"), FLAG),
    "block_auto_adjust_ff_dim": FLAG,
    "inner_iter": Whole(1, 1000),
    **dict.fromkeys(("use_igate", "inner_norm", "inner_residual", "outer_residual"), FLAG),
    "mlp_layer_types": PER_LAYER,
    "linear_attn_config": TABLE,
}
"""Fields that families read. An absent or null field is left to the family: it has a default there, or
shape.require raises an error that names it."""
ROPE_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
        _FACTOR,
    ),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Number(0, closed=True)),
    "original_max_position_embeddings": _FACTOR,
    "rope_theta": Number(1),
    "partial_rotary_factor": Number(0),
    **dict.fromkeys(("rope_type", "type"), TEXT),
    "truncate": FLAG,
    **dict.fromkeys(("short_factor", "long_factor"), Of(list, "a list of numbers")),
    "llama_4_scaling_beta": Number(0, closed=True),
}
ROPE_TABLES = ("rope_parameters", "rope_scaling")
ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null, inside the rotary tables too.

    A null counts as an absent field, which has a default or is named in an error.
    """

    def non_null(table: Mapping[str, Any]) -> dict[str, Any]:
        inner = {
            key: non_null(value) if isinstance(value, Mapping) else value for key, value in table.items()
        }
        return {key: value for key, value in inner.items() if value is not None}

    tables = {name: non_null(config[name]) for name in ROPE_TABLES if isinstance(config.get(name), Mapping)}
    return {name: value for name, value in {**config, **tables}.items() if value is not None}


def rotary_tables(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("rope_parameters.", the table) of each rotary table.

    A table with one per kind of layer yields those, and itself without them.
    """
    for name in ROPE_TABLES:
        table = config.get(name)
        if isinstance(table, Mapping):
            inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
            yield f"{name}.", {key: value for key, value in table.items() if key not in inner}
            yield from ((f"{name}.{key}.", value) for key, value in inner.items())


def check_fields(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first field of a wrong type or out of range.

    The message has the value and the requirement.
    """
    _check(config, FIELDS, "config.json: ")
    for name in ("mlp_only_layers", "moe_layers", "full_attn_idxs"):
        if any(not Whole(0, 10_000)(layer) for layer in config.get(name) or ()):
            raise CheckpointError(f"config.json: {name} holds an entry that is not a layer number", next=NEXT)
    for where, table in rotary_tables(config):
        name = where.rstrip(".")
        _check(table, ROPE_FIELDS, f"config.json: {where}")
        kind = table.get("rope_type") or table.get("type")
        missing = [field for field in ROPE_NEEDS.get(str(kind), ()) if table.get(field) is None]
        if missing:
            raise CheckpointError(f"config.json: {name} of type {kind!r} has no {missing[0]}", next=NEXT)
        # equal bounds are a step instead of a ramp: Llama 4 Scout
        if kind == "llama3" and not table["low_freq_factor"] <= table["high_freq_factor"]:
            low, high = table["low_freq_factor"], table["high_freq_factor"]
            raise CheckpointError(
                f"config.json: {name} has low_freq_factor {low:g}, above high_freq_factor {high:g}", next=NEXT
            )


def _check(table: Mapping[str, object], fields: Mapping[str, Kind], where: str) -> None:
    for name, kind in fields.items():
        if table.get(name) is not None and not kind(table[name]):
            raise CheckpointError(f"{where}{name} is {shown(table[name])}; it must be {kind}", next=NEXT)


def shown(value: object) -> str:
    """Format a value for a message, at most 60 characters of it.

    true and false as in JSON, whole numbers with thousands separators, else Python's repr.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if type(value) is int:
        return (
            f"{value:,}"
            if abs(value) < 10**18
            else f"{value:.3g}"
            if abs(value) < 10**300
            else "a number of more than 300 digits"
        )
    return repr(value)[:60]


def check_sizes(shape: Shape) -> None:
    """Check sizes that must fit each other. Raises CheckpointError naming both fields."""
    # (true or nonzero if the sizes are wrong, the message): attention, then experts
    heads, groups = shape.num_heads, shape.num_kv_heads
    width = shape.mla.rope if shape.mla else shape.head_dim
    wrong = [
        (
            heads % groups,
            f"num_attention_heads {heads:,} is not a multiple of num_key_value_heads {groups:,}",
        ),
        (width % 2, f"a rotary width of {width} is odd; elements are rotated in pairs"),
        (
            width < 1,
            f"hidden_size {shape.hidden_size:,} over num_attention_heads {heads:,} leaves no head_dim",
        ),
    ]
    if shape.moe:
        experts, chosen = shape.moe.num_experts, shape.moe.experts_per_token
        n_group, topk_group = int(shape.config.get("n_group", 1)), int(shape.config.get("topk_group", 1))
        wrong += [
            (not experts, "num_local_experts is 0 in a model with experts in every layer"),
            (not chosen, "num_experts_per_tok is 0; a token needs an expert"),
            (experts % n_group, f"{experts:,} experts don't divide into n_group {n_group:,}"),
            (
                experts == n_group > 1,
                f"n_group {n_group:,} is one expert per group; a group is chosen by the sum of its two best",
            ),
            (topk_group > n_group, f"topk_group {topk_group:,} is more than n_group {n_group:,}"),
            (
                chosen > experts // n_group * topk_group,
                (
                    f"num_experts_per_tok {chosen:,} is more than the {experts // n_group * topk_group:,}"
                    " experts that a token can choose from"
                ),
            ),
        ]
    for fault, words in wrong:
        if fault:
            raise CheckpointError(f"config.json: {words}", next=NEXT)


def divides(config: Mapping[str, Any], part: str, whole: str) -> None:
    """Raise CheckpointError unless config[whole] is a multiple of config[part]."""
    if int(config[whole]) % int(config[part]):
        raise CheckpointError(
            f"config.json: {whole} {config[whole]:,} is not a multiple of {part} {config[part]:,}", next=NEXT
        )


# a config that needs more than this many times the bytes of the files is refused before tensors are listed
ABSURD = 4
SLACK = 2**20  # extra bytes allowed beyond that factor: a tiny checkpoint may be off by more than it


def check_against_files(shape: Shape, manifest: Manifest) -> None:
    """Raise CheckpointError, with the sum, if the config's sizes need far more than the files hold.

    Called before any loop over layers and experts that may not exist. The lower bound of the need: embedding
    V*D, layers L*2D, experts L*E*3*D*I, at half a byte each; and 6 tensors per layer.
    """
    D, L = shape.hidden_size, shape.num_layers
    terms = {
        f"vocab_size {shape.vocab_size:,} x hidden_size {D:,}": shape.vocab_size * D,
        f"num_hidden_layers {L:,} x 2 norms of {D:,}": L * 2 * D,
    }
    if shape.moe:
        layers = sum(shape.is_moe(layer) for layer in range(L))
        E, I, M = shape.moe.num_experts, shape.moe.intermediate_size, shape.moe.matrices
        D = shape.moe.latent or D
        terms[f"{layers:,} layers x {E:,} experts x {M} matrices of {D:,} x {I:,}"] = layers * E * M * D * I
    least, tensors = sum(terms.values()) // 2, 6 * L
    if least > ABSURD * manifest.nbytes + SLACK or tensors > ABSURD * len(manifest.tensors) + 100:
        largest = max(terms, key=lambda term: terms[term])
        raise CheckpointError(
            f"config.json describes a model of at least {format_count(sum(terms.values()))} parameters"
            f" ({largest} = {format_count(terms[largest])}) and {tensors:,} tensors; the files hold"
            f" {manifest.nbytes:,} bytes in {len(manifest.tensors):,} tensors",
            next=f"get config.json from the model's publisher again, then: unfreeze inspect {manifest.path}",
        )
