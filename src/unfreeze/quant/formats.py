"""Which quantized format a checkpoint is in, by its config.json or a tensor's name.

A format that cannot be read is refused, and the error names it. torch is not imported: a refusal must not
wait for it.
To add a format: CONTRIBUTING.md, row "a quantized format".
"""

from __future__ import annotations

from collections.abc import Collection

from unfreeze.core.errors import ConfigError
from unfreeze.quant import awq, bitsandbytes, compressed, fp8, gptq, int4, mxfp4
from unfreeze.quant.codec import Format, Table, Unreadable, as_table, names_in, unknown_fields
from unfreeze.quant.scheme import Rule, Scheme, not_converted

FORMATS: dict[str, Format] = {
    format.key: format
    for format in (
        int4.FORMAT,
        fp8.FORMAT,
        mxfp4.FORMAT,
        awq.FORMAT,
        gptq.FORMAT,
        bitsandbytes.FORMAT,
        # one line per format; "*" before one that is several
    )
}

FOREIGN = {
    "weight_zero_point": "asymmetric pack-quantized (weight_zero_point)",
    "weight_global_scale": "NVFP4 (weight_global_scale)",
}
"""A piece of a tensor's name -> the format it belongs to, which is not read here."""
FOREIGN_DTYPES = {"F8_E4M3": "FP8 of a form that config.json does not name", "F8_E5M2": "FP8 e5m2"}
"""The dtype of a tensor -> the format whose codes have it, where nothing says how they are read."""


def recognise(config: Table) -> Scheme | None:
    """Which modules of a config.json's model are in which format; None where it is not quantized.

    Reads `quantization_config` at the top or under `text_config`.
    Raises ConfigError, naming what would be read wrongly: other formats and methods (AWQ, GPTQ …), variants
    of a format, rotated activations (transform_config), sparsity.
    `not_followed` names the fields that are not known here.
    """
    try:
        table = _table(config)
        return None if table is None else _scheme(table)
    except Unreadable as error:
        raise ConfigError(
            f"this checkpoint's quantization cannot be read: {error}. Readable:"
            f" {'; '.join(format.title for format in FORMATS.values())}",
            next="use the publisher's bf16 or INT4 pack-quantized release of the model",
        ) from None


def not_followed(config: Table) -> str:
    """One line that names the fields of a quantization_config that are not followed; "" where there are none.

    A field is followed if it is read, or has no effect on weights that are packed already.
    Raises ConfigError for a quantization_config that cannot be read.
    """
    if recognise(config) is None:
        return ""
    table = _table(config) or {}
    method = _method(table)
    if method == compressed.METHOD:
        fields = compressed.not_followed(table, FORMATS)
    else:
        fields = unknown_fields(table, FORMATS[method].known | {"quant_method"}, "")
    said = [f"{', '.join(fields)}: not known here and not followed"] if fields else []
    if table.get("kv_cache_scheme"):
        said.append(
            "kv_cache_scheme is for a server's cache: training and generation here keep the cache unquantized"
        )
    return f"quantization_config: {'; '.join(said)}" if said else ""


def is_part(name: str) -> bool:
    """Whether a tensor of this name is a part of a quantized weight, in a format that is read here."""
    return name.rpartition(".")[2] in {suffix for format in FORMATS.values() for suffix in format.suffixes}


def stored_packed(module: str, names: Collection[str]) -> bool:
    """Whether `names` hold the weight of `module` in any format that is read here."""
    return any(f"{module}.{format.suffixes[0]}" in names for format in FORMATS.values())


def foreign_format(name: str) -> str:
    """The format that a tensor of this name belongs to, where it is one not read here; else ""."""
    return next((title for piece, title in FOREIGN.items() if piece in name.split(".")), "")


def foreign_dtype(dtype: str) -> str:
    """The format whose codes have this dtype, where it is one not read here; else ""."""
    return FOREIGN_DTYPES.get(dtype, "")


def foreign_parts(module: str, names: Collection[str]) -> str:
    """The format in which `names` hold parts of `module`, where it is one not read here; else ""."""
    return next((title for piece, title in FOREIGN.items() if f"{module}.{piece}" in names), "")


def _table(config: Table) -> Table | None:
    """The quantization_config at the top or under text_config, None where there is none."""
    text = as_table(config.get("text_config")) or {}
    found = config.get("quantization_config") or text.get("quantization_config")
    table = as_table(found)
    if found and table is None:
        raise Unreadable(f"quantization_config is {str(found)[:60]!r}, not an object")
    return table or None


def _method(table: Table) -> str:
    return str(table.get("quant_method") or ("modelopt" if "quant_algo" in table else compressed.METHOD))


def _scheme(table: Table) -> Scheme:
    """The scheme of a quantization_config: of its groups of modules, or of one codec for all of them."""
    method = _method(table)
    if method in FORMATS:
        codec = FORMATS[method].read("quantization_config", table)
        return Scheme((Rule(codec),), not_converted(names_in(table, FORMATS[method].ignored)))
    if "quant_method" not in table and method == compressed.METHOD and "config_groups" not in table:
        raise Unreadable(
            f"quantization_config names no quant_method; it has {', '.join(map(str, table))}"[:300]
        )
    if method == compressed.METHOD:
        return compressed.read(table, FORMATS)
    algorithm = f', quant_algo "{table["quant_algo"]}"' if "quant_algo" in table else ""
    source = f" ({table['source']})" if "source" in table else ""
    raise Unreadable(f'quant_method "{method}"{algorithm}{source}')
