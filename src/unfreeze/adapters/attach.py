"""Attach an adapter to every target, and freeze everything else.

A site is one Linear, or the stacked Experts of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from unfreeze.adapters import pissa
from unfreeze.adapters.dora import Dora
from unfreeze.adapters.embeddings import TABLE, attach_embeddings, embedding_adapter
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.tokens import token_rows
from unfreeze.adapters.whole import WholeWeights, modules_named, put_on, take_all_off, train_too, wholes
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import AdapterError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.targets import TargetCandidate, candidates, chosen_by, names_embeddings


@dataclass(frozen=True)
class Site:
    """A place that has an adapter.

    name   of the module: "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts".
    group  as in the receipt and in lora.targets (models/groups.py).
    owner  the module.
    """

    name: str
    group: str
    owner: Linear | Experts
    adapter: LowRank | ExpertLowRank


def sites(model: nn.Module) -> list[Site]:
    """The adapters that a model has now."""
    return [
        Site(c.name, c.group, c.owner, c.owner.adapter)
        for c in candidates(model)
        if isinstance(c.owner.adapter, (LowRank, ExpertLowRank))
    ]


def attach(
    model: nn.Module,
    config: LoraConfig,
    seed: int,
    *,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
    restored: bool = False,
) -> list[Site]:
    """Freeze every parameter, then attach a new adapter to every target, and let `train_too` train.

    The output is unchanged, because B is zero, or because B A is that of the start (PiSSA). The same
    (seed, name) gives the same A, independent of other adapters. Works on a model on "meta" (before
    parallel.place fills it), except with DoRA and PiSSA, which read the weights: adapters have memory from
    the start.

    device    of the adapters; default: the model's, or the host if the model is on meta
    progress  called with (bytes of weights done, of all) while singular values are computed
    restored  True if a save is copied over them afterwards: none are computed then

    Raises AdapterError for a target that matches nothing, for an experts_rank without experts, if a target
    already has an adapter, or for weights that are not there to be read.
    """
    chosen = chosen_by(config, model)
    rows, whole = set(token_rows(model)), modules_named(model, config.train_too)
    adapted = {*chosen, *((TABLE,) if names_embeddings(config.targets) else ())}
    if both := [name for name in rows if name in adapted or name in whole]:
        raise AdapterError(
            f"rows of new tokens train in {both[0]}, so it can have no adapter, nor train fully",
            next="leave embed_tokens and lm_head out of lora.targets and lora.train_too",
        )
    taken = [name for name, (candidate, _) in chosen.items() if candidate.owner.adapter is not None]
    if taken:
        raise AdapterError(
            f"{len(taken)} of {len(chosen)} targets already carry an adapter; first: {taken[0]}"
        )
    if config.reads_weights:
        _refuse_unread(chosen.values(), config)
    if both := [name for name in whole if name in adapted]:
        raise AdapterError(
            f"{len(both)} modules are named by lora.targets and by lora.train_too; first: {both[0]}",
            next="a module has an adapter or trains fully: remove it from one of the two",
        )
    _freeze(model)
    place = _device(model) if device is None else torch.device(device)
    done, total = 0, 4 * sum(_weights(*each) for each in chosen.values())

    def advance(weights: int) -> None:
        nonlocal done
        done += 4 * weights
        if progress is not None:
            progress(done, total)

    for name, (candidate, projections) in chosen.items():
        owner = candidate.owner
        adapter = put_adapter(
            candidate, projections, config.rank_of, config.scale_of, place, dora=config.dora
        )
        if isinstance(adapter, ExpertLowRank) and isinstance(owner, Experts):
            adapter.reset(seed, name, owner.held.first)
        elif isinstance(adapter, LowRank):
            adapter.reset(seed, name)
        if config.start != "lora" and restored:
            pissa.hold(adapter)
        elif config.start != "lora":
            pissa.begin(name, owner, adapter, config.start, advance)
        if isinstance(adapter, Dora) and isinstance(owner, Linear):
            adapter.begin(owner)
    attach_embeddings(model, config, seed, place)
    train_too(model, config.train_too)
    return sites(model)


def _weights(candidate: TargetCandidate, projections: frozenset[str]) -> int:
    """Weights of the adapted matrices that are held here."""
    owner = candidate.owner
    if isinstance(owner, Linear):
        return owner.in_features * owner.out_features
    matrices = owner.before * (f"{candidate.name}.{owner.first}" in projections)
    matrices += f"{candidate.name}.down_proj" in projections
    return len(owner.held) * matrices * owner.hidden_size * owner.intermediate_size


def _refuse_unread(chosen: Iterable[tuple[TargetCandidate, frozenset[str]]], config: LoraConfig) -> None:
    """Raise AdapterError if a weight that the start is computed from is on meta."""
    for candidate, _ in chosen:
        owner = candidate.owner
        parts = [owner] if isinstance(owner, Linear) else [owner.gate_up_proj, owner.down_proj]
        tensors = [t for part in parts for t in (*part.parameters(), *part.buffers())]
        if any(tensor.device.type == "meta" for tensor in tensors):
            name = "lora.dora" if config.dora else f"lora.start = {config.start}"
            raise AdapterError(
                f"{name} reads the weights, and those of {candidate.name} are not on this device",
                next="attach after they are loaded; experts on the device: --place.experts device",
            )


def put_adapter(
    candidate: TargetCandidate,
    projections: frozenset[str],
    rank_of: Callable[[str], int],
    scale_of: Callable[[str], float],
    device: torch.device,
    *,
    dora: bool = False,
) -> LowRank | ExpertLowRank:
    """Attach an uninitialised adapter of the right shapes to a candidate, and return it."""
    owner, rank, scale = candidate.owner, rank_of(candidate.group), scale_of(candidate.group)
    if isinstance(owner, Linear):
        kind = Dora if dora else LowRank
        owner.adapter = adapter = kind(owner.in_features, owner.out_features, rank, scale, device)
        return adapter
    owner.adapter = ExpertLowRank(
        len(owner.held),
        owner.hidden_size,
        owner.intermediate_size,
        names=owner.activation.projections,
        gate_up_rank=rank if f"{candidate.name}.{owner.first}" in projections else None,
        down_rank=rank if f"{candidate.name}.down_proj" in projections else None,
        scale=scale,
        down_scale=scale,
        device=device,
    )
    return owner.adapter


def detach(model: nn.Module) -> None:
    """Remove every adapter, and put back the base's weights of modules that train fully."""
    for site in sites(model):
        site.owner.adapter = None
    for name in (*token_rows(model), *embedding_adapter(model)):
        setattr(model.get_submodule(name), "adapter", None)  # noqa: B010  an Embedding's or a Linear's
    take_all_off(model)


def attached(model: nn.Module) -> dict[str, nn.Module]:
    """Module name -> its adapter, its rows of new tokens, or its own weights in place of the base's."""
    adapters: dict[str, nn.Module] = {site.name: site.adapter for site in sites(model)}
    return adapters | token_rows(model) | embedding_adapter(model) | wholes(model)


def put(model: nn.Module, adapters: Mapping[str, nn.Module]) -> None:
    """Attach what `attached` returned; a module keeps what it has if it is not named."""
    for name, adapter in adapters.items():
        module = model.get_submodule(name)
        if isinstance(adapter, WholeWeights):
            put_on(module, adapter)
        else:
            setattr(module, "adapter", adapter)  # noqa: B010  a Linear's or the experts' own kind


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the base has no adapters; afterwards each is restored. No tensor moves."""
    with with_adapters(model, {}):
        yield


@contextmanager
def with_adapters(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace the model's own adapters by `others`, by module name (`attached`). No tensor moves."""
    taken = attached(model)
    detach(model)
    try:
        put(model, others)
        yield
    finally:
        detach(model)
        put(model, taken)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of the adapters only, in the model's order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if ".adapter." in name)


def _freeze(model: nn.Module) -> None:
    """Freeze everything but rows of new tokens."""
    model.requires_grad_(False)
    for own in token_rows(model).values():
        own.requires_grad_(True)


def _device(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()))
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device
