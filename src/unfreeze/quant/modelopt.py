"""NVIDIA's modelopt: quantization_config with a quant_algo, or hf_quant_config.json beside config.json.

One algorithm for all linear layers except those in `exclude_modules` (`ignore` in config.json; globs), or
"MIXED_PRECISION" with an algorithm for each of `quantized_layers` and the modules inside them.

Source: modelopt's export (convert_hf_config.py, quant_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from unfreeze.quant.codec import (
    Codec,
    Format,
    Table,
    Unreadable,
    as_table,
    names_in,
    refuse_other_values,
    unknown_fields,
)
from unfreeze.quant.scheme import Modules, Rule, Scheme, globs

METHOD = "modelopt"
MIXED = "MIXED_PRECISION"
ONLY: dict[str, tuple[object, str]] = {
    "pre_quant_scale": (False, "activations are scaled by a tensor beside the weights"),
    "has_zero_point": (False, "zero points"),
}
KNOWN = frozenset(
    "quant_method quant_algo kv_cache_quant_algo kv_cache_scheme group_size exclude_modules ignore producer"
    " config_groups source quantized_layers".split()
)
"""Fields that are read, or have no effect on packed weights; config_groups repeats them."""

ADDED = KNOWN - {"quant_method"} | {"moe_quant_algo"}
"""Fields that modelopt adds to the quantization_config of an FP8 release in which it requantized layers."""


def is_dense(table: Table) -> bool:
    """True if modelopt left the weights unquantized: quant_algo null, at most a server's cache in FP8."""
    method = table.get("quant_method", METHOD)
    return method == METHOD and "quant_algo" in table and table["quant_algo"] is None


def read(table: Table, formats: Mapping[str, Format]) -> Scheme:
    """The scheme of the table. Raises Unreadable naming what would be read wrongly."""
    refuse_other_values(table, ONLY, "quantization_config")
    ignore = globs([*names_in(table, "exclude_modules"), *names_in(table, "ignore")])
    algorithm = table.get("quant_algo")
    if algorithm != MIXED:
        return Scheme((Rule(_codec(table, "quantization_config", table, formats)),), ignore)
    layers = as_table(table.get("quantized_layers"))
    if not layers:
        raise Unreadable(f'quant_algo "{MIXED}" without quantized_layers')
    inside: dict[Codec, set[str]] = {}
    for name, value in layers.items():
        where, layer = f"quantization_config.quantized_layers.{name}", as_table(value)
        if layer is None:
            raise Unreadable(f"{where} is not an object")
        refuse_other_values(layer, ONLY, where)
        inside.setdefault(_codec(layer, where, table, formats), set()).add(name)
    rules = (Rule(codec, Modules(inside=frozenset(names))) for codec, names in inside.items())
    return Scheme(tuple(rules), ignore)


def not_followed(table: Table) -> list[str]:
    """The fields, with values, that are neither read nor known to have no effect."""
    return unknown_fields(table, KNOWN | ONLY.keys(), "")


def _codec(part: Table, where: str, table: Table, formats: Mapping[str, Format]) -> Codec:
    key = f"{METHOD} {part.get('quant_algo')}"
    if key not in formats:
        source = f" ({table['source']})" if "source" in table else ""
        raise Unreadable(f'quant_method "{METHOD}", quant_algo "{part.get("quant_algo")}"{source}')
    return formats[key].read(where, part)
