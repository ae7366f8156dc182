"""config.json and the files beside the weights of a merged checkpoint."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from unfreeze.checkpoint.manifest import BESIDE, INDEX, MERGE, inside
from unfreeze.checkpoint.save import write_file
from unfreeze.compress.work import KIMI, MergeWork

RECORD = MERGE
CARD, BASE_CARD = "README.md", "README.base.md"
DTYPES = ("torch_dtype", "dtype")
CARRIED = (
    *("*.json", "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt", "*.py"),
    *("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "*.md"),
)
"""Files beside a release's weights that belong to the model."""
OWN = ("config.json", INDEX, RECORD)  # written by the merge
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
    """config.json of the merged checkpoint: the base's bytes for `same`.

    bf16: without quantization_config, dtype bfloat16. int4: with Kimi's, which lists the modules that stay
    unquantized.
    """
    base = inside(work.manifest.path / "config.json").read_bytes()
    if work.to == "same":
        return base
    config: dict[str, Any] = copy.deepcopy(work.manifest.config)
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
    """Modules that stay unquantized. Those that do so in every layer are one pattern."""
    packed, dense = set[str](), dict[str, str]()
    for weight in work.weights:
        for name, (_, shape) in weight.outputs.items():
            module, _, suffix = name.rpartition(".")
            pattern = re.sub(r"\\\.[0-9]+\\\.", r"\\.[0-9]+\\.", re.escape(module))
            if suffix == KIMI.suffixes[0]:
                packed.add(pattern)
            elif suffix == "weight" and len(shape) == 2 and weight.group not in ("embeddings", "norms"):
                dense[module] = pattern
    yield "lm_head"
    yield from dict.fromkeys(
        module if pattern in packed or pattern == re.escape(module) else f"re:{pattern}$"
        for module, pattern in dense.items()
        if module != "lm_head"
    )


def copy_beside(work: MergeWork, out: Path) -> list[str]:
    """Copy the files beside the base's weights: tokenizer, template, licence, … -> their names.

    The base's README is renamed to README.base.md. Code in a release (*.py) is copied like any file and never
    run here. Sub-folders are not copied.
    """
    carried: list[str] = []
    for path in sorted(work.manifest.path.iterdir()):
        name = BASE_CARD if path.name == CARD else path.name
        left = path.name in OWN or path.name.endswith(".index.json")
        left |= path.name in BESIDE and work.to != "same"
        if left or not path.is_file() or not any(fnmatchcase(path.name, kind) for kind in CARRIED):
            continue
        write_file(out / name, inside(path).read_bytes())
        carried.append(name)
    return carried
