"""upcycle --add-experts: a mixture gets more experts and computes the same until they are opened.

A router with a selection bias b chooses the K largest s + b, with scores s = sigmoid(W x) between 0 and 1,
and weighs the chosen by their s alone. A new expert begins with

    b_new < min(b_old) - 1,   so that   s_new + b_new < min(b_old) <= s_old + b_old   for every token:

it is never chosen, and no output changes. It opens when the loss-free balancing of training raises its bias
(b += rate · sign(mean load - load)): it has no load, so its bias rises at every step, and
1 / rate steps later it is chosen.

A router without such a bias (Mixtral, Qwen2-MoE, Qwen3-MoE) has no exact way: its choice is the K largest
W x, and no row of W, not even a copy of another, is below all others for every x. Nor has a softmax with a
bias (Ernie 4.5): a new expert lowers every other's s, but not its b, and so changes the choice among them.

E experts, K chosen per token, G groups of experts, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.keymap import TensorSource, tensor_sources
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.nested import name_on_disk
from unfreeze.checkpoint.shard import Shard
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.draws import Change, beside_parent, generator_of
from unfreeze.compress.upcycle import DOWN, GATE, UP, Made, Work, copied, put
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.moe import MoE
from unfreeze.models.blocks.routers import Router
from unfreeze.models.decoder import Decoder
from unfreeze.quant.codec import Part

MARGIN = 1 / 16
"""Distance of a closed expert's bias below min(b) - 1: more than float32 rounds of numbers near it."""
COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
"""Names of the number of experts in config.json."""
WITH_BIAS = "deepseek_v3, kimi_k2, glm4_moe, minimax_m2, mimo_v2_flash, nemotron_h, lfm2_moe"


@dataclass(frozen=True)
class Site:
    """A layer's mixture: the name of its module in the model, its router and its experts."""

    name: str
    layer: int
    gate: Router
    experts: Experts


def grown_work(manifest: Manifest, added: int, change: Change) -> Work:
    """The checkpoint with `added` experts more in every mixture.

    Raises ConfigError for a router without a selection bias, and for a number that its groups don't divide.
    """
    old = models.shape(manifest.config)
    model = models.meta_model(old, manifest, torch.float32)
    sites = list(_sites(model, manifest))
    refuse_open(sites, manifest)
    groups = _groups(sites[0].gate, old.num_experts, added)
    config = _config(manifest, old, old.num_experts + added, groups)
    tensors: list[Made] = []
    changed = set[str]()
    for site in sites:
        for own in _of_site(site, manifest, models.rules(old), added, change):
            tensors += own.tensors
            changed |= own.stored
    tensors += [
        copied(info.name, info) for name, info in manifest.by_model_name().items() if name not in changed
    ]
    return Work(manifest, sorted(tensors, key=lambda one: by_layer(one.name)), config)


def refuse_open(sites: list[Site], manifest: Manifest) -> None:
    """Raise ConfigError if a new expert could not be kept closed exactly."""
    kind = manifest.config.get("model_type")
    for site in sites:
        rule = site.gate.routing
        why = ""
        if not rule.correction or rule.after:
            why = "has no bias for the choice alone, so some token would choose a new one"
        elif rule.score != "sigmoid":
            why = f"scores by {rule.score}, so a new one could change the others' choice"
        elif type(site.gate) is not Router:
            why = "has other numbers for each expert"
        if why:
            raise ConfigError(
                f"experts cannot be added to {kind} unchanged: its router {why}",
                next=f"take a family with sigmoid scores and a bias: {WITH_BIAS}",
            )


def _sites(model: Decoder, manifest: Manifest) -> Iterator[Site]:
    """Every mixture, and those of multi-token prediction heads that only the files have."""
    disk, rules = manifest.by_model_name(), models.rules(model.shape)
    last: Site | None = None
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            last = Site(name, module.layer, module.gate, module.experts)
            yield last
    if last is None:
        raise ConfigError(f"{manifest.path} has no layer with experts", next="check its config.json")
    for layer in range(model.shape.num_layers, model.shape.num_layers + 8):
        name = last.name.replace(f".{last.layer}.", f".{layer}.")
        gate = tensor_sources(f"{name}.gate.weight", last.gate.weight.shape, rules, disk)[0]
        if gate.name in disk:
            yield replace(last, name=name, layer=layer)


def _groups(gate: Router, experts: int, added: int) -> int:
    """The number of groups afterwards; 1 if the router has none.

    New experts are groups of their own, so that the old ones keep their numbers and their groups. Such a
    group's score, the sum of its best s + b, is below that of every old one: it is not chosen either.
    """
    groups = gate.routing.groups
    if groups <= 1:
        return groups
    size = experts // groups
    if added % size:
        raise ConfigError(
            f"--add-experts {added}: the router has {groups} groups of {size} experts, and new ones come in"
            " whole groups",
            next=f"--add-experts {max(1, round(added / size)) * size}",
        )
    return groups + added // size


def _config(manifest: Manifest, old: models.Shape, experts: int, groups: int) -> dict[str, Any]:
    """config.json with the new number of experts and groups."""
    config = dict(manifest.config)
    table = dict(config["text_config"]) if isinstance(config.get("text_config"), dict) else config
    for name in COUNTS:
        if old.config.get(name) == old.num_experts:
            table[name] = experts
    if groups > 1:
        table["n_group"] = groups
        table["topk_group"] = old.config["topk_group"]
    if table is not config:
        config["text_config"] = table
    new = models.shape(config)
    assert old.moe is not None
    if new.moe != replace(old.moe, num_experts=experts):
        raise CheckpointError(
            f"config.json's number of experts has a name that is not known ({old.model_type})",
            next="report it with the model's config.json",
        )
    return config


@dataclass(frozen=True)
class Grown:
    """New tensors, and the stored ones that they replace (names in the model's spelling)."""

    tensors: list[Made]
    stored: set[str]


def _of_site(site: Site, manifest: Manifest, rules: Any, added: int, change: Change) -> Iterator[Grown]:
    """The tensors of a mixture: experts, router, selection bias."""
    disk = manifest.by_model_name()
    names = {
        "gate": (f"{site.name}.gate.weight", tuple(site.gate.weight.shape)),
        "bias": (f"{site.name}.gate.e_score_correction_bias", _bias_shape(site)),
    }
    stored = {
        part: tensor_sources(param, shape, rules, disk)[0].name for part, (param, shape) in names.items()
    }
    missing = [name for name in stored.values() if name not in disk]
    if missing:
        raise CheckpointError(f"{missing[0]} is not in the files", next="get the checkpoint again")
    bias = stored_tensor(disk[stored["bias"]])
    parents = parents_of(bias.flatten().double(), added, change.seed, site.layer)
    bias_new = torch.cat(
        [bias, torch.full_like(bias[..., :1], closed(bias)).expand(*bias.shape[:-1], added)], -1
    )
    yield Grown(
        [_router(disk[stored["gate"]], site, parents, change), put(disk[stored["bias"]].name, bias_new)],
        set(stored.values()),
    )
    for projection in (site.experts.first, "down_proj"):
        weight = getattr(site.experts, projection).weight
        yield _projection(site, projection, tuple(weight.shape), manifest, rules, parents, change)


def _router(info: TensorInfo, site: Site, parents: list[int], change: Change) -> Made:
    """The router's rows, then one beside its parent's for each new expert."""
    old, width = info.shape

    def write(shard: Shard) -> None:
        gate = stored_tensor(info)
        rows = [
            beside_parent(gate[parent], change.seed, site.layer, old + number)
            for number, parent in enumerate(parents)
        ]
        shard.put(info.name, torch.cat([gate, torch.stack(rows).to(gate.dtype)]))

    return Made(info.name, (info.dtype, (old + len(parents), width)), write)


def _bias_shape(site: Site) -> tuple[int, ...]:
    bias = site.gate.e_score_correction_bias
    assert bias is not None
    return tuple(bias.shape)


def parents_of(bias_E: Tensor, added: int, seed: int, layer: int) -> list[int]:
    """The experts that the new ones are copies of: those of the lowest bias, equal ones in seeded order.

    Balancing lowers the bias of an expert that gets too many tokens, so a low one marks the busiest.
    """
    drawn = torch.randperm(len(bias_E), generator=generator_of(seed, layer, "parents")).tolist()
    order = sorted(range(len(bias_E)), key=lambda expert: (float(bias_E[expert]), drawn[expert]))
    return [order[number % len(order)] for number in range(added)]


def closed(bias: Tensor) -> float:
    """The bias of an expert that is never chosen: below min(b) - 1 in the dtype of the file."""
    least = float(bias.double().min())
    margin = MARGIN
    while True:
        value = float(torch.tensor(least - 1 - margin, dtype=torch.float64).to(bias.dtype))
        if value + 1 < least - MARGIN / 2:
            return value
        margin *= 2


def _projection(
    site: Site,
    projection: str,
    shape: tuple[int, ...],
    manifest: Manifest,
    rules: Any,
    parents: list[int],
    change: Change,
) -> Grown:
    """The matrices of one projection: a tensor per expert, or one for all (transformers' other way)."""
    disk, old = manifest.by_model_name(), shape[0]
    param = f"{site.name}.experts.{projection}.weight"
    before = [_turned(source, disk) for source in tensor_sources(param, shape, rules, disk)]
    grown = (old + len(parents), *shape[1:])
    after = tensor_sources(param, grown, rules, disk)
    lacking = [source.name for source in before if source.name not in disk]
    if lacking:
        raise CheckpointError(f"{lacking[0]} is not in the files", next="get the checkpoint again")
    stored = {source.name for source in before}
    if not before[0].index:
        info = disk[before[0].name]
        return Grown([_stack(info, before[0].transposed, projection, parents, change, site)], stored)
    # expert by expert, with the same matrices of each
    each = len(before) // old
    tensors: list[Made] = []
    for number, source in enumerate(after):
        expert, matrix = divmod(number, each)
        if expert < old:
            info = disk[before[number].name]
            tensors.append(copied(info.name, info))
            continue
        info = disk[before[parents[expert - old] * each + matrix].name]
        name = name_on_disk(manifest.prefix, source.name)
        tensors.append(_single(name, info, change, f"{site.layer}.{expert}", _matrix(source, projection)))
    return Grown(tensors, stored)


def _turned(source: TensorSource, disk: Mapping[str, TensorInfo]) -> TensorSource:
    """The source in the orientation of the file."""
    info = disk.get(source.name)
    turned = source.either and info is not None and info.shape == source.turned().shape != source.shape
    return source.turned() if turned else source


def _matrix(source: TensorSource, projection: str) -> str:
    if projection == "down_proj":
        return DOWN
    rows = source.index[1] if len(source.index) > 1 else None
    return GATE if isinstance(rows, slice) and not rows.start else UP


def _single(name: str, info: TensorInfo, change: Change, place: str, matrix: str) -> Made:
    """A copy of one expert's matrix, changed as wished."""
    if change.none:
        return copied(name, info)
    return Made(
        name,
        (info.dtype, info.shape),
        lambda shard: shard.put(name, change.applied(stored_tensor(info), place, matrix)),
    )


def _stack(
    info: TensorInfo, transposed: bool, projection: str, parents: list[int], change: Change, site: Site
) -> Made:
    """A stack [E, …] with copies behind its last matrix, written one by one."""
    old, matrix = info.shape[0], prod(info.shape[1:])
    part: Part = (info.dtype, (old + len(parents), *info.shape[1:]))

    def write(shard: Shard) -> None:
        for expert in range(old + len(parents)):
            stored = expert if expert < old else parents[expert - old]
            size = matrix * ITEMSIZE[info.dtype]
            one = TensorInfo(
                info.name, info.dtype, info.shape[1:], size, info.file, info.offset + stored * size
            )
            weight = stored_tensor(one)
            if expert >= old and not change.none:
                weight = _changed(weight, transposed, projection, change, f"{site.layer}.{expert}")
            shard.put(info.name, weight, expert * matrix)

    return Made(info.name, part, write)


def _changed(weight: Tensor, transposed: bool, projection: str, change: Change, place: str) -> Tensor:
    """The change on one matrix of a stack, where gate and up are one."""
    own = weight.mT if transposed else weight
    if projection == "down_proj":
        new = change.applied(own, place, DOWN)
    elif projection == "up_proj":
        new = change.applied(own, place, UP)
    else:
        gate, up = own.chunk(2)
        new = torch.cat([change.applied(gate, place, GATE), change.applied(up, place, UP)])
    return new.mT.contiguous() if transposed else new


def by_layer(name: str) -> tuple[int, str]:
    """By layer, then by name: neighbours are in one file."""
    pieces = name.split(".")
    numbers = [int(after) for before, after in pairwise(pieces) if before == "layers"]
    return (numbers[0] if numbers else -1), name
