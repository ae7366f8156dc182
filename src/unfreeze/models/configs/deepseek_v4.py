"""DeepSeek-V4's config.json: its fields, the kinds of its layers, and its rotary tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.allowed import Config, Fields, names
from unfreeze.models.blocks.rope import Rope, Stepped, rope_from_config
from unfreeze.models.fields import NEXT, shown
from unfreeze.models.shape import MoEShape, Shape, common, require

SLIDING, COMPRESSED, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
HASHED, CHOSEN = "hash_moe", "moe"
KIND_OF = {0: SLIDING, 4: COMPRESSED, 128: HEAVY}
"""Numbers of compress_ratios, in the releases."""
TABLES = ("main", "compress")
FIELDS = Fields(
    absent={
        "moe_intermediate_size": 2048,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    read=names(
        "layer_types compress_ratios compress_rates compress_rate_csa compress_rate_hca mlp_layer_types"
        " num_hash_layers qk_rope_head_dim partial_rotary_factor num_nextn_predict_layers"
    ),
    only={
        "num_key_value_heads": lambda config: 1,
        "n_shared_experts": lambda config: 1,
        "scoring_func": lambda config: "sqrtsoftplus",
        "norm_topk_prob": lambda config: True,
        "attention_bias": lambda config: False,
        "mlp_bias": lambda config: False,
        "intermediate_size": lambda config: config["moe_intermediate_size"],
        "num_local_experts": lambda config: config["n_routed_experts"],
    },
    silent=names("topk_method expert_dtype auto_map n_group topk_group"),
    per_kind=TABLES,
)


def shape(config: Mapping[str, Any]) -> Shape:
    """Sizes from config.json. Layers alternate between two kinds of attention unless it says more."""
    require(config, "num_hidden_layers")
    moe = MoEShape(
        num_experts=int(config["n_routed_experts"]),
        experts_per_token=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        num_shared_experts=1,
        dense_layers=frozenset(),
    )
    config = {"intermediate_size": config["moe_intermediate_size"], **config}
    heads, groups = int(config["num_attention_heads"]), int(config["o_groups"])
    if heads % groups:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads:,} is not a multiple of o_groups {groups:,}", next=NEXT
        )
    if int(config["sliding_window"]) < 1:
        raise CheckpointError("config.json: sliding_window is 0; a token sees itself at least", next=NEXT)
    hashed_layers(config)  # raises too
    main, named = rotary_tables(config)
    head_dim = int(require(config, "head_dim"))
    parts: dict[str, Any] = {"moe": moe, "ropes": named, "layer_types": kinds(config)}
    sizes = common(config, family="deepseek_v4", rope=main, head_dim=head_dim, **parts)
    return replace(sizes, streams=int(config["hc_mult"]))


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer's attention. Raises CheckpointError for one that is not known."""
    count = int(config["num_hidden_layers"])
    declared, ratios = config.get("layer_types"), config.get("compress_ratios")
    if declared is None and ratios is not None:
        numbers = _known(ratios, count, "compress_ratios", tuple(KIND_OF))
        return tuple(KIND_OF[number] for number in numbers)
    if declared is None:
        declared = [HEAVY] * min(count, 2) + [
            COMPRESSED if place % 2 else HEAVY for place in range(count - 2)
        ]
    return _known(declared, count, "layer_types", (SLIDING, COMPRESSED, HEAVY))


def hashed_layers(config: Config) -> frozenset[int]:
    """Layers whose experts are chosen by the token: the first three, unless the config says more."""
    count, declared = int(config["num_hidden_layers"]), config.get("mlp_layer_types")
    if declared is None:
        return frozenset(range(min(count, int(config.get("num_hash_layers", 3)))))
    each = _known(declared, count, "mlp_layer_types", (HASHED, CHOSEN))
    return frozenset(layer for layer, kind in enumerate(each) if kind == HASHED)


def _known(declared: Any, count: int, field: str, known: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first `count` entries, all of them known. Releases have one more, for the prediction head."""
    each = tuple(declared)[:count] if isinstance(declared, (list, tuple)) else ()
    wrong = next((kind for kind in each if kind not in known), None)
    if wrong is not None or len(each) < count:
        fault = f"an entry {shown(wrong)}" if wrong is not None else f"{len(each)} entries for {count} layers"
        raise CheckpointError(
            f"config.json: {field} has {fault}; known: {', '.join(map(str, known))}", next=NEXT
        )
    return each


def rates(config: Config) -> dict[str, int]:
    """Tokens of a window, of both kinds of compressed attention."""
    table = {COMPRESSED: 4, HEAVY: 128} | dict(config.get("compress_rates") or {})
    for kind, field in ((COMPRESSED, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        table[kind] = config.get(field) or table[kind]
        if type(table[kind]) is not int or not 1 <= table[kind] <= 1 << 20:
            raise CheckpointError(
                f"config.json: the windows of {kind} have {shown(table[kind])} tokens; it must be a whole"
                " number from 1 to 1,048,576",
                next=NEXT,
            )
    return table


def rotary_tables(config: Mapping[str, Any]) -> tuple[Rope, dict[str, Rope]]:
    """The table of layers with a window alone, and the others by name.

    "compress" has a base of its own and is the only one that yarn scales; its cos and sin do not grow,
    unless a table per kind leaves attention_factor out, as transformers reads it.
    "compress every m" is the same at the first position of each window of m tokens.
    """
    width, nested = _rotary_width(config), config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {
        name: value for name, value in nested.items() if name not in TABLES
    }
    scaling = {name: value for name, value in scaling.items() if name not in ("rope_theta", *TABLES)}
    main: Mapping[str, Any] = {"rope_theta": config["rope_theta"]}
    compress: Mapping[str, Any] = {**scaling, "rope_theta": config["compress_rope_theta"]}
    if all(isinstance(nested.get(name), Mapping) for name in TABLES):
        main, compress = ({"rope_theta": 10000.0, **nested[name]} for name in TABLES)
    elif (compress.get("rope_type") or compress.get("type")) == "yarn":
        compress = {"attention_factor": 1.0, **compress}
    positions = {"max_position_embeddings": config["max_position_embeddings"]}
    ropes = [rope_from_config({**positions, "rope_parameters": table}, width) for table in (main, compress)]
    named: dict[str, Rope] = {"compress": ropes[1]}
    for rate in sorted(set(rates(config).values())):
        named[f"compress every {rate}"] = Stepped(**vars(ropes[1]), every=rate)
    return ropes[0], named


def _rotary_width(config: Mapping[str, Any]) -> int:
    """Elements of a head that rotate. Raises CheckpointError unless even, and no wider than the indexer."""
    head_dim, factor = int(config["head_dim"]), config.get("partial_rotary_factor")
    nested = [table for table in (config.get("rope_parameters") or {}).values() if isinstance(table, Mapping)]
    others = {table["partial_rotary_factor"] for table in nested if "partial_rotary_factor" in table}
    factor = others.pop() if factor is None and len(others) == 1 else factor
    if others - {factor}:
        both = f"{shown(factor)}, and {shown(min(others - {factor}))} in rope_parameters"
        raise CheckpointError(f"config.json: partial_rotary_factor is {both}", next=NEXT)
    width = int(config.get("qk_rope_head_dim") or 64)
    if factor is not None:
        width = int(head_dim * float(factor))
    elif config.get("qk_rope_head_dim") is None:
        width = int(head_dim * 64 / 512)
    narrowest = min(head_dim, int(config["index_head_dim"]))
    if width % 2 or not 0 < width <= narrowest:
        raise CheckpointError(
            f"config.json: {width} elements of a head rotate; it must be an even number up to {narrowest}"
            " (head_dim, index_head_dim)",
            next=NEXT,
        )
    return width
