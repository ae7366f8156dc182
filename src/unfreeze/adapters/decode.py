"""An adapter's tensors -> the factors of each site.

Reads both layouts of layouts.py, what peft itself writes, and peft 0.18's swapped dimensions.

E experts, D model width, I expert width, R rank of gate and of up, r rank of a fused pair.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.names import in_ours, keys_in_ours, swapped
from unfreeze.checkpoint import nested
from unfreeze.config.adapter import named_parameters, rank_and_scale
from unfreeze.core.errors import AdapterError, nearest
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.targets import TargetCandidate, candidates

MAGNITUDE = re.compile(r"(?P<name>.+)\.lora_magnitude_vector(\.default)?(\.weight)?$")
"""DoRA's m; peft writes no ".weight" after it, and both are read."""
KEY = re.compile(r"(?P<name>.+)\.lora_(?P<half>[AB])(\.default)?(\.weight)?$")
EXPERT = re.compile(r"(?P<site>.+\.experts)\.(?P<number>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)$")


@dataclass(frozen=True)
class FactorPair:
    """The two tensors of one name in the file, and their scale from adapter_config.json."""

    A: Tensor
    B: Tensor
    scale: float


@dataclass
class Decoded:
    """The adapter of one site: its parameters by name, its ranks and scales."""

    candidate: TargetCandidate
    state: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 0.0
    down_scale: float = 0.0


def decode(model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Decoded]:
    """site name -> its factors in our form. Raises one AdapterError for all factors that do not fit."""
    config = in_ours(model, config)
    # A and B by their module
    known = {c.name: c for c in candidates(model)}
    names = keys_in_ours(model, tensors)
    named = {names[key]: tensor for key, tensor in tensors.items()}
    lengths = {match: named.pop(key) for key in [*named] if (match := _of_length(key))}
    halves, unknown = _halves(named, known)
    experts = max((c.owner.num_experts for c in known.values() if not isinstance(c.owner, Linear)), default=1)
    faults = [f"{name} is unknown{nearest(name, known)}" for name in unknown]

    # pairs whose rank agrees with adapter_config.json
    pairs: dict[str, FactorPair] = {}
    for name, half in halves.items():
        if set(half) != {"A", "B"}:
            faults.append(f"{name} has lora_{next(iter(half))} but no lora_{'B' if 'A' in half else 'A'}")
            continue
        rank, scale = rank_and_scale(config, _pattern_name(config, known, name, half))
        rows = rank * (experts if _fused_site(name, known) else 1)
        matrices = half["A"].dim() == half["B"].dim() == 2
        if not matrices or half["A"].shape[0] != rows or half["B"].shape[1] != rows:
            shapes = f"A {tuple(half['A'].shape)}, B {tuple(half['B'].shape)}"
            faults.append(
                f"{name} has {shapes}, but rank {rank} in adapter_config.json needs {rows} rows in A and"
                " columns in B"
            )
            continue
        pairs[name] = FactorPair(half["A"], half["B"], scale)

    # join the pairs of a site; all that do not fit are one error
    decoded = _assemble(config, pairs, known, faults, always_swapped=swapped(model))
    _with_lengths(config, decoded, lengths, faults)
    if faults:
        raise AdapterError(
            f"{len(faults)} of {len(halves) + len(unknown)} factors of the adapter do not fit this model;"
            f" first: {faults[0]}",
            next=f"load its own base, {config.get('base_model_name_or_path') or 'which it does not name'}",
        )
    return {name: decoded[name] for name in known if name in decoded}


def _of_length(key: str) -> str:
    """The module whose m this tensor is; "" for another tensor."""
    match = MAGNITUDE.match(key)
    return nested.model_name(match["name"]) if match else ""


def _with_lengths(
    config: Mapping[str, Any],
    decoded: Mapping[str, Decoded],
    lengths: Mapping[str, Tensor],
    faults: list[str],
) -> None:
    """Add m to each linear layer of a DoRA adapter; appends to `faults`."""
    wanted = decoded.keys() if config.get("use_dora") else ()
    faults += [f"{name} has a lora_magnitude_vector, but use_dora is false" for name in lengths if not wanted]
    faults += [f"{name} has m and no factors" for name in lengths if wanted and name not in decoded]
    for name in wanted:
        owner = decoded[name].candidate.owner
        if not isinstance(owner, Linear):
            faults.append(f"{name} are experts, which have no DoRA")
        elif name not in lengths:
            faults.append(f"{name} has no lora_magnitude_vector, though use_dora is true")
        elif lengths[name].numel() != owner.out_features:
            faults.append(f"{name} has m {tuple(lengths[name].shape)} for {owner.out_features} rows")
        else:
            decoded[name].state["m"] = lengths[name].flatten()


def _halves(
    tensors: Mapping[str, Tensor], known: Mapping[str, TargetCandidate]
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """(module name -> {"A": …, "B": …}, names that are not LoRA factors of this model)."""
    halves: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        match = KEY.match(key)
        name = nested.model_name(match["name"]) if match else key
        if match and (name in known or _fused_site(name, known) or _expert_site(name, known)):
            halves.setdefault(name, {})[match["half"]] = tensor
        else:
            unknown.append(key)
    return halves, unknown


def _fused_site(name: str, known: Mapping[str, TargetCandidate]) -> str | None:
    """The Experts that a fused name ("….experts" or "….experts.base_layer") belongs to."""
    site = name.removesuffix(".base_layer")
    return site if site in known and not isinstance(known[site].owner, Linear) else None


def _expert_site(name: str, known: Mapping[str, TargetCandidate]) -> str | None:
    match = EXPERT.match(name)
    if match is None or match["site"] not in known:
        return None
    owner = known[match["site"]].owner
    if isinstance(owner, Linear):
        return None
    return match["site"] if int(match["number"]) < owner.num_experts else None


def _pattern_name(
    config: Mapping[str, Any], known: Mapping[str, TargetCandidate], name: str, half: Mapping[str, Tensor]
) -> str:
    """The name that peft matches with rank_pattern: the targeted parameter's, else the module's."""
    targets = config.get("target_parameters") or []
    site = _fused_site(name, known)
    if site is not None:
        return f"{site}.{_fused_projection(config, known, name, half)}"
    parameter = f"{name}.weight"
    return parameter if any(parameter == t or parameter.endswith(f".{t}") for t in targets) else name


def _fused_projection(
    config: Mapping[str, Any], known: Mapping[str, TargetCandidate], name: str, half: Mapping[str, Tensor]
) -> str:
    """The stacked weight that a fused pair adapts: gate_up_proj or down_proj.

    If both are adapted, peft nests two wrappers, and base_layer is gate_up. If one is, the config names it,
    for this layer or for all, or the shapes decide.
    """
    site = name.removesuffix(".base_layer")
    owner = known[site].owner
    assert isinstance(owner, Experts)
    if name != site:
        return owner.first
    named = named_parameters(config, name, owner.first)
    if len(named) == 1:
        return named.pop()
    D, I = owner.hidden_size, owner.before * owner.intermediate_size
    shape = (half["A"].shape[-1], half["B"].shape[0])
    first = shape == (D, I) if owner.before == 1 else {*shape} == {D, I}
    return owner.first if not named and first and owner.intermediate_size != D else "down_proj"


def _assemble(
    config: Mapping[str, Any],
    pairs: Mapping[str, FactorPair],
    known: Mapping[str, TargetCandidate],
    faults: list[str],
    *,
    always_swapped: bool,
) -> dict[str, Decoded]:
    """Pairs -> sites; appends to `faults`. always_swapped: peft swaps this model's experts (names.py)."""
    decoded: dict[str, Decoded] = {}
    by_expert: dict[tuple[str, str], dict[int, FactorPair]] = {}
    turned = always_swapped or _is_swapped(config, pairs, known)
    for name, pair in pairs.items():
        match = EXPERT.match(name)
        if match and _expert_site(name, known):
            by_expert.setdefault((match["site"], match["projection"]), {})[int(match["number"])] = pair
        elif (site := _fused_site(name, known)) is not None:
            target = decoded.setdefault(site, Decoded(known[site]))
            _fused(
                target,
                _fused_projection(config, known, name, {"A": pair.A, "B": pair.B}),
                pair,
                turned,
                faults,
            )
        else:
            owner = known[name].owner
            assert isinstance(owner, Linear)
            if (pair.A.shape[1], pair.B.shape[0]) != (owner.in_features, owner.out_features):
                faults.append(_mismatch(name, pair, owner.in_features, owner.out_features))
                continue
            rank = _used_rank(pair.A, pair.B)
            decoded[name] = Decoded(known[name], {"A": pair.A[:rank], "B": pair.B[:, :rank]}, pair.scale)
    for site in dict.fromkeys(site for site, _ in by_expert):
        decoded[site] = _stacked(known[site], {p: by_expert[s, p] for s, p in by_expert if s == site}, faults)
    if turned and not always_swapped:
        warnings.warn(
            "this adapter has the in and out dimensions of its fused experts swapped, as peft 0.18 wrote"
            " them; they are read accordingly. Saving it again writes today's layout.",
            stacklevel=4,
        )
    return decoded


def _mismatch(name: str, pair: FactorPair, in_features: int, out_features: int) -> str:
    return (
        f"{name} has A {tuple(pair.A.shape)} and B {tuple(pair.B.shape)}, but the layer maps {in_features} ->"
        f" {out_features}"
    )


def _is_swapped(
    config: Mapping[str, Any], pairs: Mapping[str, FactorPair], known: Mapping[str, TargetCandidate]
) -> bool:
    """True if the fused experts' A is (E·r, out) and B (in, r·E), as peft 0.18 wrote them.

    The shapes of square layers are the same either way; then peft_version decides.
    """
    unclear = False
    for name, pair in pairs.items():
        site = _fused_site(name, known)
        if site is None:
            continue
        in_features, out_features = _fused_sizes(
            known[site], _fused_projection(config, known, name, {"A": pair.A, "B": pair.B})
        )
        if in_features != out_features:
            return (pair.A.shape[1], pair.B.shape[0]) == (out_features, in_features)
        unclear = True
    return unclear and str(config.get("peft_version", "")).startswith(("0.17", "0.18"))


def _fused_sizes(candidate: TargetCandidate, projection: str) -> tuple[int, int]:
    owner: Any = candidate.owner
    D, I = owner.hidden_size, owner.intermediate_size
    return (I, D) if projection == "down_proj" else (D, owner.before * I)


def _fused(target: Decoded, projection: str, pair: FactorPair, swapped: bool, faults: list[str]) -> None:
    """A (E·r, in), expert slowest, and B (out, r·E), expert fastest -> [E, r, in] and [E, out, r]."""
    owner: Any = target.candidate.owner
    E = owner.num_experts
    in_features, out_features = _fused_sizes(target.candidate, projection)
    A, B = pair.A.unflatten(0, (E, -1)), pair.B.unflatten(1, (-1, E)).permute(2, 0, 1)
    if swapped:
        A, B = B.transpose(1, 2), A.transpose(1, 2)
    if (A.shape[2], B.shape[1]) != (in_features, out_features):
        faults.append(_mismatch(f"{target.candidate.name}.{projection}", pair, in_features, out_features))
        return
    if projection != "down_proj":
        if owner.before == 2:
            A, B = _split_gate_up(A, torch.cat(owner.activation.split(B, 1), dim=1))
        else:
            rank = _used_rank(A, B)
            A, B = A[:, :rank], B[:, :, :rank]
        target.state.update(gate_up_A=A, gate_up_B=B)
        target.scale = pair.scale
    else:
        rank = _used_rank(A, B)
        target.state.update(down_A=A[:, :rank], down_B=B[:, :, :rank])
        target.down_scale = pair.scale


def _split_gate_up(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """[E, r, D], [E, 2I, r] -> our gate_up_A [E, 2R, D], gate_up_B [E, 2I, R] with the same ΔW.

    Block-diagonal B (gate uses the first half of the rank, up the second, as layouts.py writes it): R = r /
    2. Otherwise gate and up share A (as peft trains it): R = r and A is repeated.
    """
    R, rest = divmod(A.shape[1], 2)
    gate, up = B.chunk(2, dim=1)
    if rest == 0 and not gate[..., R:].any() and not up[..., :R].any():
        return A, torch.cat((gate[..., :R], up[..., R:]), dim=1)
    return torch.cat((A, A), dim=1), B


def _used_rank(A: Tensor, B: Tensor) -> int:
    """The rank without its zero padding (layouts.py): A […, r, in], B [..., out, r].

    This drops trailing rows of A whose columns of B are zero too, for every expert. Such a pair adds nothing,
    and no gradient ever reaches it.
    """
    if A.dim() == 2:
        A, B = A[None], B[None]
    used = (A != 0).any(-1).any(0) | (B != 0).any(1).any(0)
    return int(used.nonzero().max()) + 1 if used.any() else A.shape[-2]


def _stacked(
    candidate: TargetCandidate, by_projection: Mapping[str, Mapping[int, FactorPair]], faults: list[str]
) -> Decoded:
    """Two-dimensional pairs of every expert -> stacked factors."""
    owner: Any = candidate.owner
    result = Decoded(candidate)
    stacked: dict[str, tuple[Tensor, Tensor, float]] = {}
    names: tuple[str, ...] = owner.activation.projections
    if not {*by_projection} <= {*names, "down_proj"} or len({*names} & {*by_projection}) not in (
        0,
        len(names),
    ):
        faults.append(
            f"{candidate.name} has {' and '.join(by_projection)}; {' and '.join(names)} must come together"
        )
        return result
    # per projection: every expert has a pair, all of one shape, rank and scale
    for projection, pairs in by_projection.items():
        in_features, out_features = (owner.intermediate_size, owner.hidden_size)
        if projection != "down_proj":
            in_features, out_features = out_features, in_features
        missing = [e for e in range(owner.num_experts) if e not in pairs]
        faults += [f"{candidate.name}.{e}.{projection} is missing" for e in missing]
        wrong = [
            (e, p) for e, p in pairs.items() if (p.A.shape[1], p.B.shape[0]) != (in_features, out_features)
        ]
        faults += [
            _mismatch(f"{candidate.name}.{e}.{projection}", p, in_features, out_features) for e, p in wrong
        ]
        first = next(iter(pairs.values()))
        mixed = [e for e, p in pairs.items() if (p.A.shape[0], p.scale) != (first.A.shape[0], first.scale)]
        faults += [
            f"{candidate.name}.{e}.{projection} has another rank or scale than the layer's other experts"
            for e in mixed
        ]
        if not missing and not wrong and not mixed:
            ordered = [pairs[e] for e in range(owner.num_experts)]
            stacked[projection] = (
                torch.stack([p.A for p in ordered]),
                torch.stack([p.B for p in ordered]),
                first.scale,
            )
    if all(name in stacked for name in names):
        pairs = [stacked[name] for name in names]
        result.scale = pairs[0][2]
        if len({(A.shape, scale) for A, _, scale in pairs}) > 1:
            faults.append(f"{candidate.name}: {' and '.join(names)} differ in rank or scale")
            return result
        rank = max(_used_rank(A, B) for A, B, _ in pairs)
        result.state.update(
            gate_up_A=torch.cat([A[:, :rank] for A, _, _ in pairs], dim=1),
            gate_up_B=torch.cat([B for _, B, _ in pairs], dim=1)[:, :, :rank],
        )
    if "down_proj" in stacked:
        A, B, result.down_scale = stacked["down_proj"]
        rank = _used_rank(A, B)
        result.state["down_A"], result.state["down_B"] = A[:, :rank], B[:, :, :rank]
    return result
