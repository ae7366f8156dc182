"""Adapters on disk, the reading side: either layout of layouts.py, adapters made by peft itself, and peft 0.18's swapped dimensions.

Everything is decoded and checked before the model is touched: an adapter is loaded whole or not at all.

E experts, D model width, I expert width, R rank of gate and of up, r rank of a fused pair.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from unfreeze.adapters.attach import Site, sites
from unfreeze.adapters.layouts import CONFIG, PREFIX, WEIGHTS
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.checkpoint.manifest import conversion, inside
from unfreeze.core.errors import AdapterError, nearest
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.targets import Candidate, candidates
from unfreeze.untrusted.json_object import read_object
from unfreeze.untrusted.pattern import pattern

KEY = re.compile(r"(?P<name>.+)\.lora_(?P<half>[AB])(\.default)?(\.weight)?$")
EXPERT = re.compile(r"(?P<site>.+\.experts)\.(?P<number>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)$")
AGAIN = "get the adapter again from its publisher, or export it again: unfreeze export RUN"
REFUSED = {"use_dora": False, "lora_bias": False, "fan_in_fan_out": False, "modules_to_save": None, "trainable_token_indices": None}


@dataclass(frozen=True)
class Pair:
    """The two tensors of one name in the file, and their scale by adapter_config.json."""

    A: Tensor
    B: Tensor
    scale: float


@dataclass
class Decoded:
    """What one site of the model gets: the adapter's parameters by name, its ranks and scales."""

    candidate: Candidate
    state: dict[str, Tensor] = field(default_factory=dict)
    scale: float = 0.0
    down_scale: float = 0.0


def load_adapter(model: nn.Module, directory: str | Path) -> list[Site]:
    """Put the adapter of a folder on the model; float32 whatever the file's dtype. -> the sites.

    A model without adapters gets them (base frozen, factors trainable); one that has them must have the same sites, ranks and scales, and its
    factors are overwritten in place (so an optimizer keeps its references).
    Raises AdapterError: folder or field missing, another adapter type, unknown, missing or mismatched tensors (counted, the first named).
    Warns where the file has the swapped dimensions of peft 0.18.
    """
    config, tensors = read_files(Path(directory))
    decoded = decode(model, config, tensors)
    present = {site.name: site.adapter for site in sites(model)}
    if present:
        _check_same(decoded, present, Path(directory))
    else:
        model.requires_grad_(False)
        for name, site in decoded.items():
            present[name] = site.candidate.owner.adapter = _shell(site)
    with torch.no_grad():
        for name, site in decoded.items():
            for parameter, value in site.state.items():
                getattr(present[name], parameter).copy_(value)
    return sites(model)


def read_files(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(adapter_config.json, tensors by name without PEFT's prefix) of a folder; AdapterError where something is missing or of another kind."""
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            _refuse_pickle(directory, name)
            next_command = "give the folder that holds adapter_config.json and adapter_model.safetensors"
            raise AdapterError(f"{directory} has no {name}", next=next_command)
    config = read_object(inside(directory / CONFIG), AdapterError)
    try:
        tensors = load_file(inside(directory / WEIGHTS))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:  # ValueError, RuntimeError: sizes that torch cannot count
        raise AdapterError(f"{directory}: damaged file: {error}", next="get the adapter again from its publisher") from error
    check_config(config, directory / CONFIG)
    faults = [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    faults += [f"{name} holds NaN or infinity" for name, tensor in tensors.items() if tensor.is_floating_point() and not _finite(tensor)]
    if faults:
        raise AdapterError(f"{directory / WEIGHTS}: {len(faults)} of {len(tensors)} tensors are not finite floats; first: {faults[0]}", next=AGAIN)
    return config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _refuse_pickle(directory: Path, name: str) -> None:
    """An adapter saved as adapter_model.bin is refused with the command that converts it."""
    pickle = directory / "adapter_model.bin"
    if name == WEIGHTS and pickle.is_file():
        raise AdapterError(
            f"{directory} has no {name}, only {pickle.name}, a pickle: unpickling can run any code, so it is not read",
            next=conversion(directory, pickle.name, WEIGHTS),
        )


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.float().isfinite().all())


def check_config(config: Mapping[str, Any], path: Path) -> None:
    """adapter_config.json: plain LoRA, and every field of its type. Raises AdapterError naming the first that isn't."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config.get('peft_type')!r}; only 'LORA' can be loaded")
    for name, plain in REFUSED.items():
        if config.get(name) not in (plain, None, False, []):
            raise AdapterError(f"{path}: {name} = {config[name]!r} is not built; only plain LoRA is")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias = {config['bias']!r} is not built; built: 'none'")
    for name, table, kind in (("r", "rank_pattern", _is_rank), ("lora_alpha", "alpha_pattern", _is_alpha)):
        patterns = config.get(table) or {}
        if not isinstance(patterns, dict):
            raise AdapterError(f"{path}: {table} is a {type(patterns).__name__}, not an object", next=AGAIN)
        for key, value in {name: config.get(name), **patterns}.items():
            if not kind(value):
                what = "a whole number from 1 to 65,536" if kind is _is_rank else "a positive number, at most 1e9"
                raise AdapterError(f"{path}: {key} is {value!r:.60}; it must be {what}", next=AGAIN)
        for key in patterns:
            pattern(key, f"{path}: {table}", AdapterError)
    if not isinstance(config.get("use_rslora"), bool | None):
        raise AdapterError(f"{path}: use_rslora is {config['use_rslora']!r:.60}; it must be true or false", next=AGAIN)
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise AdapterError(f"{path}: target_parameters is not a list of names", next=AGAIN)


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= 65_536


def _is_alpha(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e9  # type: ignore[operator]


def rank_and_scale(config: Mapping[str, Any], name: str) -> tuple[int, float]:
    """peft's rule: the first pattern that matches the end of `name`, else r and lora_alpha; scale alpha / r, or alpha / sqrt(r) with use_rslora."""

    def lookup(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", name)), default)

    rank, alpha = lookup(config.get("rank_pattern"), config["r"]), lookup(config.get("alpha_pattern"), config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def decode(model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Decoded]:
    """site name -> its factors in our form. Raises one AdapterError for everything that does not fit."""
    known = {c.name: c for c in candidates(model)}
    halves, unknown = _halves(tensors, known)
    experts = max((c.owner.num_experts for c in known.values() if not isinstance(c.owner, Linear)), default=1)
    faults = [f"{name} is unknown{nearest(name, known)}" for name in unknown]
    pairs: dict[str, Pair] = {}
    for name, half in halves.items():
        if set(half) != {"A", "B"}:
            faults.append(f"{name} has lora_{next(iter(half))} but no lora_{'B' if 'A' in half else 'A'}")
            continue
        rank, scale = rank_and_scale(config, _pattern_name(config, known, name, half))
        rows = rank * (experts if _fused_site(name, known) else 1)
        if half["A"].dim() != 2 or half["B"].dim() != 2 or half["A"].shape[0] != rows or half["B"].shape[1] != rows:
            shapes = f"A {tuple(half['A'].shape)}, B {tuple(half['B'].shape)}"
            faults.append(f"{name} has {shapes}, but rank {rank} by adapter_config.json asks for {rows} rows in A and columns in B")
            continue
        pairs[name] = Pair(half["A"], half["B"], scale)
    decoded = _assemble(config, pairs, known, faults)
    if faults:
        raise AdapterError(
            f"{len(faults)} of {len(halves) + len(unknown)} factors of the adapter do not fit this model; first: {faults[0]}",
            next="check that the adapter was trained on this model (base_model_name_or_path in adapter_config.json: "
            f"{config.get('base_model_name_or_path')!r})",
        )
    return {name: decoded[name] for name in known if name in decoded}


def _halves(tensors: Mapping[str, Tensor], known: Mapping[str, Candidate]) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """(module name -> {"A": …, "B": …}, names that are not LoRA factors of this model)."""
    halves: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key, tensor in tensors.items():
        match = KEY.match(key)
        name = match["name"].removeprefix("language_model.") if match else key
        if match and (name in known or _fused_site(name, known) or _expert_site(name, known)):
            halves.setdefault(name, {})[match["half"]] = tensor
        else:
            unknown.append(key)
    return halves, unknown


def _fused_site(name: str, known: Mapping[str, Candidate]) -> str | None:
    """The Experts that a fused name ("….experts" or "….experts.base_layer") belongs to."""
    site = name.removesuffix(".base_layer")
    return site if site in known and not isinstance(known[site].owner, Linear) else None


def _expert_site(name: str, known: Mapping[str, Candidate]) -> str | None:
    match = EXPERT.match(name)
    return match["site"] if match and match["site"] in known and int(match["number"]) < known[match["site"]].owner.num_experts else None  # type: ignore[union-attr]


def _pattern_name(config: Mapping[str, Any], known: Mapping[str, Candidate], name: str, half: Mapping[str, Tensor]) -> str:
    """The name peft's patterns are matched with: the parameter's where a parameter is targeted, else the module's."""
    targets = config.get("target_parameters") or []
    site = _fused_site(name, known)
    if site is not None:
        return f"{site}.{_fused_projection(config, known, name, half)}"
    parameter = f"{name}.weight"
    return parameter if any(parameter == t or parameter.endswith(f".{t}") for t in targets) else name


def _fused_projection(config: Mapping[str, Any], known: Mapping[str, Candidate], name: str, half: Mapping[str, Tensor]) -> str:
    """gate_up_proj or down_proj. With both adapted, peft nests: base_layer is gate_up. With one, the config or the shapes tell."""
    if name.endswith(".base_layer"):
        return "gate_up_proj"
    named = {p for p in ("gate_up_proj", "down_proj") for t in config.get("target_parameters") or [] if t.endswith("." + p) or t == p}
    if len(named) == 1:
        return named.pop()
    owner: Any = known[name].owner
    D, I = owner.hidden_size, owner.intermediate_size
    widths = {half["A"].shape[-1], half["B"].shape[0]}
    return "gate_up_proj" if not named and widths == {D, 2 * I} and I != D else "down_proj"


def _assemble(
    config: Mapping[str, Any], pairs: Mapping[str, Pair], known: Mapping[str, Candidate], faults: list[str]
) -> dict[str, Decoded]:
    """Pairs -> sites; appends to `faults`."""
    decoded: dict[str, Decoded] = {}
    by_expert: dict[tuple[str, str], dict[int, Pair]] = {}
    swapped = _is_swapped(config, pairs, known)
    for name, pair in pairs.items():
        match = EXPERT.match(name)
        if match and _expert_site(name, known):
            by_expert.setdefault((match["site"], match["projection"]), {})[int(match["number"])] = pair
        elif (site := _fused_site(name, known)) is not None:
            target = decoded.setdefault(site, Decoded(known[site]))
            _fused(target, _fused_projection(config, known, name, {"A": pair.A, "B": pair.B}), pair, swapped, faults)
        else:
            owner = known[name].owner
            assert isinstance(owner, Linear)
            if (pair.A.shape[1], pair.B.shape[0]) != (owner.in_features, owner.out_features):
                faults.append(_mismatch(name, pair, owner.in_features, owner.out_features))
                continue
            decoded[name] = Decoded(known[name], {"A": pair.A, "B": pair.B}, pair.scale)
    for site in dict.fromkeys(site for site, _ in by_expert):
        decoded[site] = _stacked(known[site], {p: by_expert[s, p] for s, p in by_expert if s == site}, faults)
    if swapped:
        warnings.warn(
            "this adapter has the in and out dimensions of its fused experts swapped, as peft 0.18 wrote them; they are read accordingly. "
            "Saving it again writes today's layout.",
            stacklevel=4,
        )
    return decoded


def _mismatch(name: str, pair: Pair, in_features: int, out_features: int) -> str:
    return f"{name} has A {tuple(pair.A.shape)} and B {tuple(pair.B.shape)}, but the layer maps {in_features} -> {out_features}"


def _is_swapped(config: Mapping[str, Any], pairs: Mapping[str, Pair], known: Mapping[str, Candidate]) -> bool:
    """Are the fused experts' A (E·r, out) and B (in, r·E), as peft 0.18 wrote them? Square layers cannot tell; then peft_version does."""
    unclear = False
    for name, pair in pairs.items():
        site = _fused_site(name, known)
        if site is None:
            continue
        in_features, out_features = _fused_sizes(known[site], _fused_projection(config, known, name, {"A": pair.A, "B": pair.B}))
        if in_features != out_features:
            return (pair.A.shape[1], pair.B.shape[0]) == (out_features, in_features)
        unclear = True
    return unclear and str(config.get("peft_version", "")).startswith(("0.17", "0.18"))


def _fused_sizes(candidate: Candidate, projection: str) -> tuple[int, int]:
    owner: Any = candidate.owner
    D, I = owner.hidden_size, owner.intermediate_size
    return (D, 2 * I) if projection == "gate_up_proj" else (I, D)


def _fused(target: Decoded, projection: str, pair: Pair, swapped: bool, faults: list[str]) -> None:
    """A (E·r, in) with the expert slowest, B (out, r·E) with the expert fastest -> [E, r, in] and [E, out, r]."""
    owner: Any = target.candidate.owner
    E = owner.num_experts
    in_features, out_features = _fused_sizes(target.candidate, projection)
    A, B = pair.A.unflatten(0, (E, -1)), pair.B.unflatten(1, (-1, E)).permute(2, 0, 1)
    if swapped:
        A, B = B.transpose(1, 2), A.transpose(1, 2)
    if (A.shape[2], B.shape[1]) != (in_features, out_features):
        faults.append(_mismatch(f"{target.candidate.name}.{projection}", pair, in_features, out_features))
        return
    if projection == "gate_up_proj":
        A, B = _split_gate_up(A, B)
        target.state.update(gate_up_A=A, gate_up_B=B)
        target.scale = pair.scale
    else:
        A, B = _trim(A, B)
        target.state.update(down_A=A, down_B=B)
        target.down_scale = pair.scale


def _split_gate_up(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """[E, r, D], [E, 2I, r] -> our gate_up_A [E, 2R, D], gate_up_B [E, 2I, R] with the same ΔW.

    Block-diagonal B (gate uses the first half of the rank, up the second; what layouts.py writes): R = r / 2.
    Otherwise gate and up share A (what peft trains): R = r and A stands twice.
    """
    R, rest = divmod(A.shape[1], 2)
    gate, up = B.chunk(2, dim=1)
    if rest == 0 and not gate[..., R:].any() and not up[..., :R].any():
        return A, torch.cat((gate[..., :R], up[..., R:]), dim=1)
    return torch.cat((A, A), dim=1), B


def _trim(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the rank's zero padding: trailing rows of A and columns of B that are zero for every expert (layouts._padded)."""
    used = (A != 0).any(-1).any(0) | (B != 0).any(1).any(0)
    rank = int(used.nonzero().max()) + 1 if used.any() else A.shape[1]
    return A[:, :rank], B[:, :, :rank]


def _stacked(candidate: Candidate, found: Mapping[str, Mapping[int, Pair]], faults: list[str]) -> Decoded:
    """Two-dimensional pairs of every expert -> stacked factors."""
    owner: Any = candidate.owner
    result = Decoded(candidate)
    stacked: dict[str, tuple[Tensor, Tensor, float]] = {}
    if ("gate_proj" in found) != ("up_proj" in found):
        faults.append(f"{candidate.name} has {' and '.join(found)}; gate_proj and up_proj must come together")
        return result
    for projection, pairs in found.items():
        in_features, out_features = (owner.intermediate_size, owner.hidden_size)
        if projection != "down_proj":
            in_features, out_features = out_features, in_features
        missing = [e for e in range(owner.num_experts) if e not in pairs]
        faults += [f"{candidate.name}.{e}.{projection} is missing" for e in missing]
        wrong = [(e, p) for e, p in pairs.items() if (p.A.shape[1], p.B.shape[0]) != (in_features, out_features)]
        faults += [_mismatch(f"{candidate.name}.{e}.{projection}", p, in_features, out_features) for e, p in wrong]
        first = next(iter(pairs.values()))
        mixed = [e for e, p in pairs.items() if (p.A.shape[0], p.scale) != (first.A.shape[0], first.scale)]
        faults += [f"{candidate.name}.{e}.{projection} has another rank or scale than the layer's other experts" for e in mixed]
        if not missing and not wrong and not mixed:
            ordered = [pairs[e] for e in range(owner.num_experts)]
            stacked[projection] = (torch.stack([p.A for p in ordered]), torch.stack([p.B for p in ordered]), first.scale)
    if "gate_proj" in stacked and "up_proj" in stacked:
        (gate_A, gate_B, result.scale), (up_A, up_B, up_scale) = stacked["gate_proj"], stacked["up_proj"]
        if (gate_A.shape, result.scale) != (up_A.shape, up_scale):
            faults.append(f"{candidate.name}: gate_proj and up_proj differ in rank or scale")
            return result
        result.state.update(gate_up_A=torch.cat((gate_A, up_A), dim=1), gate_up_B=torch.cat((gate_B, up_B), dim=1))
    if "down_proj" in stacked:
        result.state["down_A"], result.state["down_B"], result.down_scale = stacked["down_proj"]
    return result


def _shell(site: Decoded) -> LowRank | ExpertLowRank:
    """An adapter module of the decoded shapes, trainable, on the base's device (the host where the base is on meta)."""
    owner, state = site.candidate.owner, site.state
    tensor = next((t for t in (*owner.parameters(), *owner.buffers())), torch.empty(0))
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    if isinstance(owner, Linear):
        return LowRank(owner.in_features, owner.out_features, state["A"].shape[0], site.scale, device)
    return ExpertLowRank(
        owner.num_experts,
        owner.hidden_size,
        owner.intermediate_size,
        gate_up_rank=state["gate_up_B"].shape[2] if "gate_up_B" in state else None,
        down_rank=state["down_B"].shape[2] if "down_B" in state else None,
        scale=site.scale,
        down_scale=site.down_scale,
        device=device,
    )


def _check_same(decoded: Mapping[str, Decoded], present: Mapping[str, LowRank | ExpertLowRank], directory: Path) -> None:
    """The attached adapters must be the file's: same sites, shapes and scales."""
    faults = [f"{name} is in the file and not attached" for name in decoded if name not in present]
    faults += [f"{name} is attached and not in the file" for name in present if name not in decoded]
    for name in decoded.keys() & present.keys():
        adapter, site = present[name], decoded[name]
        have = {key: tuple(p.shape) for key, p in adapter.named_parameters()}
        want = {key: tuple(t.shape) for key, t in site.state.items()}
        if have != want:
            faults.append(f"{name} is attached with {have} and the file has {want}")
        scales = [(adapter.scale, site.scale)] if isinstance(adapter, LowRank) or adapter.gate_up_A is not None else []
        scales += [(adapter.down_scale, site.down_scale)] if isinstance(adapter, ExpertLowRank) and adapter.down_A is not None else []
        faults += [f"{name} is attached with scale {a:g} and the file has {b:g}" for a, b in scales if not math.isclose(a, b, rel_tol=1e-9)]
    if faults:
        raise AdapterError(
            f"{directory}: {len(faults)} differences between the adapter attached and the one in the file; first: {faults[0]}",
            next="use the run's own lora settings (rank, alpha, targets), or load the adapter on a model that has none",
        )
