"""Read an adapter on disk without its tensors: folder, adapter_config.json, and settings as [lora].

Without torch, so that an adapter that cannot be trained is refused before slow imports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from unfreeze.config.lora import MergeFormat, MergeScales
from unfreeze.core.errors import AdapterError
from unfreeze.core.events import RESOLVED
from unfreeze.core.longer import MAX_FACTOR, SCALINGS, Longer
from unfreeze.untrusted.json_object import parse_object, read_object
from unfreeze.untrusted.pattern import pattern

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
INDEX = f"{WEIGHTS}.index.json"
"""Index of an adapter in shards (expert parallelism): adapter_model-00001-of-00002.safetensors …"""
ROPE = "rope.json"
"""Beside an adapter trained with scaled positions: scaling, factor, and the fields of the base's config."""
PACKED = "base_packed.json"
"""Beside an adapter whose base was packed while it was loaded: format and modules of `unfreeze quantize`."""
ROUNDED = "merge_aware.json"
"""Beside an adapter that was trained through the rounding of a merge: format and scales of that merge."""
TRAINING = "lora.merge_aware"
"""Start of the fields of [lora] that are about a run's training, not about its adapter."""
MAX_ID = 2**24
MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library
AGAIN = "download the adapter again, or export it again: unfreeze export RUN"
REFUSED = {"lora_bias": False, "fan_in_fan_out": False}
# these change how an adapter works, and are not built; None, false and empty mean off
REFUSED_IF_SET = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
# initialisations that also change the base's weights: the saved adapter belongs to that other base
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

WITHOUT = {"gate": "a router"}
"""Layers that peft can adapt but unfreeze cannot, by the last part of their names."""
WORD = re.compile(r"[a-z0-9_-]{1,40}")
SHARD = re.compile(r"adapter_model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_FACTOR = re.compile(r"\.(?:base_layer|lora_\w+)\b.*")


def adapter_folder(source: str | Path) -> Path:
    """Return an adapter's folder: RUN/adapter for a run, else the folder itself.

    Raises AdapterError if it holds no adapter.
    """
    folder = Path(source).expanduser()
    if (folder / RESOLVED).is_file():
        if (folder / "adapter" / CONFIG).is_file():
            return folder / "adapter"
        raise AdapterError(
            f"run {folder} has no adapter/{CONFIG}: it has not saved one, or it trained every weight",
            next="give a run that trained adapters, or an adapter's folder",
        )
    if not (folder / CONFIG).is_file():
        raise AdapterError(
            f"{folder} is not a run and has no {CONFIG}",
            next="give a run's folder, or a folder with adapter_config.json and adapter_model.safetensors",
        )
    return folder


def lora_of(source: str | Path) -> dict[str, Any]:
    """Return the [lora] fields of an adapter, from its run or from its two files.

    If ranks differ among the dense layers, or among the experts, the largest is returned for all.
    Raises AdapterError, naming the feature, if the adapter is not plain LoRA.
    """
    folder = adapter_folder(source)
    config = read_object(folder / CONFIG, AdapterError)
    check_config(config, folder / CONFIG)
    resolved = Path(source).expanduser() / RESOLVED
    if resolved.is_file():
        run = read_object(resolved, AdapterError)
        own = {
            name.partition(".")[2]: value
            for name, value in run.items()
            if name.startswith("lora.") and not name.startswith(TRAINING)
        }
        lora = own or run.get("lora")  # runs of version 0.1 have a table
        if isinstance(lora, dict):
            return _as_written(dict(cast(dict[str, Any], lora)))
    return _from_files(folder, config)


def _as_written(lora: dict[str, Any]) -> dict[str, Any]:
    """The [lora] fields of a run's adapter on disk: one that started from the weights has twice the rank."""
    if lora.get("start", "lora") == "lora":
        return lora
    own = {name: 2 * lora[name] for name in ("rank", "experts_rank") if lora.get(name)}
    grown = math.sqrt(2) if lora.get("scaling") == "alpha/sqrt(r)" else 2
    return {**lora, **own, "alpha": lora["alpha"] * grown, "start": "lora"}


def base_of(source: str | Path) -> str:
    """Return the base named by a run or adapter: a folder or a Hub id.

    Raises AdapterError if it names none.
    """
    folder = adapter_folder(source)
    run = Path(source).expanduser() / RESOLVED
    file, key = (run, "model") if run.is_file() else (folder / CONFIG, "base_model_name_or_path")
    named = read_object(file, AdapterError).get(key)
    if not isinstance(named, str) or not named:
        raise AdapterError(
            f"{file} has no {key}, so the adapter's base is unknown", next="give it with --model DIR"
        )
    return named


def longer_of(source: str | Path) -> Longer | None:
    """Return the scaling of positions that an adapter was trained with; None if there is none.

    Raises AdapterError if the file is damaged.
    """
    file = adapter_folder(source) / ROPE
    if not file.is_file():
        return None
    table = read_object(file, AdapterError)
    scaling, factor = table.get("scaling"), table.get("factor")
    if scaling in SCALINGS and isinstance(factor, (int, float)) and 1 < factor <= MAX_FACTOR:
        return Longer(str(scaling), float(factor))
    raise AdapterError(
        f"{file}: scaling {scaling!r:.40}, factor {factor!r:.40}; known: {', '.join(SCALINGS)}, above 1 to"
        f" {MAX_FACTOR:,}",
        next=AGAIN,
    )


class PackedAs(NamedTuple):
    """The packing of an adapter's base: `unfreeze quantize BASE --to FORMAT --modules MODULES`."""

    format: str
    modules: tuple[str, ...]


def packed_as(source: str | Path) -> PackedAs | None:
    """Return how the base of an adapter was packed while it trained; None if it was not.

    Raises AdapterError if the file is damaged.
    """
    file = adapter_folder(source) / PACKED
    if not file.is_file():
        return None
    table = read_object(file, AdapterError)
    to, modules = table.get("format"), table.get("modules")
    words = [to, *cast(list[Any], modules)] if isinstance(modules, list) else [None]
    if not all(isinstance(word, str) and WORD.fullmatch(word) for word in words):
        raise AdapterError(f"{file}: format {to!r:.40}, modules {modules!r:.40}", next=AGAIN)
    return PackedAs(str(to), tuple(map(str, words[1:])))


class RoundedAs(NamedTuple):
    """The rounding that an adapter was trained through: --merge-aware FORMAT --merge-aware-scales SCALES."""

    format: str
    scales: str


def rounded_as(source: str | Path) -> RoundedAs | None:
    """Return the rounding that an adapter was trained through; None if it is ordinary LoRA.

    Raises AdapterError if the file is damaged.
    """
    file = adapter_folder(source) / ROUNDED
    if not file.is_file():
        return None
    table = read_object(file, AdapterError)
    to, scales = table.get("format"), table.get("scales")
    if to not in get_args(MergeFormat)[1:] or scales not in get_args(MergeScales):
        raise AdapterError(f"{file}: format {to!r:.40}, scales {scales!r:.40}", next=AGAIN)
    return RoundedAs(str(to), str(scales))


def _from_files(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    dense: dict[str, int] = {}
    experts: dict[str, int] = {}
    whole: dict[str, str] = {}  # target -> name in the first layer that peft matches patterns with
    trained: dict[str, None] = {}
    of_embeddings = False
    ours = False
    parameters: list[str] = config.get("target_parameters") or []
    check_places(header := _header(folder), folder / WEIGHTS)
    for name, entry in header.items():
        if name == "__metadata__":
            ours = entry.get("layout") == "peft"
            continue
        layer, _, half = name.removeprefix(PREFIX).rpartition(".lora_")
        of_embeddings |= half.startswith("embedding_")
        beside = ".token_adapter." in name or name.endswith(".base_layer.weight")
        if not layer and config.get("modules_to_save") and not beside:
            trained[name.removeprefix(PREFIX).rpartition(".")[0]] = None
        shape: Any = entry.get("shape")
        if not half.startswith("A") or not isinstance(shape, list):
            continue
        rows = next((size for size in cast(list[Any], shape) if isinstance(size, int)), 0)
        fused = layer.endswith((".experts", ".experts.base_layer"))
        if not fused and not _is_rank(rows):
            raise AdapterError(
                f"{folder / WEIGHTS}: {name} has {rows} rows, which is not a valid rank", next=AGAIN
            )
        leaf = layer.rsplit(".", 1)[-1]
        if ".experts." not in f"{layer}.":
            target = f"*.{layer.split('.')[-2] if '.' in layer else '*'}.{leaf}"
            dense[target] = max(dense.get(target, 0), rows)
            as_parameter = any(f".{layer}.weight".endswith(f".{named}") for named in parameters)
            whole.setdefault(target, f"{layer}.weight" if as_parameter else layer)
        elif fused:  # the config has peft's rank
            site = layer.removesuffix(".base_layer")
            first = first_matrix(config)
            alone = named_parameters(config, site, first) == {first}
            projection = first if alone or leaf == "base_layer" else "down_proj"
            parameter = f"{site}.{projection}"
            experts[f"*.experts.{projection}"] = rank_and_scale(config, parameter)[0]
            whole.setdefault(f"*.experts.{projection}", parameter)
        else:
            projection = "down_proj" if leaf == "down_proj" else "gate_up_proj"
            experts[f"*.experts.{projection}"] = rows
            whole.setdefault(f"*.experts.{projection}", layer)
    if ours and "*.experts.gate_up_proj" in experts:  # gate and up blocks are side by side (layouts.py)
        experts = dict.fromkeys(experts, experts["*.experts.gate_up_proj"] // 2)
    if not dense and not experts and of_embeddings:
        raise AdapterError(
            f"{folder / WEIGHTS} adapts the embeddings alone, which cannot be trained on",
            next="it can be merged and asked: unfreeze merge, unfreeze chat",
        )
    if not dense and not experts:
        raise AdapterError(f"{folder / WEIGHTS} has no LoRA factors", next=AGAIN)
    rank, in_experts = max(dense.values(), default=0), max(experts.values(), default=0)
    scale = rank_and_scale(config, whole[next(iter(dense or experts))])[1]
    return {
        "rank": rank or in_experts,
        "alpha": float(f"{scale * (rank or in_experts):.15g}"),
        "targets": tuple([*dense, *experts, *(["embed_tokens"] if of_embeddings else [])]),
        "experts_rank": in_experts if in_experts and in_experts != (rank or in_experts) else None,
        "scaling": "alpha/r",
        **({"dora": True} if config.get("use_dora") else {}),
        **({"train_too": tuple(trained)} if trained else {}),
    }


def _header(folder: Path) -> dict[str, dict[str, Any]]:
    """Header of adapter_model.safetensors: name -> {"shape": …}, and "__metadata__"."""
    path = folder / WEIGHTS
    if not path.is_file() and (folder / INDEX).is_file():
        headers = [_header_of(folder / name) for name in shard_files(folder)]
        return {name: entry for header in headers for name, entry in header.items()}
    if not path.is_file():
        pickle = " only adapter_model.bin, a pickle," if (folder / "adapter_model.bin").is_file() else ""
        raise AdapterError(f"{folder} has{pickle} no {WEIGHTS}", next=AGAIN)
    return _header_of(path)


def weight_files(folder: Path) -> list[Path]:
    """Files with an adapter's tensors: adapter_model.safetensors, or the index and its shards."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    return [folder / INDEX, *(folder / name for name in shard_files(folder))]


def shard_files(folder: Path) -> list[str]:
    """Names of an adapter's shards from its index, in the order of their experts.

    Raises AdapterError if the index is invalid or a shard is missing.
    """
    path = folder / INDEX
    table = read_object(path, AdapterError).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise AdapterError(f"{path} has no weight_map", next=AGAIN)
    shards: dict[str, None] = {}
    for name, files in cast(dict[str, Any], table).items():
        for file in cast(list[Any], files if isinstance(files, list) else [files]):
            if not isinstance(file, str) or not SHARD.fullmatch(file):
                raise AdapterError(
                    f"{path}: {name:.80} is in {file!r:.80}, which is not a shard's name", next=AGAIN
                )
            shards[file] = None
    lost = [file for file in shards if not (folder / file).is_file()]
    if lost:
        raise AdapterError(
            f"{folder}: {len(lost)} of {len(shards)} shards are missing; first: {lost[0]}", next=AGAIN
        )
    return sorted(shards)


def _header_of(path: Path) -> dict[str, dict[str, Any]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, path.stat().st_size):
            raise AdapterError(f"{path}: damaged file: a header of {length:,} bytes", next=AGAIN)
        header = parse_object(file.read(length), str(path), AdapterError)
    if not all(isinstance(value, dict) for value in header.values()):
        raise AdapterError(f"{path}: damaged file: its header does not describe tensors", next=AGAIN)
    return header


def first_matrix(config: Mapping[str, Any]) -> str:
    """The stacked matrix before the experts' activation: gate_up_proj, or up_proj without a gate."""
    targets = config.get("target_parameters") or ()
    return "up_proj" if any(target.endswith(".experts.up_proj") for target in targets) else "gate_up_proj"


def named_parameters(config: Mapping[str, Any], experts: str, first: str = "gate_up_proj") -> set[str]:
    """Subset of `first` and down_proj of a layer's experts named by target_parameters (peft's rule)."""
    targets = config.get("target_parameters") or ()
    return {
        name
        for name in (first, "down_proj")
        if any(f".{experts}.{name}".endswith(f".{target}") for target in targets)
    }


def check_places(names: Iterable[str], path: Path) -> None:
    """Raise AdapterError if tensors belong to a router."""
    modules = {name: _FACTOR.sub("", name) for name in names}
    leaves = {name: module.rpartition(".")[2] for name, module in modules.items() if module != name}
    unusable = {name: leaf for name, leaf in leaves.items() if leaf in WITHOUT}
    if unusable:
        what = " and ".join(dict.fromkeys(WITHOUT[leaf] for leaf in unusable.values()))
        first = modules[next(iter(unusable))].removeprefix(PREFIX)
        raise AdapterError(
            f"{path}: {len(unusable)} of {len(modules)} tensors adapt {what}, which unfreeze cannot; first:"
            f" {first}",
            # exclude_modules does not keep a router from peft 0.21's all-linear, which adapts parameters too
            next="train the adapter in peft with target_modules and target_parameters that name each module,"
            f" without {', '.join(sorted(set(unusable.values())))}: not all-linear",
        )


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """Check that adapter_config.json is LoRA or DoRA and that its fields have the right types.

    Raises AdapterError, naming the first field that is wrong.
    """
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}; only 'LORA' can be loaded")
    for name, plain in REFUSED.items():
        if config.get(name) not in (plain, None, False, []):
            raise AdapterError(f"{path}: {name} = {config[name]!r} is not built; only plain LoRA is")
    for name in REFUSED_IF_SET:
        if config.get(name):
            raise AdapterError(f"{path}: {name} = {config[name]!r:.60} is not built; only plain LoRA is")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise AdapterError(
            f"{path}: init_lora_weights = {start!r:.60} changed the base's weights too, so the adapter"
            " belongs to another base",
            next="convert it in peft: save_pretrained(…, path_initial_model_for_weight_conversion=…)",
        )
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias = {config['bias']!r} is not built; built: 'none'")
    for name, table, kind in (("r", "rank_pattern", _is_rank), ("lora_alpha", "alpha_pattern", _is_alpha)):
        written = cast(Any, config.get(table) or {})
        if not isinstance(written, dict):
            raise AdapterError(f"{path}: {table} is a {type(written).__name__}, not an object", next=AGAIN)
        patterns = cast(dict[str, Any], written)
        for key, value in {name: config.get(name), **patterns}.items():
            if not kind(value):
                what = (
                    "a whole number from 1 to 65,536"
                    if kind is _is_rank
                    else "a positive number, at most 1e9"
                )
                raise AdapterError(f"{path}: {key} is {value!r:.60}; it must be {what}", next=AGAIN)
        for key in patterns:
            pattern(key, f"{path}: {table}", AdapterError)
    for name in ("use_rslora", "use_dora"):
        if not isinstance(config.get(name), bool | None):
            raise AdapterError(
                f"{path}: {name} is {config[name]!r:.60}; it must be true or false", next=AGAIN
            )
    _check_indices(config.get("trainable_token_indices"), path)
    for field in ("target_parameters", "modules_to_save"):
        names = cast(Any, config.get(field) or [])
        if not isinstance(names, list) or not all(isinstance(x, str) for x in cast(list[Any], names)):
            raise AdapterError(f"{path}: {field} is not a list of names", next=AGAIN)


def _check_indices(indices: Any, path: Path) -> None:
    """Check that trainable_token_indices is None, a list of ids, or {module: list of ids}."""
    tables: list[Any] = [indices or []]
    if isinstance(indices, dict):
        tables = list(cast(dict[str, Any], indices).values())
    for ids in tables:
        numbers = cast(list[Any], ids) if isinstance(ids, list) else [None]
        if not all(type(id) is int and 0 <= id < MAX_ID for id in numbers) or len({*numbers}) < len(numbers):
            raise AdapterError(
                f"{path}: trainable_token_indices is {indices!r:.60}; it must be lists of different ids",
                next=AGAIN,
            )


def lora_alone(folder: Path) -> bool:
    """True if an adapter is LoRA on linear layers and experts, and nothing else."""
    config = read_object(folder / CONFIG, AdapterError)
    targets: Any = config.get("target_modules") or []
    others = any(config.get(name) for name in ("modules_to_save", "trainable_token_indices", "use_dora"))
    return not others and not (isinstance(targets, list) and "embed_tokens" in targets)


def kind_of(folder: Path, run: Path | None = None) -> str:
    """Return an adapter's kind in the words of a card: "LoRA", "DoRA" or "LoRA (PiSSA)".

    run: the run that made it. Its files alone do not show that it started as PiSSA.
    """
    kind = "DoRA" if read_object(folder / CONFIG, AdapterError).get("use_dora") else "LoRA"
    if run is None or not (run / RESOLVED).is_file():
        return kind
    start = str(read_object(run / RESOLVED, AdapterError).get("lora.start"))
    return f"{kind} (PiSSA)" if start.startswith("pissa") else kind


def new_token_ids(folder: Path) -> list[int]:
    """Ids of the rows that an adapter trained by themselves; [] if none."""
    indices: Any = read_object(folder / CONFIG, AdapterError).get("trainable_token_indices") or []
    _check_indices(indices, folder / CONFIG)
    lists: list[list[int]] = [indices]
    if isinstance(indices, dict):
        lists = list(cast(dict[str, list[int]], indices).values())
    return sorted({id for ids in lists for id in ids})


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= 65_536


def _is_alpha(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e9


def rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return (rank, scale) by peft's rule: first pattern matching the end of `name`, else r and lora_alpha.

    The scale is alpha / r, or alpha / sqrt(r) with use_rslora.
    """

    def lookup(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        return next(
            (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default
        )

    rank, alpha = (
        lookup(config.get("rank_pattern"), config["r"]),
        lookup(config.get("alpha_pattern"), config["lora_alpha"]),
    )
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
