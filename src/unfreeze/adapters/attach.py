"""Which weights get an adapter, and putting it there. Everything else is frozen.

A site is one Linear, or the stacked Experts of one layer. A group is what people talk about: attention, mlp (dense), shared_experts, experts;
the router, lm_head, embeddings and norms stay frozen unless lm_head is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from unfreeze.adapters.lora import ExpertLowRank, LowRank, Scaling, scale_of
from unfreeze.core.errors import AdapterError, nearest
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear

GROUPS = ("attention", "mlp", "shared_experts", "experts", "router", "lm_head", "embeddings", "norms")
NAMED_TARGETS = ("all-linear", "experts", "attention", "mlp", "shared_experts")


class LoraConfig(BaseModel):
    """Low-rank adapters: ΔW = scale · B A beside each target, the base frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=16, description="columns of B = rows of A; 1 to 4096. 16: between PEFT's default (8) and QLoRA's (64)"
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        default=32.0, description="numerator of the scale; above 0. 2 x rank, as recommended by Biderman et al. 2024, arXiv:2405.09673"
    )
    targets: tuple[str, ...] = Field(
        default=("all-linear",),
        min_length=1,
        description="all-linear (every linear layer and all routed experts, not lm_head, embeddings, router), experts, attention, mlp (dense), "
        "shared_experts, or module names and globs such as *.q_proj or *.experts.down_proj. all-linear learns more than attention alone "
        "(Biderman et al. 2024, arXiv:2405.09673)",
    )
    experts_rank: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="rank of the routed experts' adapters; none: as `rank`. Kimi-K2 has 0.637 B adapter parameters per unit of it"
    )
    scaling: Scaling = Field(
        default="alpha/r", description="scale of the update: alpha/r (LoRA), or alpha/sqrt(r) (rank-stabilised, for ranks above about 64)"
    )

    def rank_of(self, group: str) -> int:
        """experts_rank for routed experts where it is set, else rank."""
        return self.experts_rank if group == "experts" and self.experts_rank is not None else self.rank

    def scale_of(self, group: str) -> float:
        """The scale of a group's updates, by `scaling`."""
        return scale_of(self.rank_of(group), self.alpha, self.scaling)

    def per_rank(self, model: nn.Module) -> tuple[int, int]:
        """(dense, experts): adapter parameters per unit of rank on this model, which may be on meta. What parallel.plan asks."""
        self.resolve(model)
        return parameters_per_rank(model, self.targets)

    def resolve(self, model: nn.Module) -> dict[str, tuple[Candidate, frozenset[str]]]:
        """`resolve` of the targets. Raises AdapterError also where experts_rank is given and no routed expert would be adapted."""
        chosen = resolve(model, self.targets)
        if self.experts_rank is not None and not any(candidate.group == "experts" for candidate, _ in chosen.values()):
            has_experts = any(isinstance(module, Experts) for module in model.modules())
            why = f"the targets {', '.join(self.targets)} leave them out" if has_experts else "this model has none"
            raise AdapterError(
                f"lora.experts_rank = {self.experts_rank}, but no routed expert gets an adapter: {why}",
                next="leave --lora.experts-rank away" + (", or add experts to --lora.targets" if has_experts else "; --lora.rank is for the rest"),
            )
        return chosen


@dataclass(frozen=True)
class Candidate:
    """A module that can carry an adapter. `owner.adapter` is where it goes."""

    name: str
    group: str
    owner: Linear | Experts

    @property
    def projections(self) -> tuple[str, ...]:
        """Names a target may match: the Linear itself, or the two stacked projections of Experts."""
        return (self.name,) if isinstance(self.owner, Linear) else (f"{self.name}.gate_up_proj", f"{self.name}.down_proj")


@dataclass(frozen=True)
class Site:
    """A place where an adapter sits: module name ("model.layers.3.self_attn.q_proj", "model.layers.3.mlp.experts"), its group, the adapter."""

    name: str
    group: str
    owner: Linear | Experts
    adapter: LowRank | ExpertLowRank


def group_of(name: str) -> str:
    """The group of a module or parameter, by its checkpoint name."""
    parts = name.split(".")
    if any("norm" in part for part in parts):
        return "norms"
    if "embed_tokens" in parts:
        return "embeddings"
    if "lm_head" in parts:
        return "lm_head"
    if "self_attn" in parts:
        return "attention"
    if "shared_experts" in parts:
        return "shared_experts"
    if "experts" in parts:
        return "experts"
    if re.search(r"\.mlp\.gate(\.|$)", name):
        return "router"
    return "mlp"


def candidates(model: nn.Module) -> list[Candidate]:
    """Every module that can carry an adapter, in the model's order."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, (Linear, Experts))]
    return [Candidate(name, group_of(name), module) for name, module in found]


def sites(model: nn.Module) -> list[Site]:
    """The adapters a model carries now."""
    return [Site(c.name, c.group, c.owner, c.owner.adapter) for c in candidates(model) if isinstance(c.owner.adapter, (LowRank, ExpertLowRank))]


def resolve(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[Candidate, frozenset[str]]]:
    """name -> (candidate, its matched projections), for targets as LoraConfig describes them.

    A name without wildcards matches as PEFT's do: the whole name or its end after a dot ("q_proj").
    Raises AdapterError for a target that matches nothing, naming the nearest name that would.
    """
    known = candidates(model)
    chosen: dict[str, tuple[Candidate, frozenset[str]]] = {}
    for target in targets:
        matches = [(c, frozenset(p for p in c.projections if _matches(target, c, p))) for c in known]
        matches = [(c, projections) for c, projections in matches if projections]
        if not matches:
            raise _unmatched(target, known, model)
        for candidate, projections in matches:
            _, before = chosen.get(candidate.name, (candidate, frozenset()))
            chosen[candidate.name] = (candidate, before | projections)
    return {c.name: chosen[c.name] for c in known if c.name in chosen}


def _matches(target: str, candidate: Candidate, projection: str) -> bool:
    if target == "all-linear":
        return candidate.group not in ("lm_head", "embeddings", "router")
    if target in NAMED_TARGETS:
        return candidate.group == target
    names = {projection, candidate.name}
    if any(character in target for character in "*?["):
        return any(fnmatchcase(name, target) for name in names)
    return any(name == target or name.endswith("." + target) for name in names)


def _unmatched(target: str, known: Sequence[Candidate], model: nn.Module) -> AdapterError:
    if target in NAMED_TARGETS:
        groups = ", ".join(sorted({c.group for c in known} - {"lm_head"}))
        return AdapterError(f"lora.targets: {target!r} matches nothing: this model has {groups}", next="--lora.targets all-linear")
    if any(_names(target, name) for name, _ in model.named_modules()):
        return AdapterError(
            f"lora.targets: {target!r} names no linear layer; norms, embeddings and the router carry no adapter",
            next="--lora.targets all-linear",
        )
    names = {p for c in known for p in (*c.projections, c.name)}
    leaves = {name.rsplit(".", 1)[-1] for name in names}
    globs = {"*." + leaf for leaf in leaves} | {"*.experts." + leaf for leaf in leaves if any(f".experts.{leaf}" in name for name in names)}
    pool = [*NAMED_TARGETS, *sorted(leaves), *(sorted(globs) if "*" in target else sorted(names))]
    hint = nearest(target, pool)
    return AdapterError(
        f"lora.targets: {target!r} matches none of {len(names)} linear layers{hint}",
        next=f"name a group ({', '.join(NAMED_TARGETS)}), a layer, or a glob such as '*.{sorted(leaves)[0]}'",
    )


def _names(target: str, name: str) -> bool:
    return fnmatchcase(name, target) or name.endswith("." + target)


def attach(model: nn.Module, config: LoraConfig, seed: int, *, device: torch.device | str | None = None) -> list[Site]:
    """Freeze every parameter, then put a fresh adapter at every target. The output is unchanged, because B is zero.

    Works on a model on "meta" (before parallel.place fills it): adapters are real from the start, on `device` (default: the model's device,
    or the host where the model is on meta). The same (seed, name) gives the same A whatever else is attached.
    Raises AdapterError for a target that matches nothing, for an experts_rank without experts, or where an adapter already sits.
    """
    chosen = config.resolve(model)
    taken = [name for name, (candidate, _) in chosen.items() if candidate.owner.adapter is not None]
    if taken:
        raise AdapterError(f"{len(taken)} of {len(chosen)} targets already carry an adapter; first: {taken[0]}")
    model.requires_grad_(False)
    place = _device(model) if device is None else torch.device(device)
    for name, (candidate, projections) in chosen.items():
        candidate.owner.adapter = make_adapter(candidate, projections, config.rank_of, config.scale_of, place)
        candidate.owner.adapter.reset(seed, name)
    return sites(model)


def make_adapter(
    candidate: Candidate,
    projections: frozenset[str],
    rank_of: Callable[[str], int],
    scale_of: Callable[[str], float],
    device: torch.device,
) -> LowRank | ExpertLowRank:
    """An uninitialised adapter of the right shapes for a candidate."""
    owner, rank, scale = candidate.owner, rank_of(candidate.group), scale_of(candidate.group)
    if isinstance(owner, Linear):
        return LowRank(owner.in_features, owner.out_features, rank, scale, device)
    return ExpertLowRank(
        owner.num_experts,
        owner.hidden_size,
        owner.intermediate_size,
        gate_up_rank=rank if f"{candidate.name}.gate_up_proj" in projections else None,
        down_rank=rank if f"{candidate.name}.down_proj" in projections else None,
        scale=scale,
        down_scale=scale,
        device=device,
    )


def parameters_per_rank(model: nn.Module, targets: Sequence[str]) -> tuple[int, int]:
    """(dense, experts): adapter parameters that one unit of rank costs, without making any. For parallel.plan, on a meta model."""
    dense = experts = 0
    for candidate, projections in resolve(model, targets).values():
        owner = candidate.owner
        if isinstance(owner, Linear):
            dense += owner.in_features + owner.out_features
            continue
        D, I, E = owner.hidden_size, owner.intermediate_size, owner.num_experts
        experts += E * 2 * (D + I) * (f"{candidate.name}.gate_up_proj" in projections) + E * (D + I) * (f"{candidate.name}.down_proj" in projections)
    return dense, experts


def detach(model: nn.Module) -> None:
    """Remove every adapter; the base stays as it is."""
    for site in sites(model):
        site.owner.adapter = None


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of the adapters alone, in the model's order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if ".adapter." in name)


def _device(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()))
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device
