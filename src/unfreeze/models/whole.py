"""Modules that train fully beside adapters (`lora.train_too`), such as norms, routers and the output head.

peft calls them modules_to_save. Each trains in place of the base's own, which is kept (adapters/whole.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from unfreeze.core.errors import AdapterError, nearest
from unfreeze.models.blocks.embedding import Embedding
from unfreeze.models.blocks.experts import Experts, ExpertWeight
from unfreeze.models.blocks.linear import Linear, PackedHolder
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.routers import Router

Named = Callable[[str], str]
"""Our name of a module -> another one that a pattern may match too."""


def trainable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module with weights of its own and none in modules below it, but for stacks of experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, (Experts, ExpertWeight))
        and (any(True for _ in module.parameters(recurse=False)) or _packed(module))
        and not any(
            any(True for _ in below.parameters())
            for part, below in module.named_children()
            if part != "adapter"
        )
    }


def chosen_modules(
    model: nn.Module, patterns: Sequence[str], named: Named = lambda name: name
) -> dict[str, nn.Module]:
    """Name -> module that trains fully, in the model's order.

    A pattern is a module's name, its end after a dot ("norm"), or a glob ("*.gate"). A tied head and the
    embeddings are one: naming one names both. named: transformers' name of ours, which a pattern may mean.

    Raises AdapterError for a pattern that matches nothing, and for packed weights.
    """
    known = trainable_modules(model)
    names = {name: {name, named(name)} for name in known}
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [name for name, own in names.items() if any(_matches(pattern, each) for each in own)]
        if not matches:
            raise _unmatched(pattern, known, model)
        chosen |= {*matches}
    packed = [name for name in known if name in chosen and _packed(known[name])]
    if packed:
        raise AdapterError(
            f"lora.train_too: {len(packed)} of the modules are packed, and no gradient changes their codes;"
            f" first: {packed[0]}",
            next="leave them out; --lora.targets gives them adapters",
        )
    for one, other in tied_pairs(known):
        chosen |= {one, other} if chosen & {one, other} else set()
    return {name: module for name, module in known.items() if name in chosen}


def tied_pairs(known: dict[str, nn.Module]) -> list[tuple[str, str]]:
    """Names of modules that share one weight: the embeddings and a tied head."""
    tables = [(name, module) for name, module in known.items() if isinstance(module, Embedding)]
    heads = [
        (name, module) for name, module in known.items() if isinstance(module, Linear) and not _packed(module)
    ]
    return [(table, head) for table, one in tables for head, other in heads if one.weight is other.weight]


def trained_dtype(module: nn.Module, parameter: torch.Tensor) -> torch.dtype:
    """The dtype that a module's weight trains in.

    float32 for norms and routers, which compute with it in any case. Others train in the dtype of the
    computation; a half-precision weight then has a float32 master (train/optim.py).
    """
    if isinstance(module, (RMSNorm, Router)):
        return torch.promote_types(parameter.dtype, torch.float32)
    return getattr(module, "widened", None) or parameter.dtype


@dataclass(frozen=True)
class WholeSizes:
    """Sizes of the modules that train fully beside adapters.

    elements  numbers that train
    copies    bytes of their half-precision weights, beside the float32 masters
    half      True if a half-precision weight of a layer is among them
    head      True if the output head is
    """

    elements: int = 0
    copies: int = 0
    half: bool = False
    head: bool = False


NONE_WHOLE = WholeSizes()


def whole_sizes(model: nn.Module, patterns: Sequence[str]) -> WholeSizes:
    """Measure them on a model, which may be on meta."""
    chosen = chosen_modules(model, patterns) if patterns else {}
    seen: dict[int, tuple[str, torch.dtype, int]] = {}
    for name, module in chosen.items():
        for parameter in module.parameters(recurse=False):
            dtype = trained_dtype(module, parameter)
            seen.setdefault(id(parameter), (name, dtype, parameter.numel()))
    halves = [(name, dtype.itemsize * count) for name, dtype, count in seen.values() if dtype.itemsize < 4]
    return WholeSizes(
        elements=sum(count for _, _, count in seen.values()),
        copies=sum(size for _, size in halves),
        half=any(".layers." in name for name, _ in halves),
        head="lm_head" in chosen,
    )


def _matches(pattern: str, name: str) -> bool:
    if any(character in pattern for character in "*?["):
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith("." + pattern)


def _packed(module: nn.Module) -> bool:
    return isinstance(module, PackedHolder) and module.codec is not None


def _unmatched(pattern: str, known: dict[str, nn.Module], model: nn.Module) -> AdapterError:
    everything = [name for name, _ in model.named_modules() if name]
    if any(_matches(pattern, name) for name in everything):
        return AdapterError(
            f"lora.train_too: {pattern!r} names parts without weights of their own, or stacked experts",
            next="name modules such as norm, '*.gate' or lm_head; experts: --lora.targets experts",
        )
    leaves = sorted({name.rsplit(".", 1)[-1] for name in known})
    pool = [*leaves, *("*." + leaf for leaf in leaves)] if "*" in pattern else [*leaves, *known]
    return AdapterError(
        f"lora.train_too: {pattern!r} matches none of {len(known)} modules{nearest(pattern, pool)}",
        next=f"names of modules end in: {', '.join(leaves)}",
    )
