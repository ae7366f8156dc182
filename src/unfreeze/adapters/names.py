"""Module names in adapter files: peft's files use transformers' names, which may differ from ours.

A family with other names lists them in RENAMED as (ours, transformers') parts; without it both are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from unfreeze import models
from unfreeze.checkpoint import nested
from unfreeze.checkpoint.keymap import StackRule, disk_module
from unfreeze.core.errors import AdapterError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.targets import candidates


def theirs(model: nn.Module, name: str) -> str:
    """transformers' name of our module."""
    for ours, other in _renamed(model):
        name = name.replace(ours, other)
    return name


def released(model: nn.Module, name: str) -> str:
    """The release's name of our module, which vLLM and its like have too."""
    return disk_module(name, _rules(model))


def keys_in_ours(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Key of a factor in a file, without peft's prefix -> the same with our name of its module.

    A module may have transformers' name or the release's.
    """
    linear = [c.name for c in candidates(model) if isinstance(c.owner, Linear)]
    known = {released(model, name): name for name in linear}
    named: dict[str, str] = {}
    for key in keys:
        module, factor, rest = key.partition(".lora_")
        own = known.get(nested.model_name(module)) or ours(model, module)
        named[key] = own + factor + rest
    return named


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
    """adapter_config.json with our names in target_parameters, rank_pattern and alpha_pattern.

    They may hold the end of a name alone ("w1.weight"): all of our names that it means are added.
    """
    if not _renamed(model):
        return {**config}
    modules = [name for c in candidates(model) for name in (c.name, *c.projections)]
    every = {name: theirs(model, name) for module in modules for name in (module, f"{module}.weight")}
    named = {**config}
    if config.get("target_parameters"):
        named["target_parameters"] = [
            name
            for target in config["target_parameters"]
            for name in (ours(model, target), *_ending(re.escape(target), every))
        ]
    for field in ("rank_pattern", "alpha_pattern"):
        if config.get(field):
            named[field] = {
                "|".join((ours(model, key), *map(re.escape, _ending(key, every)))): value
                for key, value in config[field].items()
            }
    return named


def _ending(key: str, every: Mapping[str, str]) -> list[str]:
    """Our names of the weights whose names in transformers `key` matches, at their end as in peft."""
    whole = re.compile(rf"(.*\.)?({key})$")
    return [name for name, other in every.items() if whole.match(other)]


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
    owner = model.get_submodule(site)
    assert isinstance(owner, Experts)
    stored = disk_module(f"{site}.{owner.first}", models.rules(shape))
    ours_0 = f"{site}.0.{owner.activation.projections[0]}"
    # readers map the part before the layers themselves (vLLM: Nemotron-H's backbone)
    if stored.partition(".layers.")[2] != ours_0.partition(".layers.")[2]:
        raise AdapterError(
            f"the per-expert layout is not built for model_type {shape.model_type!r}: its releases store"
            f" {stored}, and no reader's names for adapters of such experts are known here",
            next="unfreeze export --for peft, or train without experts: --lora.targets attention",
        )


def _rules(model: nn.Module) -> Sequence[StackRule]:
    shape = getattr(model, "shape", None)
    return models.rules(shape) if isinstance(shape, models.Shape) else ()


def _renamed(model: nn.Module) -> tuple[tuple[str, str], ...]:
    shape = getattr(model, "shape", None)
    return models.renamed(shape) if isinstance(shape, models.Shape) else ()
