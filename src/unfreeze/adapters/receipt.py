"""The receipt: proof, from the first optimizer step that has a gradient, that what was asked for learned
(docs/trust.md L4, L5).

    receipt = Receipt(model)       before the step: notes the weights' values, and watches which outputs get
                                   gradients
    taken = receipt.take(probe)    after the update, while the step's gradients are still there
    check(taken)                   raises AdapterError where a trained matrix was left out

A site is one matrix; an expert has three (gate, up, down) in every layer. Its gradient is its own if it
trains itself, else that of its adapter's A and B together. (A's alone is zero at the first step, because B
is.) Weight decay moves every weight, used or not, so movement counts only where there was a gradient.

T tokens, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import sites
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.reach import Reach, Sum
from unfreeze.core.batch import Batch
from unfreeze.core.errors import AdapterError
from unfreeze.models import Decoder
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.models.blocks.memo import Memo
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.layer import Layer
from unfreeze.models.targets import GROUPS, group_of

PROBE_TOKENS = 256  # enough to reach most experts, small enough to cost less than a step
COPY_BYTES = 2**30  # full copies of trained weights up to 1 GiB; beyond, a sample per parameter
SAMPLE = 65536  # elements of a sampled parameter
AMPLIFY = 4096.0  # tells "not connected" from "too small to show in bf16": a connected adapter 4,096 times as strong must show
TINY = 1e-8  # AdamW's epsilon: a gradient below it moves a weight by less than half the learning rate, which may round away
NO_GRADIENT, NOT_MOVED, TOO_SMALL = "no gradient", "not moved", "gradient below 1e-8, no movement"
NAMES_SAID = 4  # exceptions in a message; all of them are in receipt.json
Groups = dict[str, dict[str, Any]]
Gradient = Callable[[str], Tensor | None]


@dataclass
class Snapshot:
    """Where the trained parameters stood: name -> full copy, sample, or None (all zero, as a fresh B is). `full`: names copied whole."""

    kept: dict[str, Tensor | None] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)


@torch.no_grad()
def snapshot(weights: Mapping[str, Tensor], copy_bytes: int = COPY_BYTES) -> Snapshot:
    """Note the values of the named weights. Zero weights cost nothing. Others are copied until `copy_bytes`
    are used up, then sampled."""
    result = Snapshot()
    for name, weight in weights.items():
        if not weight.any():
            result.kept[name] = None
        elif weight.nbytes <= copy_bytes:
            copy_bytes -= weight.nbytes
            result.kept[name] = weight.detach().clone()
            result.full.add(name)
        else:
            result.kept[name] = _sample(weight).clone()
    return result


@dataclass
class Taken:
    """groups: see make_receipt. exceptions: [{group, sites, count, why}], sites that were reached and have no gradient or did not move."""

    groups: Groups = field(default_factory=dict)
    exceptions: list[dict[str, Any]] = field(default_factory=list)


class Receipt:
    """Watches a model from here on, until `take`.

    weights   name -> what the optimizer updates, if that is not the parameter itself: the fp32 master of a
              half precision weight, in which a first movement may round away
    gradient  name -> the last step's gradient; default: the parameter's `grad`
    """

    def __init__(self, model: Decoder, weights: Mapping[str, Tensor] | None = None, gradient: Gradient | None = None):
        parameters = dict(_trained(model))
        self._model, self._weights = model, {**parameters, **(weights or {})}
        self._gradient: Gradient = gradient or (lambda name: parameters[name].grad)
        self._before, self._reach = snapshot(self._weights), Reach(model)

    def pass_over(self) -> None:
        """The last step had no gradient, or no update: it proves nothing, so wait for the next."""
        self._reach.forget()

    def take(self, probe: Batch | None, sum_: Sum | None = None) -> Taken:
        """Measure, then stop watching. sum_: of the processes that share the step's micro-batches."""
        if sum_ is not None:
            self._reach.over_processes(sum_, self._model.device)
        taken = make_receipt(self._model, self._weights, self._gradient, self._before, self._reach, probe)
        self._reach.close()
        self._before = Snapshot()
        return taken


@dataclass
class Site:
    """What is known of a site, or of one projection of all E experts of a layer: tensors [E], or [1]. `name` has a * for the expert."""

    group: str
    name: str
    reached: Tensor
    moved: Tensor
    largest: Tensor  # of its gradient's elements, by absolute value; 0: none


@torch.no_grad()
def make_receipt(
    model: Decoder, weights: Mapping[str, Tensor], gradient: Gradient, before: Snapshot, reach: Reach, probe: Batch | None
) -> Taken:
    """The receipt as plain JSON values; it judges nothing (see `check`). Per group:

    parameters     base weights of the group (logical count: a packed 4-bit weight is one)
    trained        parameters that train (adapter factors, or the weights themselves); 0: frozen
    sites          trained matrices; sites_reached: those whose output had a gradient; sites_moved: those of them that had a gradient and moved
    grad_norm      L2 norm of the step's gradient, before clipping
    moved          L2 norm of the change of the trained parameters where they had a gradient: what weight decay alone moved is not counted
                   (extrapolated from a sample where no copy was affordable)
    experts_reached   experts, over all layers, that had a gradient (routed experts only; `experts`: how many there are)
    output_change  max |Δ logit| over at most 256 tokens with only this group's training in effect against none of it, every token at the same
                   experts in both; None without a probe, or where weights were too large to copy
    rounding       what rounding alone may make of output_change: half a unit in the last place of the computation's dtype, of the largest logit
    connected      False where even 4,096 times the adapter leaves the logits as they are (in bf16 a first step may be too small to show);
                   None where that is not known: no probe, no matrix of the group reached, or weights trained in full
                   whose first step does not show
    """
    groups: Groups = {name: _empty(count) for name, count in _base_parameters(model).items()}
    found: dict[str, Site] = {}
    for name, weight in weights.items():
        entry = groups.setdefault(group_of(name), _empty(0))
        g, delta, share = gradient(name), *_delta(weight, before.kept[name], name in before.full)
        entry["trained"] += weight.numel()
        if g is not None:
            entry["grad_norm"] = math.hypot(entry["grad_norm"], _norm(g))
            if before.kept[name] is not None:  # decay cannot move a zero
                delta = delta * (g if name in before.full else _sample(g)).ne(0)
            entry["moved"] = math.hypot(entry["moved"], math.sqrt(float(delta.double().square().sum()) / share))
        for site, owner, part in _parts(name, weight if g is None else g):
            if site not in found:
                none = torch.zeros(len(part), device=weight.device)
                reached = reach.of(owner, len(part), weight.device, bias=site.endswith(".bias"))
                found[site] = Site(group_of(name), site, reached, none > 0, none)
            if g is not None:
                found[site].largest = torch.maximum(found[site].largest, part.flatten(1).abs().amax(1).float())
        for site, _, part in _parts(name, delta) if g is not None else ():
            found[site].moved = found[site].moved | part.flatten(1).ne(0).any(1)
    for site in found.values():
        _without_silent(site, model, before)
        entry = groups[site.group]
        for field_, mask in (("sites", torch.ones_like(site.reached)), ("sites_reached", site.reached), ("sites_moved", site.reached & site.moved)):
            entry[field_] += int(mask.sum())
    experts: dict[str, Tensor] = {}
    for site in (site for site in found.values() if site.group == "experts"):
        layer, had = site.name.split(".*.")[0], site.largest > 0
        experts[layer] = experts[layer] | had if layer in experts else had
    if experts:
        groups["experts"].update(experts=sum(m.numel() for m in experts.values()), experts_reached=sum(int(m.sum()) for m in experts.values()))
    trained_groups = sorted({site.group for site in found.values()})
    if probe is not None and trained_groups:
        for group, change in _output_changes(model, before, trained_groups, first_tokens(probe)).items():
            groups[group].update(change)
            if not groups[group]["sites_reached"]:  # no gradient was due, so nothing could move
                groups[group]["connected"] = None
    ordered = {name: groups[name] for name in GROUPS if name in groups}
    return Taken(ordered, [exception for name in ordered for site in found.values() if site.group == name for exception in _exceptions(site)])


def _parts(name: str, weight: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """(site, module whose output it makes, its numbers [E, …] or [1, …]) of a trained parameter; of stacked experts gate and up apart."""
    where = name.split(".adapter.")[0]
    if group_of(name) != "experts":
        yield where.removesuffix(".weight"), where.removesuffix(".weight").removesuffix(".bias"), weight[None]
        return
    experts, projection = f"{name.split('.experts.')[0]}.experts", name.split(".experts.")[1]
    if "gate_up" in projection:
        for part, half in zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True):
            yield f"{experts}.*.{part}", experts, half
    else:
        yield f"{experts}.*.down_proj", experts, weight


def _without_silent(site: Site, model: Decoder, before: Snapshot) -> None:
    """Leave out experts of which another matrix is all zero (pruned): each of the three gets its gradient through
    the other two, so none was due."""
    missing = site.reached & (site.largest == 0)
    if site.group != "experts" or not missing.any():
        return
    name, own = site.name.split(".*.")
    experts = model.get_submodule(name)
    assert isinstance(experts, Experts)
    others = [part for part in ("gate_proj", "up_proj", "down_proj") if part != own]
    for e in missing.nonzero().flatten().tolist():
        if any(_all_zero(experts, name, part, e, before) for part in others):
            site.reached[e] = False


def _all_zero(experts: Experts, name: str, part: str, e: int, before: Snapshot) -> bool:
    """Whether `part` of expert `e` was zero before the step: its weight, and the adapter's part beside it."""
    stack = "down" if part == "down_proj" else "gate_up"
    if before.kept.get(f"{name}.adapter.{stack}_B") is not None:
        return False
    trained, held = f"{name}.{stack}_proj.weight", getattr(experts, f"{stack}_proj").value()
    if trained in before.kept:
        kept = before.kept[trained]
        if kept is None:
            return True
        weight = kept[e]
    else:
        weight = held[e] if isinstance(held, Tensor) else held[e].dequantize()
    if stack == "gate_up":
        weight = weight.chunk(2)[0 if part == "gate_proj" else 1]
    return not bool(weight.any())


def _exceptions(site: Site) -> Iterator[dict[str, Any]]:
    """The site's entries in the list of exceptions, experts as ranges: "model.layers.1.mlp.experts.0-7,12.down_proj"."""
    stood = site.reached & ~site.moved
    kinds = {
        NO_GRADIENT: stood & (site.largest == 0),
        NOT_MOVED: stood & (site.largest >= TINY),
        TOO_SMALL: stood & (site.largest > 0) & (site.largest < TINY),
    }
    for why, mask in kinds.items():
        if mask.any():
            name = site.name.replace("*", _ranges(mask.nonzero().flatten().tolist()))
            yield {"group": site.group, "sites": name, "count": int(mask.sum()), "why": why}


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    pieces: list[list[int]] = []
    for number in numbers:
        if pieces and pieces[-1][1] == number - 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)


def check(taken: Taken) -> None:
    """Raise AdapterError for trained matrices without gradient though their output had one, without movement, or without effect."""
    for name, entry in taken.groups.items():
        if entry["trained"] and not math.isfinite(entry["grad_norm"]):
            raise AdapterError(
                f"{_facts(name, entry)}: the gradient is not finite", next="look at the batch's rows, or try --learning-rate lower"
            )
    for why, next_ in (
        (NO_GRADIENT, "report it with the model's config.json; all names stand in receipt.json"),
        (NOT_MOVED, "check --learning-rate and the warm-up; all names stand in receipt.json"),
    ):
        if line := _stood(taken, why):
            raise AdapterError(line, next=next_)
    for name, entry in taken.groups.items():
        if entry["connected"] is False:
            raise AdapterError(
                f"{_facts(name, entry)}, but the output is the same with and without it. Likely cause: the forward pass bypasses these adapters "
                "(a packed or fused path that does not know them)",
                next="report it with the model's config.json; --lora.targets without this group trains the rest",
            )


CAUSES = {
    NO_GRADIENT: "got no gradient, though their output had one. Likely cause: a forward or backward pass that leaves these weights out",
    NOT_MOVED: "had a gradient and did not move (weight decay aside). Likely causes: learning rate 0 at this step (warm-up), or missing "
    "from the optimizer",
}


def _stood(taken: Taken, why: str) -> str:
    """One sentence on all sites of a kind: per group how many of how many, then the first names."""
    found = [exception for exception in taken.exceptions if exception["why"] == why]
    if not found:
        return ""
    counts: dict[str, int] = {}
    for exception in found:
        counts[exception["group"]] = counts.get(exception["group"], 0) + exception["count"]
    groups = ", ".join(f"{name}: {count:,} of {taken.groups[name]['sites_reached']:,} matrices" for name, count in counts.items())
    names = ", ".join(exception["sites"] for exception in found[:NAMES_SAID])
    more = f" and {len(found) - NAMES_SAID} more entries" if len(found) > NAMES_SAID else ""
    return f"{groups} {CAUSES[why]}. They are {names}{more}"


def _facts(name: str, entry: Mapping[str, Any]) -> str:
    return f"{name}: {entry['trained']:,} trained parameters, gradient norm {entry['grad_norm']:.3g}, moved {entry['moved']:.3g}"


def first_tokens(batch: Batch, count: int = PROBE_TOKENS) -> Batch:
    """The first `count` tokens of a packed batch; the document at the end may be cut."""
    return Batch(
        tokens_T=batch.tokens_T[:count],
        targets_T=batch.targets_T[:count],
        weights_T=batch.weights_T[:count],
        positions_T=batch.positions_T[:count],
        starts_S=batch.starts_S[batch.starts_S < count],
    )


def _empty(parameters: int) -> dict[str, Any]:
    return {
        "parameters": parameters, "trained": 0, "sites": 0, "sites_reached": 0, "sites_moved": 0, "grad_norm": 0.0, "moved": 0.0,
        "output_change": None, "rounding": None, "connected": None,
    }  # fmt: skip


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _base_parameters(model: nn.Module) -> dict[str, int]:
    """group -> weights of the model without adapters; shared (tied) ones once, packed ones by their logical shape."""
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():  # named_parameters lists a tied parameter once
        if ".adapter." not in name:
            counts[group_of(name)] = counts.get(group_of(name), 0) + parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, PackedHolder) and module.codec is not None:
            counts[group_of(name)] = counts.get(group_of(name), 0) + module.packed.shape.numel()
    return counts


def _sample(weight: Tensor) -> Tensor:
    """About SAMPLE elements, evenly spaced and at least one per row: every matrix of a stack and every row of
    an embedding is looked at."""
    width = weight.shape[-1]
    return weight.detach()[..., :: max(1, min(width, weight.numel() // SAMPLE))]


def _delta(weight: Tensor, kept: Tensor | None, full: bool) -> tuple[Tensor, float]:
    """(change, share of the weight's elements that the change covers)."""
    if kept is None:
        return weight.detach(), 1.0
    now = weight.detach() if full else _sample(weight)
    return now - kept, kept.numel() / weight.numel()


def _norm(gradient: Tensor) -> float:
    return float(gradient.detach().float().norm().double())


def _output_changes(model: Decoder, before: Snapshot, groups: list[str], probe: Batch) -> Groups:
    """group -> {output_change, connected}: logits with only this group's training in effect against none of it."""
    adapted = {site.group for site in sites(model)}
    copied = {g for g in groups if all(n in before.full or before.kept[n] is None for n, _ in _trained(model) if group_of(n) == g)} - adapted
    probe = probe.to(model.device)

    through = _SameExperts()

    def logits(group: str, amplify: float = 1.0) -> Tensor:
        with _only(model, before, group, copied, amplify):
            return model.logits(model.hidden(probe, through))

    result: Groups = {}
    with model.looking():
        nothing_TV = logits("")
        rounding = nothing_TV.abs().max().item() * torch.finfo(model.model.embed_tokens.weight.dtype).eps / 2
        for group in (g for g in groups if g in adapted or g in copied):
            change = (logits(group) - nothing_TV).abs().max().item()
            connected: bool | None = change > 0
            if not connected:  # a weight trained in full can't be amplified, and in bf16 a first step may round away in it: nothing is known
                connected = (logits(group, AMPLIFY) - nothing_TV).abs().max().item() > 0 if group in adapted else None
            result[group] = {"output_change": change, "rounding": rounding, "connected": connected}
    return result


class _SameExperts:
    """A way through the layers that sends every token to the experts it had in the first pass.

    In bf16 nearly any change of earlier weights changes some router's choice, and another expert changes the
    output more than a first step does (2.6 against 0.04 on tiny-k2).
    """

    def __init__(self) -> None:
        self._chosen: dict[Layer, list[Any]] = {}

    def __call__(self, layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
        memo = Memo(dear=False)
        memo.second, memo.values = layer in self._chosen, list(self._chosen.get(layer, ()))
        with run.visiting(memo):
            y_TD = layer(x_TD, run)
        if not memo.second:
            self._chosen[layer] = memo.values
        return y_TD


@contextmanager
def _only(model: Decoder, before: Snapshot, group: str, copied: set[str], amplify: float) -> Iterator[None]:
    """Within it only `group`'s training is in effect. Other adapters get scale 0 instead of being removed:
    the same kernels run in both arms, so a difference comes from the adapter alone. Weights trained in full
    are exchanged with their copies."""
    adapters = [(site.adapter, site.group) for site in sites(model)]
    scales = [(adapter.scale, getattr(adapter, "down_scale", 0.0)) for adapter, _ in adapters]
    exchanged = [(n, p) for n, p in _trained(model) if group_of(n) in copied and group_of(n) != group]
    try:
        for (adapter, own), (scale, down_scale) in zip(adapters, scales, strict=True):
            factor = amplify if own == group else 0.0
            _set_scale(adapter, scale * factor, down_scale * factor)
        _exchange(exchanged, before)
        yield
    finally:
        _exchange(exchanged, before)
        for (adapter, _), (scale, down_scale) in zip(adapters, scales, strict=True):
            _set_scale(adapter, scale, down_scale)


def _set_scale(adapter: LowRank | ExpertLowRank, scale: float, down_scale: float) -> None:
    adapter.scale = scale
    if isinstance(adapter, ExpertLowRank):
        adapter.down_scale = down_scale


def _exchange(parameters: list[tuple[str, nn.Parameter]], before: Snapshot) -> None:
    """Swap each parameter's memory with its copy; twice is the identity."""
    for name, parameter in parameters:
        kept = before.kept[name]
        before.kept[name] = parameter.data
        parameter.data = torch.zeros_like(parameter.data) if kept is None else kept.to(parameter.dtype)
