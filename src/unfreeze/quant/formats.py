"""Recognises the quantized format of a checkpoint, by its config.json or a tensor's name.

An unreadable format is refused, and the error names it. torch is not imported: a refusal must not wait for
it. To add a format: CONTRIBUTING.md, "Add a quantized format".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from unfreeze.core.errors import ConfigError
from unfreeze.quant import (
    autoround,
    awq,
    bitsandbytes,
    compressed,
    fp8_scaled,
    gptq,
    integers,
    modelopt,
    mxfp4,
    mxfp8,
    nvfp4,
)
from unfreeze.quant.codec import Format, Table, Unreadable, as_table, names_in, unknown_fields
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.scheme import Modules, Rule, Scheme, not_converted

FORMATS: dict[str, Format] = {
    format.key: format
    for format in (
        *integers.FORMAT,
        *fp8_scaled.FORMAT,
        *nvfp4.FORMAT,
        *mxfp4.FORMAT,
        *mxfp8.FORMAT,
        awq.FORMAT,
        gptq.FORMAT,
        bitsandbytes.FORMAT,
        # one line per format; "*" before a module that has several
    )
}

FOREIGN = {
    "pre_quant_scale": "modelopt AWQ (pre_quant_scale)",
    "q_weight": "EXL2 (q_weight, q_scale, q_groups)",
    "trellis": "EXL3 (trellis, suh, svh)",
    "codebooks": "AQLM (codes, codebooks)",
    "W_q": "HQQ (W_q, scale, zero)",
}
"""Part of a tensor's name -> its format, which cannot be read here."""
FOREIGN_DTYPES = {"F8_E4M3": "FP8 of a form that config.json does not name", "F8_E5M2": "FP8 e5m2"}
"""Dtype of a tensor -> the format of such codes, if nothing else declares their format."""


def recognise(config: Table) -> Scheme | None:
    """The format of each module of a config.json's model; None if it is not quantized.

    Reads `quantization_config` at the top or under `text_config`. Raises ConfigError naming what would be
    read wrongly: other formats and methods, variants of a format, rotated activations (transform_config),
    sparsity. `not_followed` names the fields that are not known here.
    """
    try:
        table = _table(config)
        if table is None or modelopt.is_dense(table):
            return None
        return _with_fp4_experts(_scheme(table)) if _has_fp4_experts(config, table) else _scheme(table)
    except Unreadable as error:
        raise ConfigError(
            f"this checkpoint's quantization cannot be read: {error}. Readable:"
            f" {'; '.join(format.title for format in FORMATS.values())}",
            next=(
                "use a release in one of these formats, or in bf16; the library that wrote this one"
                f"{_writer(config)} can usually write it again as such"
            ),
        ) from None


WRITERS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "auto_round": "AutoRound",
    "autoround": "AutoRound",
    "awq": "autoawq",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "llm-compressor (compressed-tensors)",
    "eetq": "EETQ",
    "exl2": "exllamav2",
    "exl3": "exllamav3",
    "fbgemm_fp8": "FBGEMM",
    "fouroversix": "fouroversix",
    "fp8": "transformers, or the model's publisher",
    "fp_quant": "FP-Quant",
    "gemma": "Google",
    "gguf": "llama.cpp",
    "gptq": "gptqmodel or AutoGPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "intel/auto-round": "AutoRound",
    "metal": "MLX",
    "modelopt": "NVIDIA's TensorRT Model Optimizer",
    "mxfp4": "transformers",
    "mxfp8": "transformers",
    "nvfp4": "transformers",
    "quanto": "optimum-quanto",
    "quark": "AMD's Quark",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""quant_method -> the library that writes it."""


def _writer(config: Table) -> str:
    """ ", NAME,": the library that wrote a quantization_config; "" if unknown."""
    try:
        table = _table(config)
    except Unreadable:
        return ""
    name = WRITERS.get(_method(table)) if table and "quant_method" in table else None
    return f", {name}," if name else ""


def unpacking(config: Table, modules: Collection[str]) -> tuple[str, str] | None:
    """(class to import from transformers, value of quantization_config) with which peft can adapt a base.

    modules: its packed ones. None where from_pretrained needs no such argument: routed experts are expanded
    in any case.
    """
    table = _table(config)
    if table is None or _method(table) != compressed.METHOD:
        return None
    return compressed.UNPACKED if any(".experts." not in module for module in modules) else None


def not_followed(config: Table) -> str:
    """One line that names the fields of a quantization_config that are not followed; "" if there are none.

    A field is followed if it is read, or has no effect on packed weights. Raises ConfigError for a
    quantization_config that cannot be read.
    """
    recognise(config)
    table = _table(config)
    if table is None:
        return ""
    method = _method(table)
    if method == compressed.METHOD:
        fields = compressed.not_followed(table, FORMATS)
    elif method == modelopt.METHOD:
        fields = modelopt.not_followed(table)
    elif method in autoround.METHODS:
        fields = autoround.not_followed(table)
    else:
        more = modelopt.ADDED if _adds_layers(table) else frozenset[str]()
        fields = unknown_fields(table, FORMATS[method].known | {"quant_method"} | more, "")
    notes = [f"{', '.join(fields)}: unknown and ignored"] if fields else []
    if activations := _activations(table):
        notes.append(
            f"{activations}: a server rounds activations to it; training and generation here round none"
        )
    if table.get("quantization_status") == compressed.FROZEN:
        notes.append("quantization_status frozen: weights that the files hold unpacked stay unrounded")
    if name := next((field for field in KV_CACHE if table.get(field)), ""):
        notes.append(
            f"{name} is for a server's cache: training and generation here keep the cache unquantized"
        )
    return f"quantization_config: {'; '.join(notes)}" if notes else ""


KV_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo")


def _activations(table: Table) -> str:
    """The field that makes a server round activations, "" if there is none.

    activation_scheme "dynamic" of FP8 is not reported: every such release has it, and no tensor belongs to
    it.
    """
    groups = as_table(table.get("config_groups")) or {}
    for field in ("input_activations", "output_activations"):
        for name, group in groups.items():
            if (as_table(group) or {}).get(field):
                return f"config_groups.{name}.{field}"
    algorithm = table.get("quant_algo")
    if _method(table) == modelopt.METHOD and algorithm and not str(algorithm).startswith("W4A16"):
        return f"quant_algo {table.get('quant_algo')}"
    return "activation_scheme static" if table.get("activation_scheme") == "static" else ""


def is_part(name: str) -> bool:
    """True if a tensor of this name is part of a quantized weight in a readable format."""
    return name.rpartition(".")[2] in {suffix for format in FORMATS.values() for suffix in format.suffixes}


def stored_packed(module: str, names: Collection[str]) -> bool:
    """True if `names` hold the weight of `module` in any readable format."""
    return any(f"{module}.{format.suffixes[0]}" in names for format in FORMATS.values())


def foreign_format(name: str) -> str:
    """The unreadable format that a tensor of this name belongs to; "" if there is none."""
    return next((title for piece, title in FOREIGN.items() if piece in name.split(".")), "")


def foreign_dtype(dtype: str) -> str:
    """The unreadable format whose codes have this dtype; "" if there is none."""
    return FOREIGN_DTYPES.get(dtype, "")


def foreign_parts(module: str, names: Collection[str]) -> str:
    """The unreadable format in which `names` hold parts of `module`; "" if there is none."""
    return next((title for piece, title in FOREIGN.items() if f"{module}.{piece}" in names), "")


def _table(config: Table) -> Table | None:
    """The quantization_config at the top or under text_config, None if there is none."""
    text = as_table(config.get("text_config")) or {}
    value = config.get("quantization_config") or text.get("quantization_config")
    table = as_table(value)
    if value and table is None:
        raise Unreadable(f"quantization_config is {str(value)[:60]!r}, not an object")
    return table or None


def _method(table: Table) -> str:
    """The quant_method; if absent, the one that the fields imply, as in transformers."""
    if table.get("quant_method"):
        return str(table["quant_method"])
    if "load_in_4bit" in table or "load_in_8bit" in table:  # bitsandbytes until 2023
        return bitsandbytes.FORMAT.key
    return modelopt.METHOD if "quant_algo" in table else compressed.METHOD


def _adds_layers(table: Table) -> bool:
    """True if a table of quant_method "fp8" also has layers that modelopt quantized."""
    return _method(table) == "fp8" and table.get("quant_algo") == modelopt.MIXED


def _has_fp4_experts(config: Table, table: Table) -> bool:
    """True for DeepSeek-V4's FP8 releases, by the field that transformers reads."""
    return _method(table) == "fp8" and "fp4" in (config.get("expert_dtype"), table.get("expert_dtype"))


def _with_fp4_experts(scheme: Scheme) -> Scheme:
    """FP8 whose scales are called `scale`, and experts in MXFP4 beside them; compressors are in neither."""
    rules: list[Rule] = []
    for rule in scheme.rules:
        if isinstance(rule.codec, Fp8):
            rules.append(Rule(mxfp4.Mxfp4(mxfp4.BESIDE, "F8_E8M0"), Modules(patterns=(EXPERT,))))
            rule = replace(rule, codec=replace(rule.codec, scale="scale"))
        rules.append(rule)
    within = scheme.ignore.within | {"compressor", "weights_proj"}
    return Scheme(tuple(rules), replace(scheme.ignore, within=within))


EXPERT = r".*\.experts\.[0-9]+\."


def _scheme(table: Table) -> Scheme:
    """The scheme of a quantization_config: by groups of modules, or one codec for all of them."""
    method = _method(table)
    if _adds_layers(table):
        # an FP8 release in which modelopt requantized some layers; its `ignore` applies to those only
        own = {name: value for name, value in table.items() if name not in modelopt.ADDED}
        fp8, added = _scheme(own), modelopt.read({**table, "ignore": []}, FORMATS)
        return Scheme((*added.rules, *fp8.rules), fp8.ignore)
    if method in FORMATS:
        codec = FORMATS[method].read("quantization_config", table)
        fields = (FORMATS[method].ignored, "ignored_layers")  # the latter is AutoFP8's name
        entries = [name for field in fields for name in names_in(table, field)]
        ignore = not_converted(entries, f"quantization_config.{fields[0]}")
        if method != gptq.FORMAT.key:
            return Scheme((Rule(codec),), ignore)
        modules, left_out = gptq.modules(table, "quantization_config")
        return Scheme((Rule(codec, modules),), replace(ignore, patterns=(*ignore.patterns, *left_out)))
    if "quant_method" not in table and method == compressed.METHOD and "config_groups" not in table:
        mlx = " (as MLX writes it)" if {"bits", "group_size"} <= table.keys() else ""
        raise Unreadable(
            f"quantization_config names no quant_method; it has {', '.join(map(str, table))}"[:300] + mlx
        )
    if method == compressed.METHOD:
        return compressed.read(table, FORMATS)
    if method == modelopt.METHOD:
        return modelopt.read(table, FORMATS)
    if method in autoround.METHODS:
        return autoround.read(table)
    raise Unreadable(f'quant_method "{method}"')
