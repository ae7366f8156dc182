"""compressed-tensors' quantization_config: groups of modules, each in its own format.

A group has `targets`: names of modules, patterns ("re:…", matched from the start of a name), or the name of a
class; "Linear" means every linear layer. A name takes precedence over a pattern, a pattern over a class;
`ignore` removes modules again.

Source: compressed-tensors' match_targets; compared with it in tests/quant/test_scheme.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unfreeze.core.errors import ConfigError
from unfreeze.quant.codec import (
    Format,
    Table,
    Unreadable,
    as_table,
    names_in,
    refuse_other_values,
    unknown_fields,
)
from unfreeze.quant.scheme import Modules, Rule, Scheme
from unfreeze.untrusted.pattern import pattern

METHOD = "compressed-tensors"
ONLY: dict[str, tuple[object, str]] = {
    "transform_config": ({}, "activations are rotated at run time"),
    "sparsity_config": ({}, "weights are stored sparse"),
    "moe_sparsity_config": ({}, "experts are left out of the computation"),
}
FROZEN = "frozen"
"""A quantization_status of older releases, which occurs with packed files too; the files decide. The library
would round their unpacked weights at run time: not_followed warns about it."""
UNPACKED = "CompressedTensorsConfig", "CompressedTensorsConfig(run_compressed=False)"
"""A class of transformers, and the quantization_config of it that expands linear layers as they are loaded.
Without it they have no `weight`, which peft asks for (transformers 5.23, peft 0.21)."""
KNOWN = frozenset(
    "version global_compression_ratio run_compressed quant_method quantization_status format config_groups"
    " ignore".split()
)
KNOWN_OF_GROUP = frozenset("targets weights input_activations output_activations format".split())
"""Fields that are read, or have no effect on packed weights (the files show which are packed)."""


def read(table: Table, formats: Mapping[str, Format]) -> Scheme:
    """The scheme of a quantization_config. Raises Unreadable naming what would be read wrongly."""
    refuse_other_values(table, ONLY, "quantization_config")
    if (status := table.get("quantization_status")) not in (None, "compressed", FROZEN):
        raise Unreadable(f"quantization_config.quantization_status {status!r:.60} (not final)")
    names: list[Rule] = []
    patterns: list[tuple[str, Rule]] = []
    classes: list[Rule] = []
    for where, group, format in _formats(table, formats):
        codec = format.read(where, as_table(group["weights"]) or {})
        targets = names_in(group, "targets") or ["Linear"]
        exact = frozenset(target for target in targets if not target.startswith("re:"))
        names.append(Rule(codec, Modules(names=exact)))
        regular = [target for target in targets if target not in exact]
        patterns += [(target, Rule(codec, _matching([target], where))) for target in regular]
        if "Linear" in exact:
            classes.append(Rule(codec))
    in_order = [rule for _, rule in sorted(patterns, key=lambda entry: entry[0])]
    named = [rule for rule in names if rule.modules.names - {"Linear"}]
    ignore = names_in(table, "ignore")
    return Scheme((*named, *in_order, *classes), _matching(ignore, "quantization_config.ignore"))


def not_followed(table: Table, formats: Mapping[str, Format]) -> list[str]:
    """The fields, with values, that are neither read nor known to have no effect."""
    fields = unknown_fields(table, KNOWN | ONLY.keys() | {"kv_cache_scheme"}, "")
    for where, group, format in _formats(table, formats):
        name = where.removeprefix("quantization_config.")
        fields += unknown_fields(group, KNOWN_OF_GROUP, f"{name}.")
        fields += unknown_fields(as_table(group["weights"]) or {}, format.known, f"{name}.weights.")
    return fields


def _formats(table: Table, formats: Mapping[str, Format]) -> Iterator[tuple[str, Table, Format]]:
    """Yield (location, group, format) for each group with weights. Raises Unreadable.

    A group without weights is for activations, such as those in an attention's cache.
    """
    groups = as_table(table.get("config_groups"))
    if not groups:
        raise Unreadable("quantization_config without config_groups")
    for name, value in groups.items():
        where, group = f"quantization_config.config_groups.{name}", as_table(value)
        if group is None:
            raise Unreadable(f"{where} is not an object")
        if not as_table(group.get("weights")):
            if group.get("input_activations") or group.get("output_activations"):
                continue
            raise Unreadable(f"{where} without weights")
        key = f"{METHOD} {group.get('format') or table.get('format')}"
        if key not in formats:
            raise Unreadable(f'format "{key.partition(" ")[2]}"')
        yield where, group, formats[key]


def _matching(entries: list[str], where: str) -> Modules:
    """Names, and patterns "re:…". Refuses a pattern that could match forever."""
    patterns = [entry[3:] for entry in entries if entry.startswith("re:")]
    for entry in patterns:
        pattern(entry, f"config.json: {where}", ConfigError)
    return Modules(
        names=frozenset(entry for entry in entries if not entry.startswith("re:")), patterns=tuple(patterns)
    )
