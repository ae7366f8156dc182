"""unfreeze inspect MODEL: what is in a checkpoint (family, layers, experts, formats, bytes). Reads headers only, no tensor."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from unfreeze.core.command import Common
from unfreeze.core.units import format_bytes, format_count
from unfreeze.recipes.config import Frozen, parse


class Config(Frozen):
    model: Annotated[str, Positional, arg(metavar="MODEL")] = Field(description="checkpoint folder, or Hugging Face id org/name")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Print and return the facts."""
    config = parse(Config, arguments, command="inspect", description=__doc__ or "", positional=True)
    facts = inspect(config.model)
    if not common.quiet:
        _print(facts, Console(stderr=common.json))
    return facts


def inspect(source: str) -> dict[str, Any]:
    """Facts about a checkpoint as plain JSON. Parameters count weights, not the int32 words or scales they are packed in."""
    from unfreeze import models
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.data.tokenizer import has_tokenizer
    from unfreeze.quant import from_quantization_config

    manifest = open_checkpoint(source, progress=lambda line: print(line, file=sys.stderr))
    shape = models.shape(manifest.config)
    quantized = from_quantization_config(manifest.config)
    groups: dict[str, dict[str, Any]] = defaultdict(lambda: {"parameters": 0, "bytes": 0, "tensors": 0, "dtypes": set()})
    for name, info in manifest.by_model_name().items():
        group = groups[_group(name)]
        group["tensors"] += 1
        group["bytes"] += info.nbytes
        group["dtypes"].add(info.dtype if not name.endswith(("_packed", "_scale", "_shape")) else "INT4")
        group["parameters"] += _parameters(name, info.shape)
    total = sum(group["parameters"] for group in groups.values())
    return {
        "path": str(manifest.path),
        "model_type": shape.model_type,
        "family": shape.family,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "heads": shape.num_heads,
        "vocabulary": shape.vocab_size,
        "max_positions": shape.max_positions,
        "attention": "MLA" if shape.mla else f"GQA {shape.num_heads}/{shape.num_kv_heads}",
        "experts": shape.num_experts,
        "experts_per_token": shape.experts_per_token,
        "moe_layers": sum(shape.is_moe(layer) for layer in range(shape.num_layers)),
        "format": quantized[0].name if quantized else "dense",
        "tokenizer": has_tokenizer(manifest.path),
        "files": len(manifest.files),
        "tensors": len(manifest.tensors),
        "bytes": manifest.nbytes,
        "parameters": total,
        "expanded_bytes": 2 * total,
        "groups": {name: {**group, "dtypes": sorted(group["dtypes"])} for name, group in groups.items()},
    }


def _group(name: str) -> str:
    if ".mlp.experts." in name:
        return "routed experts"
    for part, group in ((".shared_experts.", "shared experts"), (".self_attn.", "attention"), (".mlp.gate.", "router"), (".mlp.", "dense mlp"),
                        ("embed_tokens", "embedding"), ("lm_head", "head"), ("norm", "norms")):  # fmt: skip
        if part in name:
            return group
    return "other (not part of the language model)"


def _parameters(name: str, shape: tuple[int, ...]) -> int:
    if name.endswith(("weight_scale", "weight_shape")):
        return 0
    return math.prod(shape) * (8 if name.endswith("weight_packed") else 1)


def _print(facts: dict[str, Any], console: Console) -> None:
    experts = f", {facts['moe_layers']} with {facts['experts']} experts (top-{facts['experts_per_token']})" if facts["experts"] else ""
    console.print(f"[bold]{facts['path']}[/bold]", highlight=False)
    console.print(f"{facts['model_type']} (family {facts['family']}): {facts['layers']} layers{experts}, hidden {facts['hidden_size']}, "
                  f"{facts['attention']}, vocabulary {facts['vocabulary']:,}, {facts['max_positions']:,} positions")  # fmt: skip
    table = Table(box=None, pad_edge=False)
    for column in ("group", "parameters", "bytes", "tensors", "format"):
        table.add_column(column, justify="left" if column in ("group", "format") else "right")
    for name, group in facts["groups"].items():
        size = format_bytes(group["bytes"])
        table.add_row(name, format_count(group["parameters"]), size, f"{group['tensors']:,}", ", ".join(group["dtypes"]))
    console.print(table)
    console.print(f"total {format_count(facts['parameters'])} parameters in {format_bytes(facts['bytes'])}, {facts['files']} files; "
                  f"in bf16 it would be {format_bytes(facts['expanded_bytes'])}; format {facts['format']}; "
                  f"tokenizer {'present' if facts['tokenizer'] else 'absent (token ids only)'}")  # fmt: skip
