"""The effect of each group's training on the model's output, measured on a probe.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import sites
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.snapshot import Snapshot, trained_parameters
from unfreeze.core.batch import Batch
from unfreeze.core.rows import here
from unfreeze.models import Decoder
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.blocks.saved import Saved
from unfreeze.models.groups import group_of
from unfreeze.models.layer import Layer

PROBE_TOKENS = 256  # enough to reach most experts, small enough to cost less than a step
# A change of 0 may be too small to show in bf16. A connected adapter must show when it is 4,096 times as
# strong.
AMPLIFY = 4096.0
Groups = dict[str, dict[str, Any]]
Sums = Callable[[Sequence[float]], list[float]]


def first_tokens(batch: Batch, count: int = PROBE_TOKENS) -> Batch:
    """The first `count` tokens of a packed batch; the last document may be cut."""
    return Batch(
        tokens_T=batch.tokens_T[:count],
        targets_T=batch.targets_T[:count],
        weights_T=batch.weights_T[:count],
        positions_T=batch.positions_T[:count],
        starts_S=batch.starts_S[batch.starts_S < count],
    )


def output_changes(
    model: Decoder, before: Snapshot, groups: list[str], probe: Batch, sums: Sums = list
) -> Groups:
    """group -> {output_change, rounding, connected}, as in receipt.py: make_receipt.

    Compares the logits with only this group's training in effect to those with no training. Each layer is run
    for all groups before the next one, so that streamed weights are loaded once (twice if a group changed
    nothing).

    sums: sums each number over the processes. All processes run the model together, so no process may run it
    for a reason that the others don't have.
    """
    # what can be switched off: adapters, by their scale; fully trained weights, if all were copied
    adapted = {site.group for site in sites(model)}
    sampled = {
        group_of(name)
        for name, _ in trained_parameters(model)
        if name not in before.full and before.kept[name] is not None
    }
    in_part = sums([float(group in sampled) for group in groups])
    copied = set(groups) - adapted - {group for group, count in zip(groups, in_part, strict=True) if count}
    tried = [group for group in groups if group in adapted or group in copied]
    passes = _Passes(model, before, copied, probe.to(model.device))
    with model.looking():
        logits = passes.logits([_Variant(""), *map(_Variant, tried)])
        nothing_TV = next(logits)
        rounding = nothing_TV.abs().max().item() * torch.finfo(model.lm_head.dtype).eps / 2
        changes = [(each_TV - nothing_TV).abs().max().item() for each_TV in logits]

        # groups that changed nothing again, amplified
        shows = sums([float(change > 0) for change in changes])
        silent = [g for g, count in zip(tried, shows, strict=True) if not count and g in adapted]
        louder = passes.logits([_Variant(group, AMPLIFY) for group in silent])
        reach = [float((each_TV - nothing_TV).abs().max().item() > 0) for each_TV in louder]
        stronger = sums(reach) if silent else []

    connected: dict[str, bool | None] = {g: count > 0 for g, count in zip(silent, stronger, strict=True)}
    for group, count in zip(tried, shows, strict=True):
        # a first step may round away in a bf16 weight, which cannot be amplified
        connected.setdefault(group, True if count else None)
    return {
        group: {"output_change": change, "rounding": rounding, "connected": connected[group]}
        for group, change in zip(tried, changes, strict=True)
    }


@dataclass(frozen=True)
class _Variant:
    """Only this group's training in effect, `amplify` times as strong; "": none."""

    group: str
    amplify: float = 1.0


@dataclass(frozen=True)
class _Part:
    """A part of the model that runs at once: its adapters by group, its trained weights with copies."""

    adapters: list[tuple[LowRank | ExpertLowRank, str]]
    exchanged: list[tuple[str, nn.Parameter]]


class _Passes:
    """Forward passes of several variants side by side: each layer is run for all of them before the next.

    So its weights are loaded once, wherever they are. The numbers equal those of one pass after another.
    """

    def __init__(self, model: Decoder, before: Snapshot, copied: set[str], probe: Batch):
        self._model, self._before, self._probe = model, before, probe
        self._same_experts = _SameExperts()
        model.reshard()  # so that its parameters are the local shards
        adapters = [(site.adapter, site.group) for site in sites(model)]
        trained = [(name, p) for name, p in trained_parameters(model) if group_of(name) in copied]

        def part(*modules: nn.Module) -> _Part:
            inside = {id(module) for each in modules for module in each.modules()}
            weights = {id(weight) for each in modules for weight in each.parameters()}
            return _Part(
                [(adapter, group) for adapter, group in adapters if id(adapter) in inside],
                [(name, p) for name, p in trained if id(p) in weights],
            )

        self._embedding = part(model.model.embed_tokens)
        self._layers = [(layer, part(layer)) for layer in model.layers]
        self._end = part(model.model.norm, model.lm_head)  # a tied head is the embedding

    def logits(self, variants: Sequence[_Variant]) -> Iterator[Tensor]:
        """[T, V] of each variant, one at a time."""
        model, before = self._model, self._before
        if not variants:
            return
        run = model.packed_pass(self._probe)
        x_TD: list[Tensor] = []
        for variant in variants:
            with _only(model, self._embedding, before, variant):
                model.unshard()
                x_TD.append(model.model.embed_tokens(self._probe.tokens_T))
        for layer, part in self._layers:
            for index, variant in enumerate(variants):
                with _only(model, part, before, variant):
                    x_TD[index] = self._same_experts(layer, x_TD[index], run)
        for index, variant in enumerate(variants):
            with _only(model, self._end, before, variant):
                model.unshard()
                logits_TV = model.logits(model.model.norm(x_TD[index]))
            yield logits_TV


class _SameExperts:
    """A recompute policy that sends every token to the experts of the first pass.

    In bf16 nearly any change of earlier weights changes some router's choice, and another expert changes the
    output more than a first step does (2.6 against 0.04 on tiny-k2).
    """

    def __init__(self) -> None:
        self._chosen: dict[Layer, list[Any]] = {}

    def __call__(self, layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
        saved = Saved()
        saved.second, saved.values = layer in self._chosen, list(self._chosen.get(layer, ()))
        run.residency.visit(layer)
        with run.visiting(saved):
            y_TD = layer(x_TD, run)
        if not saved.second:
            self._chosen[layer] = saved.values
        return y_TD


@contextmanager
def _only(model: Decoder, part: _Part, before: Snapshot, variant: _Variant) -> Iterator[None]:
    """Context in which only the variant's training is in effect in a part of the model.

    Other adapters get scale 0 instead of being removed: the same kernels run in both arms, so a difference
    comes from the adapter alone. Fully trained weights are swapped with their copies.
    """
    scales = [(adapter.scale, getattr(adapter, "down_scale", 0.0)) for adapter, _ in part.adapters]
    exchanged = [(name, p) for name, p in part.exchanged if group_of(name) != variant.group]
    try:
        for (adapter, own), (scale, down_scale) in zip(part.adapters, scales, strict=True):
            factor = variant.amplify if own == variant.group else 0.0
            _set_scale(adapter, scale * factor, down_scale * factor)
        _exchange(model, exchanged, before)
        yield
    finally:
        _exchange(model, exchanged, before)
        for (adapter, _), (scale, down_scale) in zip(part.adapters, scales, strict=True):
            _set_scale(adapter, scale, down_scale)


def _set_scale(adapter: LowRank | ExpertLowRank, scale: float, down_scale: float) -> None:
    adapter.scale = scale
    if isinstance(adapter, ExpertLowRank):
        adapter.down_scale = down_scale


def _exchange(model: Decoder, parameters: list[tuple[str, nn.Parameter]], before: Snapshot) -> None:
    """Swap each parameter's memory with its copy; twice is the identity.

    For sharded parameters the local rows are swapped by value, and all-gathered copies are dropped.
    """
    model.reshard()
    for name, parameter in parameters:
        copy, own = before.kept[name], here(parameter)
        if own is not parameter:
            before.kept[name] = own.clone()
            own.copy_(torch.zeros_like(own) if copy is None else copy)
            continue
        before.kept[name] = parameter.data
        parameter.data = torch.zeros_like(parameter.data) if copy is None else copy.to(parameter.dtype)
