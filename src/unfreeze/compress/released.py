"""config.json and the files beside the weights of a merged checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from unfreeze.checkpoint.beside import files_beside
from unfreeze.checkpoint.manifest import BESIDE, MERGE, inside, read_json
from unfreeze.checkpoint.save import write_file
from unfreeze.compress.quantize.declared import quantization_config
from unfreeze.compress.work import MergeWork
from unfreeze.models.longer import config_for

RECORD = MERGE
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
DTYPES = ("torch_dtype", "dtype")


def config_of(work: MergeWork) -> bytes:
    """config.json of the merged checkpoint: the base's bytes for `same`, unless positions are scaled.

    bf16: without quantization_config, dtype bfloat16. int4 and other quantized formats: with that of the
    format's writer, which lists the modules that stay unquantized.
    """
    config: dict[str, Any] = copy.deepcopy(work.manifest.config)
    if work.to == "same" and work.manifest.on_load is not None:
        return _json(_with_vocabulary(config, work.vocabulary))
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
    if work.packing is not None:
        config["quantization_config"] = quantization_config(work)
    return _json(_with_vocabulary(config, work.vocabulary))


def _with_vocabulary(config: dict[str, Any], size: int) -> dict[str, Any]:
    """config.json with another vocab_size; 0: unchanged."""
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if size:
        text["vocab_size"] = size
    return config


def _json(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


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
