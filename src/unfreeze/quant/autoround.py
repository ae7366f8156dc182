"""AutoRound's quantization_config: codes laid out as in GPTQ or AWQ; some layers have their own bits.

    packing_format                       zero points           read as
    auto_round:auto_gptq, …:gptq         stored minus one      GPTQ, checkpoint_format "gptq"
    auto_round, auto_round:gptqmodel     stored unchanged      GPTQ, checkpoint_format "gptq_v2"
    auto_round:auto_awq, …:awq           stored unchanged      AWQ, "gemm"

Only gptqmodel's files have a g_idx. `extra_config` names the layers that differ: with 16 bits or more they
stay unquantized.

Source: auto-round's export_to_autoround and convert_model (read at b9f3d00).
"""

from __future__ import annotations

from collections.abc import Iterable

from unfreeze.core.errors import ConfigError
from unfreeze.quant.awq import Awq
from unfreeze.quant.codec import (
    Codec,
    Table,
    Unreadable,
    as_table,
    names_in,
    refuse_other_values,
    unknown_fields,
)
from unfreeze.quant.gptq import BITS, Gptq
from unfreeze.quant.grids import read_group_size
from unfreeze.quant.scheme import NOT_PLAIN, Modules, Rule, Scheme, not_converted
from unfreeze.untrusted.pattern import pattern

METHODS = ("auto-round", "autoround", "auto_round", "intel/auto-round")
DENSE = 16  # a layer with this many bits or more stays unquantized
GPTQ = {
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_round:gptq:exllamav2": True,
    "auto": True,
    "auto_round": False,
    "auto_round:gptqmodel": False,
}
"""packing_format -> True if zero points are stored minus one."""
AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_round:awq:gemm")
ONLY: dict[str, tuple[object, str]] = {
    "data_type": ("int", "codes that are not whole numbers"),
    "super_bits": (None, "scales that are quantized"),
    "rotation_config": ({}, "activations are rotated at run time"),
    "spinquant_config": ({}, "activations are rotated at run time"),
    "dynamic": ({}, "modules with bits or groups of their own"),
}
KNOWN = frozenset(
    """quant_method bits group_size sym packing_format backend extra_config block_name_to_quantize
    to_quant_block_names quant_block_list modules_to_not_convert autoround_version iters lr minmax_lr
    nsamples seqlen batch_size gradient_accumulate_steps enable_quanted_input enable_minmax_tuning
    low_gpu_mem_usage amp scale_dtype dataset act_bits act_group_size act_sym act_dynamic act_data_type
    super_group_size damp_percent desc_act true_sequential static_groups model_free enable_norm_bias_tuning
    not_use_best_mse provider to_quant_block_names enable_alg_ext regex_config""".split()
)
"""Fields that are read, or have no effect on packed weights."""


def read(table: Table) -> Scheme:
    """The scheme of the table. Raises Unreadable naming what would be read wrongly."""
    where = "quantization_config"
    refuse_other_values(table, ONLY, where)
    if table.get("desc_act"):
        raise Unreadable(f"{where}: desc_act of AutoRound (columns permuted)")
    dense: list[str] = []
    own: dict[Codec, list[str]] = {}
    for name, value in (as_table(table.get("extra_config")) or {}).items():
        layer = as_table(value) or {}
        if _bits(layer, table) >= DENSE:
            dense.append(name)
        elif layer:
            refuse_other_values(layer, ONLY, f"{where}.extra_config.{name}")
            own.setdefault(_codec({**table, **layer}, f"{where}.extra_config.{name}"), []).append(name)
    # a layer's own codec; the head has one only if named
    head = any("lm_head" in names for names in own.values())
    rules = [Rule(codec, _modules(names)) for codec, names in own.items()]
    left_out = not_converted(names_in(table, "modules_to_not_convert"), f"{where}.modules_to_not_convert")
    named = _modules(dense)
    ignore = Modules(
        names=named.names,
        within=left_out.within - ({"lm_head"} if head else set()),
        patterns=(*left_out.patterns, *named.patterns),
    )
    return Scheme((*rules, Rule(_codec(table, where))), ignore)


def not_followed(table: Table) -> list[str]:
    """The fields, with values, that are neither read nor known to have no effect."""
    return unknown_fields(table, KNOWN | ONLY.keys(), "")


def _bits(layer: Table, table: Table) -> int:
    bits = layer.get("bits", table.get("bits"))
    return bits if isinstance(bits, int) else 0


def _codec(table: Table, where: str) -> Codec:
    layout = str(table.get("packing_format") or table.get("backend") or "auto").lower()
    size, bits = read_group_size(table, where), table.get("bits", 4)
    if layout in AWQ and bits == 4:
        return Awq(size)
    if layout in GPTQ and isinstance(bits, int) and bits in BITS:
        return Gptq(bits, size, GPTQ[layout], indexed=layout.endswith("gptqmodel"))
    raise Unreadable(f'{where}: AutoRound\'s packing_format "{layout}" with {bits} bits')


def _modules(entries: Iterable[str]) -> Modules:
    """Names of layers; an entry with a character that no name has is a pattern, matched anywhere."""
    entries = list(entries)
    regular = [entry for entry in entries if NOT_PLAIN & set(entry)]
    for entry in regular:
        pattern(entry, "config.json: quantization_config.extra_config", ConfigError)
    return Modules(
        names=frozenset(entries) - frozenset(regular), patterns=tuple(f".*(?:{entry})" for entry in regular)
    )
