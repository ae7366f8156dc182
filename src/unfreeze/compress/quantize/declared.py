"""quantization_config of a checkpoint that is written here, as the format's own library writes it.

Fields: compressed-tensors' QuantizationConfig, transformers' BitsAndBytesConfig, and for gpt-oss the
config.json of its release; compared with them in tests/compress/quantize/test_declared.py. No activations
are rounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from unfreeze import models
from unfreeze.compress.work import MergeWork, Weight
from unfreeze.quant.bitsandbytes import DTYPES, Bits4
from unfreeze.quant.codec import Codec
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.int4 import Int4
from unfreeze.quant.integers import Integers
from unfreeze.quant.mxfp4 import GROUP as MX_GROUP
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.nvfp4 import GROUP as NV_GROUP

INSIDE = ("language_model.model.", "model.language_model.")
"""Prefixes of a language model's names: in files of Gemma 3, Mistral 3, Kimi-K2.5, and in transformers 5."""
NOT_IN_TRANSFORMERS = frozenset("deepseek_v4 kimi_linear mistral4 nanochat qwen3_vl_moe_text".split())
"""Families whose quantized weights transformers 5.23 does not load, or misreads (a renamed module, experts
that it leaves at random); held in tests/models/test_family_quantized.py."""
KIMI_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
"""The `weights` of Kimi-K2-Thinking's config.json, without the group size."""
FUSED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
"""First part of a fused layer -> its name, which SGLang looks up for DeepSeek-V3, as in Kimi-K2's list."""
OF_GPT_OSS = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
BITSANDBYTES = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "llm_int8_threshold": 6.0,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "bnb_4bit_quant_storage": "uint8",
}


def quantization_config(work: MergeWork) -> dict[str, Any]:
    """The table for config.json, with the list of modules that stay unquantized."""
    assert work.packing is not None
    codec = work.packing.codec
    if isinstance(codec, Bits4):
        names = {short: name for name, short in DTYPES.items()}
        return BITSANDBYTES | {
            "bnb_4bit_quant_type": codec.kind,
            "bnb_4bit_use_double_quant": codec.double,
            "bnb_4bit_compute_dtype": names[codec.dtype],
            "llm_int8_skip_modules": list(dict.fromkeys(("lm_head", *_left(work)))),
        }
    blocked = next((own for own in work.codecs if isinstance(own, Mxfp4) and own.names.blocked), None)
    if blocked is not None:
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(OF_GPT_OSS)}
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": _weights(codec),
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _format(codec),
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(_ignored(work)),
    }


def _format(codec: Codec) -> str:
    """The name of a codec's layout in compressed-tensors."""
    if isinstance(codec, (Int4, Integers)):
        return "pack-quantized"
    return "float-quantized" if isinstance(codec, Fp8Scaled) else codec.name


def _weights(codec: Codec) -> dict[str, Any]:
    """The `weights` of the group."""
    if isinstance(codec, Int4):
        return KIMI_WEIGHTS | {"group_size": codec.group_size}
    table: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True}
    if isinstance(codec, Integers):
        table |= {"num_bits": codec.bits, "type": "int", "group_size": None, "strategy": "channel"}
    elif isinstance(codec, Fp8Scaled):
        table |= {"num_bits": 8, "group_size": None, "strategy": "channel"}
    elif isinstance(codec, Mxfp4):
        table |= {"group_size": MX_GROUP, "strategy": "group", "scale_dtype": "torch.uint8"}
    else:
        table |= {"group_size": NV_GROUP, "strategy": "tensor_group"}
        table["scale_dtype"] = "torch.float8_e4m3fn"
    return table | {"dynamic": False}


def _is_packed(weight: Weight) -> bool:
    return not isinstance(weight.to, str) and (weight.to is not None or weight.codec is not None)


def _left(work: MergeWork) -> dict[str, str]:
    """Module that stays unquantized -> a pattern for it with any numbers.

    As on disk; and where it differs as in the model, whose names are mostly those of transformers' memory.
    """
    left: dict[str, str] = {}
    for weight in work.weights:
        if _is_packed(weight) or weight.group in ("embeddings", "norms"):
            continue
        for name, (_, shape) in weight.outputs.items():
            module, _, suffix = name.rpartition(".")
            if suffix != "weight" or len(shape) != 2:
                continue
            left[module] = _numbered(module)
            own = weight.home.place.site if weight.home else ""
            if own not in ("", weight.name) and not work.manifest.prefix:
                left[own] = _numbered(own)
    return left


def _numbered(module: str) -> str:
    return re.sub(r"\\\.[0-9]+\\\.", r"\\.[0-9]+\\.", re.escape(module))


def _ignored(work: MergeWork) -> Iterator[str]:
    """Modules that stay unquantized. Those that do so in every layer are one pattern.

    A release that holds more than the language model has one pattern for the rest (models/wrappers.py), and
    its names both as in the files and as in transformers' memory: a reader may compare with either.
    """
    wrapper = work.model.shape.wrapper
    beside = [re.compile(pattern) for pattern in models.WRAPPERS[wrapper].beside] if wrapper else []
    packed = {
        _numbered(name.rpartition(".")[0])
        for weight in work.weights
        if _is_packed(weight)
        for name in weight.outputs
    }
    if "lm_head" not in packed:
        yield "lm_head"
    yield from (f"re:{part.pattern}" for part in beside)
    left = [
        _either(module, module)
        if pattern in packed or pattern == re.escape(module)
        else _either(f"re:{pattern}$", module)
        for module, pattern in _left(work).items()
        if module != "lm_head" and not any(part.fullmatch(f"{module}.weight") for part in beside)
    ]
    fused = (
        re.sub(rf"\b{first}(?=\$?$)", name, entry)
        for first, name in FUSED.items()
        for entry in left
        if re.search(rf"\b{first}\$?$", entry)
    )
    yield from dict.fromkeys((*left, *fused))


def _either(entry: str, module: str) -> str:
    """An entry of the list for a module under either name; INSIDE has what differs."""
    if not module.startswith(INSIDE[0]):
        return entry
    pattern = entry.removeprefix("re:") if entry.startswith("re:") else f"{re.escape(entry)}$"
    return "re:" + pattern.replace(re.escape(INSIDE[0]), f"({'|'.join(map(re.escape, INSIDE))})", 1)
