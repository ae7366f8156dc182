"""Module names in adapter files: peft's files use transformers' names, which may differ from ours.

A family with other names lists them in RENAMED as (ours, transformers') parts; without it both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from unfreeze import models
from unfreeze.checkpoint.keymap import disk_module
from unfreeze.core.errors import AdapterError


def theirs(model: nn.Module, name: str) -> str:
    """transformers' name of our module."""
    for ours, other in _renamed(model):
        name = name.replace(ours, other)
    return name


def ours(model: nn.Module, name: str) -> str:
    """Our name of transformers' module."""
    for own, other in _renamed(model):
        name = name.replace(other, own)
    return name


def prefix_in(model: nn.Module, prefix: str) -> str:
    """transformers' prefix of a language model inside a larger one; `prefix` is the files'."""
    wrapper = _wrapper(model)
    return (models.WRAPPERS[wrapper].inside if wrapper else "") or prefix


def excluded(model: nn.Module) -> str:
    """exclude_modules of a language model inside a larger one, whose tower may have a q_proj of its own.

    A regular expression that peft matches with whole module names; "" for a language model alone. Without it
    peft would add untrained pairs to a tower, or refuse it (Gemma 4's linear layers are of another class).
    """
    wrapper = _wrapper(model)
    return "|".join(models.WRAPPERS[wrapper].beside) if wrapper else ""


def _wrapper(model: nn.Module) -> str:
    shape = getattr(model, "shape", None)
    return shape.wrapper if isinstance(shape, models.Shape) else ""


def in_ours(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    """adapter_config.json with our names in target_parameters, rank_pattern and alpha_pattern."""
    named = {**config}
    if config.get("target_parameters"):
        named["target_parameters"] = [ours(model, target) for target in config["target_parameters"]]
    for field in ("rank_pattern", "alpha_pattern"):
        if config.get(field):
            named[field] = {ours(model, key): value for key, value in config[field].items()}
    return named


def swapped(model: nn.Module) -> bool:
    """True if peft has A and B of fused experts swapped: ΔWᵀ = Aᵀ Bᵀ."""
    shape = getattr(model, "shape", None)
    return isinstance(shape, models.Shape) and models.swapped_by_peft(shape)


def check_per_expert(model: nn.Module, site: str) -> None:
    """Raise AdapterError if the checkpoint has no matrix per expert named gate_proj, up_proj, down_proj.

    The names that readers of the per-expert layout would need then are unknown.
    """
    shape = getattr(model, "shape", None)
    if not isinstance(shape, models.Shape):
        return
    stored = disk_module(f"{site}.gate_up_proj", models.rules(shape))
    if stored != f"{site}.0.gate_proj":
        raise AdapterError(
            f"the per-expert layout is not built for model_type {shape.model_type!r}: its releases store"
            f" {stored}, and no reader's names for adapters of such experts are known here",
            next="unfreeze export --for peft, or train without experts: --lora.targets attention",
        )


def _renamed(model: nn.Module) -> tuple[tuple[str, str], ...]:
    shape = getattr(model, "shape", None)
    return models.renamed(shape) if isinstance(shape, models.Shape) else ()
