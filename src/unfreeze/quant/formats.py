"""Which quantized format a checkpoint is in, by its config.json or a tensor's name.

A format that cannot be read is refused, and the error names it. torch is not imported: a refusal must not
wait for it.
To add a format: CONTRIBUTING.md, row "a quantized format".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence, Set
from typing import cast

from unfreeze.core.errors import ConfigError
from unfreeze.quant import fp8, int4
from unfreeze.quant.codec import (
    Codec,
    Format,
    Table,
    Unreadable,
    as_table,
    kept_suffixes,
    refuse_other_values,
)
from unfreeze.untrusted.pattern import pattern

FORMATS: dict[str, Format] = {
    format.key: format
    for format in (
        int4.FORMAT,
        fp8.FORMAT,
        # one line per format
    )
}

FOREIGN = {
    "qweight": "AWQ or GPTQ (qweight, qzeros, scales)",
    "qzeros": "AWQ or GPTQ (qweight, qzeros, scales)",
    "g_idx": "GPTQ with act-order (g_idx)",
    "weight_zero_point": "asymmetric pack-quantized (weight_zero_point)",
    "weight_global_scale": "NVFP4 (weight_global_scale)",
    "SCB": "bitsandbytes LLM.int8 (SCB)",
    "absmax": "bitsandbytes NF4 (absmax, quant_map)",
    "quant_map": "bitsandbytes NF4 (absmax, quant_map)",
    "gate_up_proj_blocks": "MXFP4 (_blocks, _scales)",
    "down_proj_blocks": "MXFP4 (_blocks, _scales)",
}
"""A piece of a tensor's name -> the format it belongs to, which is not read here."""
FOREIGN_DTYPES = {"F8_E4M3": "FP8 of a form that config.json does not name", "F8_E5M2": "FP8 e5m2"}
"""The dtype of a tensor -> the format whose codes have it, where nothing says how they are read."""


def recognise(config: Table) -> tuple[Codec, list[str]] | None:
    """(codec, ignore list) of a config.json, or None where the checkpoint is not quantized.

    Reads `quantization_config` at the top or under `text_config`.
    Raises ConfigError, naming what would be read wrongly: other formats and methods (AWQ, GPTQ, FP8 …),
    variants of a format, quantized activations, rotated activations (transform_config), sparsity.
    `not_followed` names the fields that are not known here.
    """
    try:
        table = _table(config)
        if table is None:
            return None
        codecs = {format.read(where, fields) for format, where, fields in _tables(table)}
        if len(codecs) > 1:
            raise Unreadable(f"mixed precision: config_groups {sorted(_groups(table))} differ in group_size")
        return codecs.pop(), _ignore(table)
    except Unreadable as error:
        raise ConfigError(
            f"this checkpoint's quantization cannot be read: {error}. Readable:"
            f" {'; '.join(format.title for format in FORMATS.values())}",
            next="use the publisher's bf16 or INT4 pack-quantized release of the model",
        ) from None


def is_ignored(name: str, ignore: Sequence[str]) -> bool:
    """Whether a module stays unquantized by the config's `ignore` list.

    An entry "re:PATTERN" matches from the start of the name, any other entry exactly.
    """
    return any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in ignore)


def not_followed(config: Table) -> str:
    """One line that names the fields of a quantization_config that are not followed; "" where there are none.

    A field is followed if it is read, or has no effect on weights that are packed already.
    Raises ConfigError for a quantization_config that cannot be read.
    """
    if recognise(config) is None:
        return ""
    table = _table(config) or {}
    fields: list[str] = []
    if _method(table) == COMPRESSED_TENSORS:
        fields += _unknown(table, KNOWN | ONLY.keys() | {"kv_cache_scheme"}, "")
        for name, group in _groups(table).items():
            fields += _unknown(group, KNOWN_OF_GROUP, f"config_groups.{name}.")
            weights, known = as_table(group["weights"]) or {}, FORMATS[_key(group, table)].known
            fields += _unknown(weights, known, f"config_groups.{name}.weights.")
    else:
        fields += _unknown(table, FORMATS[_method(table)].known | {"quant_method"}, "")
    said = [f"{', '.join(fields)}: not known here and not followed"] if fields else []
    if table.get("kv_cache_scheme"):
        said.append(
            "kv_cache_scheme is for a server's cache: training and generation here keep the cache unquantized"
        )
    return f"quantization_config: {'; '.join(said)}" if said else ""


def is_part(name: str) -> bool:
    """Whether a tensor of this name is a part of a quantized weight, in a format that is read here."""
    return name.rpartition(".")[2] in {suffix for format in FORMATS.values() for suffix in format.suffixes}


def is_packed(module: str, names: Collection[str], codec: Codec | None = None) -> bool:
    """Whether `names` hold the weight of `module` in the codec's format (None: in any that is read here).

    That is so if one of them is a part of the weight that only a packed weight has.
    """
    if codec is None:
        return any(f"{module}.{format.suffixes[0]}" in names for format in FORMATS.values())
    return any(f"{module}.{suffix}" in names for suffix in kept_suffixes(codec) if suffix != "weight")


def is_part_in(codec: Codec, name: str, names: Collection[str]) -> bool:
    """Whether tensor `name` is a part of a weight that `names` hold in the codec's format."""
    module, _, suffix = name.rpartition(".")
    return suffix in codec.suffixes and is_packed(module, names, codec)


def foreign_format(name: str) -> str:
    """The format that a tensor of this name belongs to, where it is one not read here; else ""."""
    return next((title for piece, title in FOREIGN.items() if piece in name.split(".")), "")


def foreign_dtype(dtype: str) -> str:
    """The format whose codes have this dtype, where it is one not read here; else ""."""
    return FOREIGN_DTYPES.get(dtype, "")


def foreign_parts(module: str, names: Collection[str]) -> str:
    """The format in which `names` hold parts of `module`, where it is one not read here; else ""."""
    return next((title for piece, title in FOREIGN.items() if f"{module}.{piece}" in names), "")


# compressed-tensors: one quantization_config holds groups of modules, and each group names its format.

COMPRESSED_TENSORS = "compressed-tensors"
ONLY: dict[str, tuple[object, str]] = {
    "transform_config": ({}, "activations are rotated at run time"),
    "sparsity_config": ({}, "weights are stored sparse"),
    "moe_sparsity_config": ({}, "experts are left out of the computation"),
    "quantization_status": ("compressed", "weights are quantized anew at run time"),
}
KNOWN = frozenset(
    "version global_compression_ratio run_compressed quant_method format config_groups ignore".split()
)
KNOWN_OF_GROUP = frozenset("targets weights input_activations output_activations format".split())
"""Fields that are read, or without effect on weights that are packed already (the files show which are)."""


def _table(config: Table) -> Table | None:
    """The quantization_config at the top or under text_config, None where there is none."""
    text = as_table(config.get("text_config")) or {}
    found = config.get("quantization_config") or text.get("quantization_config")
    table = as_table(found)
    if found and table is None:
        raise Unreadable(f"quantization_config is {str(found)[:60]!r}, not an object")
    return table or None


def _method(table: Table) -> str:
    return str(table.get("quant_method") or ("modelopt" if "quant_algo" in table else COMPRESSED_TENSORS))


def _tables(table: Table) -> list[tuple[Format, str, Table]]:
    """(format, where, the table it reads): the quantization_config, or the weights of each of its groups."""
    # a method with one table
    method = _method(table)
    if method in FORMATS:
        return [(FORMATS[method], "quantization_config", table)]
    if "quant_method" not in table and method == COMPRESSED_TENSORS and "config_groups" not in table:
        raise Unreadable(
            f"quantization_config names no quant_method; it has {', '.join(map(str, table))}"[:300]
        )
    if method != COMPRESSED_TENSORS:
        algorithm = f', quant_algo "{table["quant_algo"]}"' if "quant_algo" in table else ""
        source = f" ({table['source']})" if "source" in table else ""
        raise Unreadable(f'quant_method "{method}"{algorithm}{source}')

    # compressed-tensors: a table per group of modules
    refuse_other_values(table, ONLY, "quantization_config")
    found: list[tuple[Format, str, Table]] = []
    for name, group in _groups(table).items():
        where = f"quantization_config.config_groups.{name}"
        key = _key(group, table)
        if key not in FORMATS:
            raise Unreadable(f'format "{key.partition(" ")[2]}"')
        weights = as_table(group.get("weights"))
        if not weights:
            raise Unreadable(f"{where} without weights")
        if group.get("input_activations") or group.get("output_activations"):
            raise Unreadable(f"{where}: quantized activations")
        found.append((FORMATS[key], where, weights))
    return found


def _key(group: Table, table: Table) -> str:
    """The key in FORMATS: "compressed-tensors " and the group's format, or else the one of all groups."""
    return f"{COMPRESSED_TENSORS} {group.get('format') or table.get('format')}"


def _groups(table: Table) -> dict[str, Table]:
    groups = as_table(table.get("config_groups"))
    if not groups:
        raise Unreadable("quantization_config without config_groups")
    found: dict[str, Table] = {}
    for name, group in groups.items():
        inner = as_table(group)
        if inner is None:
            raise Unreadable(f"quantization_config.config_groups.{name} is not an object")
        found[name] = inner
    return found


def _ignore(table: Table) -> list[str]:
    """Names and patterns of modules that stay unquantized. Refuses a pattern that may match forever.

    modules_to_not_convert holds beginnings of names, or their last parts; the head is always left out.
    """
    if _method(table) == "fp8":
        # one pattern for hundreds of names: releases list every norm
        names = "|".join(map(re.escape, ["lm_head", *_names(table, "modules_to_not_convert")]))
        return [rf"re:(?:.*\.)?(?:{names})$", rf"re:(?:{names})\."]
    names = _names(table, "ignore")
    for entry in names:
        if entry.startswith("re:"):
            pattern(entry[3:], "config.json: quantization_config.ignore", ConfigError)
    return names


def _names(table: Table, field: str) -> list[str]:
    found: object = table.get(field) or []
    entries = cast("list[object]", found) if isinstance(found, list) else [None]
    names = [entry for entry in entries if isinstance(entry, str)]
    if len(names) < len(entries):
        raise Unreadable(f"quantization_config.{field} is not a list of names")
    return names


def _unknown(table: Table, known: Set[str], where: str) -> list[str]:
    return [
        f"{where}{name} = {value!r:.60}"
        for name, value in table.items()
        if name not in known and value not in (None, [], {})
    ]
