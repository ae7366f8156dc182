"""unfreeze inspect MODEL: show a checkpoint's family, layers, experts, formats and bytes.

Reads only headers, no tensors. MODEL can be a config.json alone.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from unfreeze.config.parse import Frozen, parse
from unfreeze.core.command import Common
from unfreeze.core.dtypes import FLOATS
from unfreeze.core.units import format_bytes, format_count, plural
from unfreeze.tracking.console import PipeConsole

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest, TensorInfo
    from unfreeze.models import Shape
    from unfreeze.quant import Scheme

OTHER = "other"
OTHER_NAMES = (  # vision and audio towers of a model whose family is not built
    r"(^|\.)(vision|visual|audio|image|mm_projector|multi_modal_projector)"
)


class Config(Frozen):
    model: Annotated[str, Positional, arg(metavar="MODEL")] = Field(
        description="checkpoint folder, Hugging Face id org/name, or a config.json"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Print and return the facts about a checkpoint."""
    config = parse(Config, arguments, command="inspect", description=__doc__ or "", positional=True)
    facts = inspect(config.model)
    if not common.quiet:
        _print(facts, PipeConsole(stderr=common.json))
    return facts


def inspect(source: str) -> dict[str, Any]:
    """Facts about a checkpoint as plain JSON, from config.json and file headers.

    parameters      weights of the language model (not the packed words or scales); None if a format cannot
                    be read
    bytes, tensors  of the language model. Anything else in the files (a vision tower, multi-token prediction
                    heads) is the group "other" and in no total
    notes           fields of config.json that are ignored; empty if the family isn't built
    family          "not built" if this model cannot be loaded; `reason` says why
    format          "unsupported (…)" if its weights cannot be read
    """
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.data.tokens.tokenizer import has_tokenizer
    from unfreeze.models import notes

    if source.endswith(".json") or _is_config_alone(Path(source)):
        return _of_config(Path(source))
    manifest = open_checkpoint(source, progress=lambda line: print(line, file=sys.stderr))
    family, is_other = _family(manifest.config)
    format_name, scheme = _format(manifest.config)
    readable = "reason" not in family and not format_name.startswith("unsupported")
    groups = _groups(manifest, is_other, scheme, format_name)
    model = [group for name, group in groups.items() if name != OTHER]
    total = _total(group["parameters"] for group in model)
    return {
        "path": str(manifest.path),
        **family,
        "notes": notes(manifest.config) if readable else [],
        "format": format_name,
        "tokenizer": has_tokenizer(manifest.path),
        "files": len(manifest.files),
        "tensors": sum(group["tensors"] for group in model),
        "bytes": sum(group["bytes"] for group in model),
        "parameters": total,
        "expanded_bytes": None if total is None else 2 * total,
        "groups": groups,
    }


def _is_config_alone(folder: Path) -> bool:
    return (folder / "config.json").is_file() and not any(folder.glob("*.safetensors"))


def _of_config(path: Path) -> dict[str, Any]:
    """`inspect` for a config.json without weights: sizes of the model built on meta."""
    from unfreeze.checkpoint.manifest import read_config
    from unfreeze.models import notes

    config = read_config(path)
    family, _ = _family(config)
    format_name, _ = _format(config)
    readable = "reason" not in family and not format_name.startswith("unsupported")
    groups = _planned_groups(config) if readable else {}
    total = _total(group["parameters"] for group in groups.values()) if groups else None
    return {
        "path": str(path),
        **family,
        "notes": notes(config) if readable else [],
        "format": format_name,
        "tokenizer": False,
        "files": 0,
        "tensors": sum(group["tensors"] for group in groups.values()),
        "bytes": sum(group["bytes"] for group in groups.values()),
        "parameters": total,
        "expanded_bytes": None if total is None else 2 * total,
        "groups": groups,
    }


def _planned_groups(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Like `_groups`, for the model that config.json describes. Tensors are counted as they are in memory."""
    import torch

    from unfreeze import models
    from unfreeze.checkpoint.tensors import NAME
    from unfreeze.models.blocks.linear import PackedHolder
    from unfreeze.models.groups import GROUPS, group_of

    groups: dict[str, dict[str, Any]] = {}

    def count(name: str, parameters: int, tensors: Sequence[torch.Tensor], format: str) -> None:
        empty: dict[str, Any] = {"parameters": 0, "bytes": 0, "tensors": 0, "formats": []}
        group = groups.setdefault(group_of(name), empty)
        group["parameters"] += parameters
        group["bytes"] += sum(tensor.nbytes for tensor in tensors)
        group["tensors"] += len(tensors)
        group["formats"] = sorted({*group["formats"], format})

    model = models.from_config(config, torch.bfloat16)
    packed: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, PackedHolder) and module.codec is not None:
            parts = list(module.packed.parts.values())
            packed |= {id(part) for part in parts}
            count(name, module.packed.numel, parts, module.codec.name)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in packed and not name.endswith(("counts_E", "replayed_3")):
            count(name, tensor.numel(), [tensor], NAME.get(tensor.dtype, str(tensor.dtype)))
    return {group: groups[group] for group in GROUPS if group in groups}


def _family(config: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[str], bool]]:
    """Return (sizes from config.json, predicate: True if a tensor name is not the language model's)."""
    from unfreeze import models
    from unfreeze.core.errors import CheckpointError

    try:
        shape = models.shape(config)
    except CheckpointError as error:
        return _not_built(config, error.message), lambda name: re.search(OTHER_NAMES, name) is not None
    facts = {
        "model_type": shape.model_type,
        "family": shape.family,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "heads": shape.num_heads,
        "vocabulary": shape.vocab_size,
        "max_positions": shape.max_positions,
        "rope": shape.rope.words,
        "attention": _attention(shape),
        "experts": shape.num_experts,
        "experts_per_token": shape.experts_per_token,
        "moe_layers": sum(shape.is_moe(layer) for layer in range(shape.num_layers)),
    }
    if shape.parts:
        facts["parts"] = list(dict.fromkeys(part.name for part in shape.parts))
    if shape.moe is not None and shape.moe.passes > 1:
        facts["expert_passes"] = shape.moe.passes
    return facts, lambda name: any(re.fullmatch(pattern, name) for pattern in models.ignored(shape))


def _attention(shape: Shape) -> str:
    """ "GQA 16/2", "MLA"; of a hybrid "GQA 16/2 in 10 layers, a recurrent state in 30"."""
    words = "MLA" if shape.mla else f"GQA {shape.num_heads}/{shape.num_kv_heads}"
    kinds = Counter(shape.layer_types)
    if not COMPRESSED.isdisjoint(kinds):
        seen = (f"{what} in {kinds[kind]}" for kind, what in ENTRIES.items() if kinds[kind])
        return f"{shape.num_heads} heads over one key, {', '.join(seen)}"
    others = [f"{what} in {kinds[kind]}" for kind, what in INSTEAD.items() if kinds[kind]]
    full = kinds["full_attention"]
    return f"{words} in {full} layer{'s' * (full != 1)}, {', '.join(others)}" if others else words


INSTEAD = {"linear_attention": "a recurrent state", "conv": "a short convolution"}
"""Kind of a layer without attention -> what it has in its place."""

COMPRESSED = frozenset(("compressed_sparse_attention", "heavily_compressed_attention"))
ENTRIES = {
    "sliding_attention": "a window",
    "compressed_sparse_attention": "a window and the best compressed entries",
    "heavily_compressed_attention": "a window and all compressed entries",
}
"""Kind of a layer of compressed attention -> the keys that a query sees, if any layer compresses."""


def _not_built(config: Mapping[str, Any], reason: str) -> dict[str, Any]:
    """The same fields for a model whose family is not built, from the usual keys of config.json.

    A field without its key is None.
    """
    text = config.get("text_config")
    fields = text if isinstance(text, Mapping) else config

    def field(name: str) -> Any:
        """Return the value if it has the expected type (int, or str for model_type), else None."""
        return fields.get(name) if type(fields.get(name)) is (str if name == "model_type" else int) else None

    heads = field("num_attention_heads")
    experts = [field(name) for name in ("n_routed_experts", "num_experts", "num_local_experts")]
    return {
        "model_type": field("model_type"),
        "family": "not built",
        "reason": reason,
        "layers": field("num_hidden_layers"),
        "hidden_size": field("hidden_size"),
        "heads": heads,
        "vocabulary": field("vocab_size"),
        "max_positions": field("max_position_embeddings"),
        "rope": None,
        "attention": f"{heads} heads" if heads else None,
        "experts": next((number for number in experts if number), 0),
        "experts_per_token": field("num_experts_per_tok") or 0,
        "moe_layers": None,
    }


def _format(config: Mapping[str, Any]) -> tuple[str, Scheme | None]:
    """Return (names of the weights' formats, their scheme). The scheme is None if dense or not supported."""
    from unfreeze.core.errors import ConfigError
    from unfreeze.quant.formats import recognise

    try:
        scheme = recognise(config)
    except ConfigError as error:
        return f"unsupported ({error.message})", None
    return (scheme.name, scheme) if scheme else ("dense", None)


def _groups(
    manifest: Manifest, is_other: Callable[[str], bool], scheme: Scheme | None, format_name: str
) -> dict[str, dict[str, Any]]:
    """Return group -> parameters, bytes, tensors, formats.

    The groups are those of the receipt and of --lora.targets; "other" is last.
    """
    from unfreeze.models.groups import GROUPS, group_of
    from unfreeze.quant.scheme import is_unread

    members: dict[str, dict[str, TensorInfo]] = {}
    for name, info in manifest.by_model_name().items():
        members.setdefault(OTHER if is_other(name) else group_of(name), {})[name] = info

    countable = not format_name.startswith("unsupported")
    groups: dict[str, dict[str, Any]] = {}
    for group in (group for group in (*GROUPS, OTHER) if group in members):
        tensors = members[group]
        codecs = {name: scheme.part_of(name, tensors) if scheme else None for name in tensors}
        formats = {
            info.dtype if (codec := codecs[name]) is None else codec.name
            for name, info in tensors.items()
            if scheme is None or not is_unread(name)
        }
        groups[group] = {
            "parameters": _parameters(tensors, scheme, countable=countable),
            "bytes": sum(info.nbytes for info in tensors.values()),
            "tensors": len(tensors),
            "formats": sorted(formats),
        }
    return groups


def _parameters(tensors: Mapping[str, TensorInfo], scheme: Scheme | None, *, countable: bool) -> int | None:
    """Number of weights in these tensors (count_weights).

    None if the format is unreadable (not countable): an element may then hold several weights, or a scale.
    """
    from unfreeze.checkpoint.manifest import count_weights

    if not countable and any(
        info.dtype not in FLOATS or "scale" in _suffix(name) for name, info in tensors.items()
    ):
        return None
    return count_weights(tensors, scheme)


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def _total(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)


def _print(facts: dict[str, Any], console: Console) -> None:
    # sizes, and fields of config.json that are ignored
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(facts["path"], style="bold")
    layers = "layers" if facts["moe_layers"] is None else f"layers, {facts['moe_layers']} of them"
    passes = f" in each of {facts['expert_passes']} passes" if "expert_passes" in facts else ""
    parts = f" with {', '.join(facts['parts'])}" if "parts" in facts else ""
    experts = (
        f" {layers} with {facts['experts']} experts (top-{facts['experts_per_token']}{passes})"
        if facts["experts"]
        else " layers"
    )
    say(
        f"{facts['model_type']}{parts} (family {facts['family']}): {_number(facts['layers'])}{experts},"
        f" hidden {_number(facts['hidden_size'])}, {facts['attention'] or 'attention unknown'}, vocabulary"
        f" {_number(facts['vocabulary'])}, {_number(facts['max_positions'])} positions"
        f"{' (' + facts['rope'] + ')' if facts['rope'] else ''}"
    )
    if "reason" in facts:
        say(f"cannot be loaded: {facts['reason']}")
    for note in facts["notes"]:
        say(f"warning: {note}")

    if not facts["groups"]:
        return

    # one row per group of modules
    table = Table(box=None, pad_edge=False)
    for column in ("group", "parameters", "bytes", "tensors", "format"):
        table.add_column(column, justify="left" if column in ("group", "format") else "right")
    for name, group in facts["groups"].items():
        label = f"{name} (not the language model)" if name == OTHER else name
        table.add_row(
            label,
            _count(group["parameters"]),
            format_bytes(group["bytes"]),
            f"{group['tensors']:,}",
            ", ".join(group["formats"]),
        )
    console.print(table)

    expanded = ""
    if facts["expanded_bytes"] is not None:
        expanded = f"; {format_bytes(facts['expanded_bytes'])} if expanded to bf16"
    here = (
        f"{plural(facts['files'], 'file')}{expanded}; format {facts['format']}; tokenizer"
        f" {'present' if facts['tokenizer'] else 'absent (token ids only)'}"
        if facts["files"]
        else f"from config.json alone{expanded}; format {facts['format']}"
    )
    say(f"total {_count(facts['parameters'])} parameters in {format_bytes(facts['bytes'])}, {here}")


def _number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _count(value: int | None) -> str:
    return "–" if value is None else format_count(value)
