"""What each group's training does to the model's output, measured on a probe.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import sites
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.snapshot import Snapshot, trained_parameters
from unfreeze.core.batch import Batch
from unfreeze.models import Decoder
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.blocks.saved import Saved
from unfreeze.models.groups import group_of
from unfreeze.models.layer import Layer

PROBE_TOKENS = 256  # enough to reach most experts, small enough to cost less than a step
# A change of 0 may be too small to show in bf16. A connected adapter that is 4,096 times as strong must show.
AMPLIFY = 4096.0
Groups = dict[str, dict[str, Any]]
Sums = Callable[[Sequence[float]], list[float]]


def first_tokens(batch: Batch, count: int = PROBE_TOKENS) -> Batch:
    """The first `count` tokens of a packed batch; the document at the end may be cut."""
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

    Compared are the logits with only this group's training in effect and with none of it.
    sums: numbers -> each summed over the processes, which go through the model together. So none goes
    through it for a reason that the others don't have.
    """
    # what can be taken out: adapters, by their scale; weights trained in full, where all were copied
    adapted = {site.group for site in sites(model)}
    sampled = {
        group_of(name)
        for name, _ in trained_parameters(model)
        if name not in before.full and before.kept[name] is not None
    }
    in_part = sums([float(group in sampled) for group in groups])
    copied = set(groups) - adapted - {group for group, count in zip(groups, in_part, strict=True) if count}
    probe = probe.to(model.device)
    recompute = _SameExperts()

    def logits(group: str, amplify: float = 1.0) -> Tensor:
        with _only(model, before, group, copied, amplify):
            return model.logits(model.hidden(probe, recompute))

    result: Groups = {}
    with model.looking():
        nothing_TV = logits("")
        rounding = nothing_TV.abs().max().item() * torch.finfo(model.model.embed_tokens.weight.dtype).eps / 2
        for group in (g for g in groups if g in adapted or g in copied):
            change = (logits(group) - nothing_TV).abs().max().item()
            connected: bool | None = sums([float(change > 0)])[0] > 0
            if not connected and group in adapted:
                stronger = (logits(group, AMPLIFY) - nothing_TV).abs().max().item()
                connected = sums([float(stronger > 0)])[0] > 0
            elif not connected:  # a first step may round away in a bf16 weight, which cannot be amplified
                connected = None
            result[group] = {"output_change": change, "rounding": rounding, "connected": connected}
    return result


class _SameExperts:
    """A recompute policy that sends every token to the experts it had in the first pass.

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
def _only(model: Decoder, before: Snapshot, group: str, copied: set[str], amplify: float) -> Iterator[None]:
    """Leave only `group`'s training in effect while the context lasts.

    Other adapters get scale 0 instead of being removed: the same kernels run in both arms, so a difference
    comes from the adapter alone. Weights trained in full are exchanged with their copies.
    """
    adapters = [(site.adapter, site.group) for site in sites(model)]
    scales = [(adapter.scale, getattr(adapter, "down_scale", 0.0)) for adapter, _ in adapters]
    others = copied - {group}
    exchanged = [(name, p) for name, p in trained_parameters(model) if group_of(name) in others]
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
