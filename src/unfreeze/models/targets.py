"""Modules of a model that can carry an adapter: names and targets -> modules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import AdapterError, nearest
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.groups import INDEXER, group_of

# In a mixture, peft 0.21 with transformers 5 takes target_modules that end in these names for the routed
# experts, doubles their rank and skips the dense and shared MLPs
# (peft/utils/transformers_weight_conversion.py).
REWRITTEN = ("gate_proj", "up_proj", "down_proj")
EMBEDDINGS = ("embed_tokens", "model.embed_tokens")
NAMED_TARGETS = ("all-linear", "experts", "attention", "mlp", "shared_experts", INDEXER)


@dataclass(frozen=True)
class TargetCandidate:
    """A module that can carry an adapter, which is set as `owner.adapter`."""

    name: str
    group: str
    owner: Linear | Experts

    @property
    def projections(self) -> tuple[str, ...]:
        """Names that a target may match: the Linear itself, or the two stacked projections of Experts."""
        return (
            (self.name,)
            if isinstance(self.owner, Linear)
            else (f"{self.name}.{self.owner.first}", f"{self.name}.down_proj")
        )


def names_embeddings(targets: Sequence[str]) -> bool:
    """True if lora.targets names the token embeddings."""
    return any(target in EMBEDDINGS for target in targets)


def candidates(model: nn.Module) -> list[TargetCandidate]:
    """Every module that can carry an adapter, in the model's order."""
    carriers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (Linear, Experts)) and module.adaptable
    ]
    return [TargetCandidate(name, group_of(name), module) for name, module in carriers]


def chosen_by(config: LoraConfig, model: nn.Module) -> dict[str, tuple[TargetCandidate, frozenset[str]]]:
    """`resolve` of the config's targets.

    Raises AdapterError also if experts_rank is set and no routed expert would be adapted.
    """
    chosen = resolve(model, config.targets)
    if config.experts_rank is not None and not any(
        candidate.group == "experts" for candidate, _ in chosen.values()
    ):
        has_experts = any(isinstance(module, Experts) for module in model.modules())
        why = (
            f"the targets {', '.join(config.targets)} leave them out"
            if has_experts
            else "this model has none"
        )
        raise AdapterError(
            f"lora.experts_rank = {config.experts_rank}, but no routed expert gets an adapter: {why}",
            next="remove --lora.experts-rank"
            + (", or add experts to --lora.targets" if has_experts else "; --lora.rank sets all other ranks"),
        )
    if config.dora:
        _refuse_without_dora(list(chosen), model)
    if config.dora and names_embeddings(config.targets):  # peft would read the folder as DoRA there too
        raise AdapterError(
            "lora.dora is not built for the embeddings (embed_tokens)",
            next="leave embed_tokens out of lora.targets, or train it fully: --train-too embed_tokens",
        )
    return chosen


def without_dora(names: Collection[str], model: nn.Module) -> list[str]:
    """Names of adapted modules that can have no DoRA.

    peft has none for parameters: routed experts, and in a mixture the layers that it reads as such.
    """
    experts = {c.name for c in candidates(model) if isinstance(c.owner, Experts)}
    return [name for name in names if name in experts or (experts and name.endswith(REWRITTEN))]


def _refuse_without_dora(names: Sequence[str], model: nn.Module) -> None:
    if without := without_dora(names, model):
        leaves = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in without))
        raise AdapterError(
            f"lora.dora: {len(without)} of {len(names)} targets can have none ({leaves}): peft has no DoRA in"
            " the MLPs of a mixture",
            next="--lora.targets attention, or remove lora.dora",
        )


def resolve(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[TargetCandidate, frozenset[str]]]:
    """name -> (candidate, its matched projections), for targets as LoraConfig describes them.

    A name without wildcards matches as PEFT's do: the whole name or its end after a dot ("q_proj").
    Raises AdapterError for a target that matches nothing, naming the nearest name that would.
    """
    known = candidates(model)
    chosen: dict[str, tuple[TargetCandidate, frozenset[str]]] = {}
    of_layers = [target for target in targets if target not in EMBEDDINGS]
    if not of_layers:
        raise AdapterError(
            "lora.targets names the embeddings alone; linear layers need adapters too",
            next=f"--lora.targets all-linear {' '.join(targets)}",
        )
    for target in of_layers:
        matches = [(c, frozenset(p for p in c.projections if _matches(target, c, p))) for c in known]
        matches = [(c, projections) for c, projections in matches if projections]
        if not matches:
            raise _unmatched(target, known, model)
        for candidate, projections in matches:
            _, before = chosen.get(candidate.name, (candidate, frozenset()))
            chosen[candidate.name] = (candidate, before | projections)
    return {c.name: chosen[c.name] for c in known if c.name in chosen}


def targets_of(modules: Collection[str], model: nn.Module) -> list[str]:
    """lora.targets that name these modules: a group if all of it is meant, else the layers' own names."""
    leaves: dict[str, tuple[set[str], set[str]]] = {}  # group -> (all its leaves, those of the modules)
    for candidate in candidates(model):
        every, ours = leaves.setdefault(candidate.group, (set(), set()))
        leaf = candidate.name.rsplit(".", 1)[-1]
        every.add(leaf)
        ours |= {leaf} if candidate.name in modules else set()
    named = ([group] if ours == every else sorted(ours) for group, (every, ours) in leaves.items() if ours)
    return list(dict.fromkeys(name for names in named for name in names))


def _matches(target: str, candidate: TargetCandidate, projection: str) -> bool:
    if target == "all-linear":
        return candidate.group not in ("lm_head", "embeddings", "router", INDEXER)
    if target in NAMED_TARGETS:
        return candidate.group == target
    names = {projection, candidate.name}
    if any(character in target for character in "*?["):
        return any(fnmatchcase(name, target) for name in names)
    return any(name == target or name.endswith("." + target) for name in names)


def _unmatched(target: str, known: Sequence[TargetCandidate], model: nn.Module) -> AdapterError:
    if target in NAMED_TARGETS:
        groups = ", ".join(sorted({c.group for c in known} - {"lm_head"}))
        return AdapterError(
            f"lora.targets: {target!r} matches nothing: this model has {groups}",
            next="--lora.targets all-linear",
        )
    bare = [name for name, part in model.named_modules() if isinstance(part, Linear) and not part.adaptable]
    if any(_names(target, name) for name in bare):
        return AdapterError(
            f"lora.targets: {target!r} names layers that can carry no adapter here, such as {bare[0]}",
            next="--lora.targets all-linear",
        )
    if any(_names(target, name) for name, _ in model.named_modules()):
        return AdapterError(
            f"lora.targets: {target!r} names no linear layer; norms, embeddings and the router carry no"
            " adapter",
            next="--lora.targets all-linear",
        )
    names = {p for c in known for p in (*c.projections, c.name)}
    leaves = {name.rsplit(".", 1)[-1] for name in names}
    globs = {"*." + leaf for leaf in leaves} | {
        "*.experts." + leaf for leaf in leaves if any(f".experts.{leaf}" in name for name in names)
    }
    pool = [*NAMED_TARGETS, *sorted(leaves), *(sorted(globs) if "*" in target else sorted(names))]
    hint = nearest(target, pool)
    return AdapterError(
        f"lora.targets: {target!r} matches none of {len(names)} linear layers{hint}",
        next=f"name a group ({', '.join(NAMED_TARGETS)}), a layer, or a glob such as '*.{sorted(leaves)[0]}'",
    )


def _names(target: str, name: str) -> bool:
    return fnmatchcase(name, target) or name.endswith("." + target)


def parameters_per_rank(model: nn.Module, targets: Sequence[str]) -> tuple[int, int]:
    """(dense, experts): adapter parameters per unit of rank, counted without creating any.

    For parallel.plan, on a meta model.
    """
    dense = experts = 0
    if names_embeddings(targets):
        dense += sum(model.get_submodule(EMBEDDINGS[1]).weight.shape)  # pyright: ignore
    for candidate, projections in resolve(model, targets).values():
        owner = candidate.owner
        if isinstance(owner, Linear):
            dense += owner.in_features + owner.out_features
            continue
        D, I, E = owner.hidden_size, owner.intermediate_size, owner.num_experts
        before = owner.before if f"{candidate.name}.{owner.first}" in projections else 0
        experts += E * (D + I) * (before + (f"{candidate.name}.down_proj" in projections))
    return dense, experts


def dora_widths(config: LoraConfig, model: nn.Module) -> dict[str, int]:
    """Outputs of each linear layer that gets DoRA, by name: its numbers in m, and those kept of a token."""
    if not config.dora:
        return {}
    chosen = resolve(model, config.targets).values()
    return {c.name: c.owner.out_features for c, _ in chosen if isinstance(c.owner, Linear)}


def largest_per_rank(model: nn.Module, targets: Sequence[str]) -> tuple[int, int]:
    """(dense, experts): elements of the largest factor per unit of rank; 0 if there is none."""
    dense = experts = 0
    for candidate, projections in resolve(model, targets).values():
        owner = candidate.owner
        if isinstance(owner, Linear):
            dense = max(dense, owner.in_features, owner.out_features)
            continue
        D, I, E = owner.hidden_size, owner.intermediate_size, owner.num_experts
        twice = owner.before if f"{candidate.name}.{owner.first}" in projections else 1
        experts = max(experts, E * twice * max(D, I))
    return dense, experts


def per_rank(config: LoraConfig, model: nn.Module) -> tuple[int, int]:
    """(dense, experts): adapter parameters per unit of rank on this model, which may be on meta.

    Raises AdapterError as `chosen_by` does.
    """
    chosen_by(config, model)
    return parameters_per_rank(model, config.targets)
