"""The receipt: after the first optimizer step, proof that what was asked for learned (DESIGN promise 2, FAILURES L4 and L5).

    receipt = Receipt(model)            before the first step: notes where the weights stand
    receipt.after_backward(model)       gradients complete (accumulated over micro-batches) and not yet zeroed; before or after the update
    groups = receipt.after_update(model, batch)      after optimizer.step(); raises AdapterError where a trained group stood still

Clipping multiplies every gradient by one number, so a caller that comes after it divides grad_norm by that, as sft does.
Weight decay moves every weight, used or not: what reached an expert is read from gradients, and movement counts only where a gradient was.

group -> {parameters, trained, sites, sites_moved, grad_norm, moved, output_change, rounding, connected} and, for experts, {experts, experts_reached}.

T tokens, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import GROUPS, group_of, sites
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.core.batch import Batch
from unfreeze.core.errors import AdapterError
from unfreeze.models import Decoder
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.models.blocks.passes import Memo, PackedPass
from unfreeze.models.decoder import Layer

PROBE_TOKENS = 256  # enough to reach most experts, small enough to cost less than a step
COPY_BYTES = 2**30  # full copies of trained weights up to 1 GiB; beyond, a sample per parameter
SAMPLE = 65536  # elements of a sampled parameter
AMPLIFY = 4096.0  # tells "not connected" from "too small to show in bf16": a connected adapter 4,096 times as strong must show
Groups = dict[str, dict[str, Any]]


@dataclass
class Snapshot:
    """Where the trained parameters stood: name -> full copy, sample, or None (all zero, as a fresh B is). `full`: names copied whole."""

    kept: dict[str, Tensor | None] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)


@torch.no_grad()
def snapshot(model: nn.Module, copy_bytes: int = COPY_BYTES) -> Snapshot:
    """Note where every trainable parameter stands. Zero ones cost nothing; the others a copy while `copy_bytes` last, then a sample."""
    result = Snapshot()
    for name, parameter in _trained(model):
        if not parameter.any():
            result.kept[name] = None
        elif parameter.nbytes <= copy_bytes:
            copy_bytes -= parameter.nbytes
            result.kept[name] = parameter.detach().clone()
            result.full.add(name)
        else:
            result.kept[name] = _sample(parameter).clone()
    return result


@dataclass
class Gradients:
    """What one step's gradients say. norms: group -> L2 norm. reached_E: layer ("model.layers.3.mlp") -> which experts had a gradient.
    where: name -> which elements had one, laid out as Snapshot.kept; absent for a parameter that was all zero, which decay cannot move.
    """

    norms: dict[str, float] = field(default_factory=dict)
    reached_E: dict[str, Tensor] = field(default_factory=dict)
    where: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def read_gradients(model: nn.Module, before: Snapshot) -> Gradients:
    """Norms, experts reached and touched elements from the gradients that lie there now (a missing gradient counts as 0)."""
    squares: dict[str, Tensor] = {}
    found = Gradients()
    for name, parameter in _trained(model):
        group, gradient = group_of(name), parameter.grad
        square = parameter.new_zeros((), dtype=torch.float64) if gradient is None else gradient.float().norm().double() ** 2
        squares[group] = squares[group] + square if group in squares else square
        kept = before.kept[name]
        if kept is not None:
            here = None if gradient is None else (gradient if name in before.full else _sample(gradient))
            found.where[name] = torch.zeros_like(kept, dtype=torch.bool) if here is None else here.ne(0)
        if group == "experts":
            layer = _site(name).split(".experts")[0]
            reached_E = parameter.new_zeros(len(parameter), dtype=torch.bool) if gradient is None else gradient.flatten(1).ne(0).any(1)
            found.reached_E[layer] = found.reached_E[layer] | reached_E if layer in found.reached_E else reached_E
    found.norms = {group: math.sqrt(square.item()) for group, square in squares.items()}
    return found


class Receipt:
    """The receipt of one step, taken by what looks at a finished step (an on_step of train.fit); `groups` holds the result afterwards."""

    def __init__(self, model: Decoder):
        self._before = snapshot(model)
        self._gradients = Gradients()
        self.groups: Groups = {}

    def after_backward(self, model: Decoder) -> None:
        """Read the gradients: once, when accumulation is complete and before they are zeroed."""
        self._gradients = read_gradients(model, self._before)

    def after_update(self, model: Decoder, batch: Batch | None) -> Groups:
        """Measure, forget the snapshot, check. Raises AdapterError (see `check`)."""
        self.groups = make_receipt(model, self._before, self._gradients, batch)
        self._before = Snapshot()
        check(self.groups)
        return self.groups


@torch.no_grad()
def make_receipt(model: Decoder, before: Snapshot, gradients: Gradients, probe: Batch | None) -> Groups:
    """The receipt as plain JSON values; it judges nothing (see `check`).

    parameters     base weights of the group (logical count: a packed 4-bit weight is one)
    trained        parameters that train (adapter factors, or the weights themselves); 0: frozen
    sites          adapters (or trained tensors) in the group, and how many of them moved
    grad_norm      L2 norm of the gradient that `gradients` saw
    moved          L2 norm of the change of the trained parameters where they had a gradient: what weight decay alone moved is not counted
                   (extrapolated from a sample where no copy was affordable)
    experts_reached   experts, over all layers, that had a gradient (routed experts only; `experts`: how many there are)
    output_change  max |Δ logit| over at most 256 tokens with only this group's training in effect against none of it, every token at the same
                   experts in both; None without a probe, or where weights were too large to copy
    rounding       what rounding alone may make of output_change: half a unit in the last place of the computation's dtype, of the largest logit
    connected      False where even 4,096 times the adapter leaves the logits as they are (in bf16 a first step may be too small to show)
    """
    groups: Groups = {name: _empty(count) for name, count in _base_parameters(model).items()}
    moved_sites: dict[str, dict[str, bool]] = {}  # group -> site -> moved
    for name, parameter in _trained(model):
        group, site = group_of(name), _site(name)
        entry = groups.setdefault(group, _empty(0))
        delta, share = _delta(parameter, before.kept[name], name in before.full)
        if name in gradients.where:
            delta = delta * gradients.where[name]
        square = float(delta.double().square().sum()) / share
        entry["trained"] += parameter.numel()
        entry["moved"] = math.hypot(entry["moved"], math.sqrt(square))
        moved_sites.setdefault(group, {})[site] = moved_sites.get(group, {}).get(site, False) or square > 0
    for group, by_site in moved_sites.items():
        groups[group].update(sites=len(by_site), sites_moved=sum(by_site.values()), grad_norm=gradients.norms.get(group, 0.0))
    if gradients.reached_E:
        masks = gradients.reached_E.values()
        groups["experts"].update(experts=sum(m.numel() for m in masks), experts_reached=sum(int(m.sum()) for m in masks))
    if probe is not None and moved_sites:
        for group, change in _output_changes(model, before, sorted(moved_sites), first_tokens(probe)).items():
            groups[group].update(change)
    return {name: groups[name] for name in GROUPS if name in groups}


def check(groups: Groups) -> None:
    """Raise AdapterError for the first trained group without gradient, without movement, or without effect on the output."""
    for name, entry in groups.items():
        if not entry["trained"]:
            continue
        facts = f"{name}: {entry['trained']:,} trained parameters, gradient norm {entry['grad_norm']:.3g}, moved {entry['moved']:.3g}"
        if not math.isfinite(entry["grad_norm"]):
            raise AdapterError(f"{facts}: the gradient is not finite", next="look at the batch's rows, or try --learning-rate lower")
        if entry["grad_norm"] == 0:
            raise AdapterError(
                f"{facts}: no gradient arrived after the first step. Likely causes: no supervised token in the batch, or a forward pass "
                "that does not use these weights",
                next="look at the data line's supervised tokens; if there are some, name other groups in --lora.targets and report this one",
            )
        if entry["moved"] == 0:
            raise AdapterError(
                f"{facts}: it was asked for and did not move in the first step (weight decay aside). Likely causes: learning rate 0 at step 1 "
                "(warm-up), or its parameters are missing from the optimizer",
                next="check --learning-rate and the warm-up",
            )
        if entry["connected"] is False:
            raise AdapterError(
                f"{facts}, but the output is the same with and without it. Likely cause: the forward pass bypasses these adapters "
                "(a packed or fused path that does not know them)",
                next="report it with the model's config.json; --lora.targets without this group trains the rest",
            )


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
        "parameters": parameters, "trained": 0, "sites": 0, "sites_moved": 0, "grad_norm": 0.0, "moved": 0.0, "output_change": None,
        "rounding": None, "connected": None,
    }  # fmt: skip


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _site(name: str) -> str:
    """The module an adapter's parameter belongs to; a parameter without adapter is its own."""
    return name.rsplit(".adapter.", 1)[0]


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


def _sample(parameter: Tensor) -> Tensor:
    """About SAMPLE elements, some from every row of the first dimension (so that every expert, or word, is looked at)."""
    rows = parameter.detach().reshape(parameter.shape[0] if parameter.dim() > 1 else 1, -1)
    return rows[:, :: max(1, parameter.numel() // SAMPLE)]


def _delta(parameter: Tensor, kept: Tensor | None, full: bool) -> tuple[Tensor, float]:
    """(change, share of the parameter's elements that the change covers)."""
    if kept is None:
        return parameter.detach(), 1.0
    now = parameter.detach() if full else _sample(parameter)
    return now - kept, kept.numel() / parameter.numel()


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
    with _counts_kept(model):
        nothing_TV = logits("")
        rounding = nothing_TV.abs().max().item() * torch.finfo(model.model.embed_tokens.weight.dtype).eps / 2
        for group in (g for g in groups if g in adapted or g in copied):
            change = (logits(group) - nothing_TV).abs().max().item()
            connected = change > 0 or (group in adapted and (logits(group, AMPLIFY) - nothing_TV).abs().max().item() > 0)
            result[group] = {"output_change": change, "rounding": rounding, "connected": connected}
    return result


class _SameExperts:
    """A way through the layers that sends every token to the experts of the first pass. In bf16 rounding turns some router's choice at nearly any
    change of the weights before it, and another expert changes the output more than a first step does (2.6 against 0.04 on tiny-k2).
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
    """Only `group`'s training in effect. Adapters elsewhere get scale 0 rather than being removed, so that the same kernels run in both arms
    and a difference can come from the adapter alone; weights trained in full are exchanged with their copies."""
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
        parameter.data = torch.zeros_like(parameter.data) if kept is None else kept


@contextmanager
def _counts_kept(model: Decoder) -> Iterator[None]:
    """A probe is no training: the experts' token counts are put back."""
    counts = {index: moe.counts_E.clone() for index, moe in model.moe_layers().items()}
    yield
    for index, moe in model.moe_layers().items():
        moe.counts_E.copy_(counts[index])
