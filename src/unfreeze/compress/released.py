"""config.json and the files beside the weights of a merged checkpoint."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unfreeze import models
from unfreeze.checkpoint.beside import files_beside
from unfreeze.checkpoint.manifest import BESIDE, MERGE, inside, read_json
from unfreeze.checkpoint.save import write_file
from unfreeze.compress.work import KIMI, MergeWork
from unfreeze.models.longer import config_for

RECORD = MERGE
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
DTYPES = ("torch_dtype", "dtype")
INSIDE = ("language_model.model.", "model.language_model.")
"""How names of a language model begin in files of Gemma 3, Mistral 3, Kimi-K2.5, and in transformers 5."""
INT4_WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": KIMI.group_size,
    "dynamic": False,
    "actorder": None,
    "block_structure": None,
    "observer": "minmax",
    "observer_kwargs": {},
}


def config_of(work: MergeWork) -> bytes:
    """config.json of the merged checkpoint: the base's bytes for `same`, unless positions are scaled.

    bf16: without quantization_config, dtype bfloat16. int4: with Kimi's, which lists the modules that stay
    unquantized.
    """
    config: dict[str, Any] = copy.deepcopy(work.manifest.config)
    if work.to == "same":
        file = inside(work.manifest.path / "config.json")
        # read again: a manifest's config also has the quantization of a file beside it
        longer = work.manifest.longer
        if longer is None and not work.vocabulary:
            return file.read_bytes()
        config = read_json(file) if longer is None else config_for(read_json(file), longer)
        return _json(_with_vocabulary(config, work.vocabulary))
    tables: list[dict[str, Any]] = [config]
    tables += [config["text_config"]] if isinstance(config.get("text_config"), dict) else []
    for table in tables:
        table.pop("quantization_config", None)
        for name in DTYPES if work.to == "bf16" else ():
            if name in table:
                table[name] = "bfloat16"
    if work.to == "bf16" and not any(name in table for table in tables for name in DTYPES):
        config["torch_dtype"] = "bfloat16"
    if work.to == "int4":
        config["quantization_config"] = _kimi(work)
    return _json(_with_vocabulary(config, work.vocabulary))


def _with_vocabulary(config: dict[str, Any], size: int) -> dict[str, Any]:
    """config.json with another vocab_size; 0: unchanged."""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if size:
        text["vocab_size"] = size
    return config


def _json(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _kimi(work: MergeWork) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": INT4_WEIGHTS,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(_ignored(work)),
    }


def _ignored(work: MergeWork) -> Iterator[str]:
    """Modules that stay unquantized. Those that do so in every layer are one pattern.

    A release that holds more than the language model has one pattern for the rest (models/wrappers.py), and
    its names both as in the files and as in transformers' memory: a reader may compare with either.
    """
    wrapper = work.model.shape.wrapper
    beside = [re.compile(pattern) for pattern in models.WRAPPERS[wrapper].beside] if wrapper else []
    packed, dense = set[str](), dict[str, str]()
    for weight in work.weights:
        for name, (_, shape) in weight.outputs.items():
            module, _, suffix = name.rpartition(".")
            pattern = re.sub(r"\\\.[0-9]+\\\.", r"\\.[0-9]+\\.", re.escape(module))
            if suffix == KIMI.suffixes[0]:
                packed.add(pattern)
            elif any(part.fullmatch(name) for part in beside):
                continue
            elif suffix == "weight" and len(shape) == 2 and weight.group not in ("embeddings", "norms"):
                dense[module] = pattern
    yield "lm_head"
    yield from (f"re:{part.pattern}" for part in beside)
    yield from dict.fromkeys(
        _either(module, module)
        if pattern in packed or pattern == re.escape(module)
        else _either(f"re:{pattern}$", module)
        for module, pattern in dense.items()
        if module != "lm_head"
    )


def _either(entry: str, module: str) -> str:
    """An entry of the list for a module under either name; INSIDE has what differs."""
    if not module.startswith(INSIDE[0]):
        return entry
    pattern = entry.removeprefix("re:") if entry.startswith("re:") else f"{re.escape(entry)}$"
    return "re:" + pattern.replace(re.escape(INSIDE[0]), f"({'|'.join(map(re.escape, INSIDE))})", 1)


def copy_beside(work: MergeWork, out: Path) -> list[str]:
    """Copy the files beside the base's weights (checkpoint/beside.py) -> their names.

    A base's quantization in a file of its own is only copied if the weights keep it.
    """
    files = files_beside(work.manifest.path, () if work.to == "same" else BESIDE)
    if (tokens := work.manifest.tokenizer) is not None:  # with tokens that the adapter added
        files |= {name: tokens / name for name in TOKENIZER if (tokens / name).is_file()}
    for name, path in files.items():
        write_file(out / name, path.read_bytes())
    return list(files)
