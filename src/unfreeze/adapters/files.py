"""The two files of an adapter, adapter_config.json and adapter_model.safetensors, checked without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from unfreeze.adapters.layouts import CONFIG, PREFIX, WEIGHTS
from unfreeze.checkpoint.manifest import conversion, inside
from unfreeze.config.adapter import AGAIN, check_config, check_places
from unfreeze.core.errors import AdapterError
from unfreeze.untrusted.json_object import read_object


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
    check_places(tensors, directory / WEIGHTS)
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
