"""Adapters on disk, the reading side: load a folder's adapter onto a model.

Everything is decoded and checked before the model changes: an adapter is loaded whole or not at all.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import Site, sites
from unfreeze.adapters.beside import Beside, split_beside
from unfreeze.adapters.decode import Decoded, decode
from unfreeze.adapters.dora import Dora
from unfreeze.adapters.embeddings import embedding_adapter, put_embeddings
from unfreeze.adapters.files import read_files
from unfreeze.adapters.layouts import projections
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.names import excluded
from unfreeze.adapters.tokens import fill_rows, load_rows
from unfreeze.adapters.whole import WholeWeights, fill_whole, put_on, wholes
from unfreeze.core.errors import AdapterError
from unfreeze.models import Decoder
from unfreeze.models.blocks.linear import Linear

_LAYER = re.compile(r"\.\d+\.")


def load_adapter(model: nn.Module, directory: str | Path) -> list[Site]:
    """Load the adapter of a folder onto the model; float32 whatever the file's dtype. -> the sites.

    A model without adapters gets them (base frozen, factors trainable). One with adapters must have the same
    sites, ranks and scales; its factors are overwritten in place, so an optimizer keeps its references.

    Raises AdapterError: folder or field missing, another adapter type, unknown, missing or mismatched tensors
    (counted, the first named). Warns if the file has the swapped dimensions of peft 0.18.
    """
    decoded, beside = _decoded(model, Path(directory))
    whole, rows, table = beside.whole, beside.rows, beside.embeddings
    present, own = {site.name: site.adapter for site in sites(model)}, wholes(model)
    if present:
        _check_same(decoded, present, Path(directory))
        if own.keys() != whole.keys():
            raise AdapterError(
                f"{directory}: {len(whole)} modules trained fully, but {len(own)} do in this model",
                next="load the adapter on a model that has none",
            )
        _fill(present, decoded)
        _fill_same(own, whole)
        fill_rows(model, rows, Path(directory))
        if (table is not None) != bool(embedding_adapter(model)):
            raise AdapterError(
                f"{directory}: the embeddings have LoRA factors in the file or in the model, not in both",
                next="load the adapter on a model that has none",
            )
    else:
        model.requires_grad_(False)
        filled = fill_whole(model, whole)
        for name, adapter in _fill(_shells(decoded), decoded).items():
            decoded[name].candidate.owner.adapter = adapter  # type: ignore[assignment]  a Linear's or the experts'
        for name, weights in filled.items():
            put_on(model.get_submodule(name), weights)
        if rows:
            load_rows(cast(Decoder, model), rows)
    if table is not None:
        put_embeddings(cast(Decoder, model), table)
    return sites(model)


@torch.no_grad()
def _fill_same(own: Mapping[str, WholeWeights], whole: Mapping[str, Mapping[str, Tensor]]) -> None:
    for name, weights in own.items():
        for leaf, parameter in weights.named_parameters():
            parameter.copy_(whole[name][leaf])


def read_adapter(model: nn.Module, directory: str | Path) -> dict[str, LowRank | ExpertLowRank]:
    """The adapter of a folder by site, in float32 on the base's device; the model stays as it is.

    Raises and warns as `load_adapter` does for a model without adapters.
    """
    decoded, beside = _decoded(model, Path(directory))
    if other := beside.modules:
        raise AdapterError(
            f"{directory}: {len(other)} modules train in another way beside LoRA, first {other[0]}: several"
            " adapters at once are LoRA alone",
            next=f"load it by itself, or: unfreeze merge {directory} --to bf16",
        )
    return _fill(_shells(decoded), decoded)


def _decoded(model: nn.Module, directory: Path) -> tuple[dict[str, Decoded], Beside]:
    config, tensors = read_files(directory)
    factors, beside = split_beside(cast(Decoder, model), config, tensors)
    lora = decode(model, config, factors)
    places = [*lora, *beside.modules]
    if twice := [name for name in places if places.count(name) > 1]:
        raise AdapterError(f"{directory}: {twice[0]} is adapted and trains in another way too")
    _warn_of_lost_layers(model, config, lora, directory)
    return lora, beside


@torch.no_grad()
def _fill(
    adapters: dict[str, LowRank | ExpertLowRank], decoded: Mapping[str, Decoded]
) -> dict[str, LowRank | ExpertLowRank]:
    for name, site in decoded.items():
        for parameter, value in _held(site).items():
            getattr(adapters[name], parameter).copy_(value)
    return adapters


def _warn_of_lost_layers(
    model: nn.Module, config: Mapping[str, Any], decoded: Mapping[str, Decoded], directory: Path
) -> None:
    """Warn if a module has factors in some layers of the file and none in others: a tensor may be lost.

    Only where target_modules names it by its last name alone, which peft applies to every layer.
    """
    targets = config.get("target_modules")
    others = (config.get("exclude_modules") or "") not in ("", excluded(model))
    some = config.get("layers_to_transform") not in (None, [])  # 0 is a layer
    if not isinstance(targets, list) or some or others:
        return
    leaves = {name.rpartition(".")[2] for name in decoded} & set(map(str, cast(list[object], targets)))
    kinds = {_LAYER.sub(".*.", name) for name in decoded if name.rpartition(".")[2] in leaves}
    linears = (name for name, module in model.named_modules() if isinstance(module, Linear))
    lost = [name for name in linears if name not in decoded and _LAYER.sub(".*.", name) in kinds]
    if lost:
        warnings.warn(
            f"{directory}: {len(lost)} modules of target_modules have no factors in the file and stay as in"
            f" the base; first: {lost[0]}",
            stacklevel=4,
        )


def untrainable(model: nn.Module) -> list[str]:
    """Names of adapted matrices whose A and B are both zero: each gets its gradient through the other."""
    names: list[str] = []
    for site in sites(model):
        adapter = site.adapter
        if isinstance(adapter, LowRank):
            pairs = {site.name: adapter.factors()[:2]}
        else:
            pairs = {f"{site.name}.{name}": pair[:2] for name, pair in projections(adapter).items()}
        names += [name for name, (A, B) in pairs.items() if not A.any() and not B.any()]
    return names


def _held(site: Decoded) -> Mapping[str, Tensor]:
    """The site's tensors; if experts are split over processes, those held here."""
    owner = site.candidate.owner
    if isinstance(owner, Linear):
        return site.state
    return {name: value[owner.held.slice] for name, value in site.state.items()}


def _shells(decoded: Mapping[str, Decoded]) -> dict[str, LowRank | ExpertLowRank]:
    """Trainable adapters of the decoded shapes, on the base's device; on the host if the base is on meta."""
    return {name: _shell(site) for name, site in decoded.items()}


def _shell(site: Decoded) -> LowRank | ExpertLowRank:
    owner, state = site.candidate.owner, site.state
    tensor = next((t for t in (*owner.parameters(), *owner.buffers())), torch.empty(0))
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    if isinstance(owner, Linear):
        kind = Dora if "m" in state else LowRank
        return kind(owner.in_features, owner.out_features, state["A"].shape[0], site.scale, device)
    return ExpertLowRank(
        len(owner.held),
        owner.hidden_size,
        owner.intermediate_size,
        names=owner.activation.projections,
        gate_up_rank=state["gate_up_B"].shape[2] if "gate_up_B" in state else None,
        down_rank=state["down_B"].shape[2] if "down_B" in state else None,
        scale=site.scale,
        down_scale=site.down_scale,
        device=device,
    )


def _check_same(
    decoded: Mapping[str, Decoded], present: Mapping[str, LowRank | ExpertLowRank], directory: Path
) -> None:
    """Check that the attached adapters are the file's: same sites, shapes and scales."""
    faults = [f"{name} is in the file and not attached" for name in decoded if name not in present]
    faults += [f"{name} is attached and not in the file" for name in present if name not in decoded]
    for name in decoded.keys() & present.keys():
        adapter, site = present[name], decoded[name]
        have = {key: tuple(p.shape) for key, p in adapter.named_parameters()}
        want = {key: tuple(t.shape) for key, t in _held(site).items()}
        if have != want:
            faults.append(f"{name} is attached with {have} and the file has {want}")
        scales = (
            [(adapter.scale, site.scale)]
            if isinstance(adapter, LowRank) or adapter.gate_up_A is not None
            else []
        )
        scales += (
            [(adapter.down_scale, site.down_scale)]
            if isinstance(adapter, ExpertLowRank) and adapter.down_A is not None
            else []
        )
        faults += [
            f"{name} is attached with scale {a:g} and the file has {b:g}"
            for a, b in scales
            if not math.isclose(a, b, rel_tol=1e-9)
        ]
    if faults:
        raise AdapterError(
            f"{directory}: {len(faults)} differences between the adapter attached and the one in the file;"
            f" first: {faults[0]}",
            next=(
                "use the run's own lora settings (rank, alpha, targets), or load the adapter on a model that"
                " has none"
            ),
        )
