"""The two files of an adapter, adapter_config.json and adapter_model.safetensors, checked without a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unfreeze.adapters.layouts import CONFIG, PREFIX, WEIGHTS
from unfreeze.checkpoint.manifest import conversion, inside
from unfreeze.core.errors import AdapterError
from unfreeze.untrusted.json_object import read_object
from unfreeze.untrusted.pattern import pattern

AGAIN = "get the adapter again from its publisher, or export it again: unfreeze export RUN"
REFUSED = {
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "trainable_token_indices": None,
}


def read_files(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(adapter_config.json, tensors by name without PEFT's prefix) of a folder.

    Raises AdapterError where something is missing or of another kind.
    """
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            _refuse_pickle(directory, name)
            next_command = "give the folder that holds adapter_config.json and adapter_model.safetensors"
            raise AdapterError(f"{directory} has no {name}", next=next_command)
    config = read_object(inside(directory / CONFIG), AdapterError)
    try:
        tensors = load_file(inside(directory / WEIGHTS))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        # ValueError, RuntimeError: sizes that torch cannot count
        raise AdapterError(
            f"{directory}: damaged file: {error}", next="get the adapter again from its publisher"
        ) from error
    check_config(config, directory / CONFIG)
    faults = [
        f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()
    ]
    faults += [
        f"{name} holds NaN or infinity"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not _finite(tensor)
    ]
    if faults:
        raise AdapterError(
            f"{directory / WEIGHTS}: {len(faults)} of {len(tensors)} tensors are not finite floats; first:"
            f" {faults[0]}",
            next=AGAIN,
        )
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _refuse_pickle(directory: Path, name: str) -> None:
    """An adapter saved as adapter_model.bin is refused with the command that converts it."""
    pickle = directory / "adapter_model.bin"
    if name == WEIGHTS and pickle.is_file():
        raise AdapterError(
            f"{directory} has no {name}, only {pickle.name}, a pickle: unpickling can run any code, so it is"
            " not read",
            next=conversion(directory, pickle.name, WEIGHTS),
        )


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.float().isfinite().all())


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """adapter_config.json: plain LoRA, and every field of its type.

    Raises AdapterError naming the first that isn't.
    """
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}; only 'LORA' can be loaded")
    for name, plain in REFUSED.items():
        if config.get(name) not in (plain, None, False, []):
            raise AdapterError(f"{path}: {name} = {config[name]!r} is not built; only plain LoRA is")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias = {config['bias']!r} is not built; built: 'none'")
    for name, table, kind in (("r", "rank_pattern", _is_rank), ("lora_alpha", "alpha_pattern", _is_alpha)):
        patterns = config.get(table) or {}
        if not isinstance(patterns, dict):
            raise AdapterError(f"{path}: {table} is a {type(patterns).__name__}, not an object", next=AGAIN)
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
    if not isinstance(config.get("use_rslora"), bool | None):
        raise AdapterError(
            f"{path}: use_rslora is {config['use_rslora']!r:.60}; it must be true or false", next=AGAIN
        )
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise AdapterError(f"{path}: target_parameters is not a list of names", next=AGAIN)


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= 65_536


def _is_alpha(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1e9


def rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """peft's rule: the first pattern that matches the end of `name`, else r and lora_alpha.

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
