"""ΔW = scale · B A of an adapter, one matrix at a time in float32, without the base's weights.

The adapter's file is memory-mapped, and decoded one layer at a time: an adapter of every expert of Kimi-K2 at
rank 16 takes 40 GB.

E experts, D model width, I expert width, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from unfreeze.adapters.beside import split_beside
from unfreeze.adapters.decode import Decoded, decode
from unfreeze.adapters.embeddings import EmbeddingLowRank
from unfreeze.adapters.files import read_files
from unfreeze.core.errors import AdapterError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.decoder import Decoder

GATE, UP = 0, 1
_LAYER = re.compile(r"\.layers\.([0-9]+)\.")


@dataclass(frozen=True)
class MatrixPlace:
    """Names one matrix of the model: a linear layer, or an expert's gate, up or down.

    half: 0 for gate, 1 for up, None for both as in gate_up_proj.
    """

    site: str
    projection: str = ""  # "": a linear layer; "gate_up_proj" (without a gate "up_proj"), "down_proj"
    expert: int = 0
    half: int | None = None


class Changes(Protocol):
    """ΔW by place. projections: site -> the projections that change, ("",) of a linear layer.

    whole: parameter name -> its new values, of modules that trained fully.
    embeddings: LoRA on the token embeddings, if there is one.
    rows: parameter name -> (ids, rows) of tokens that trained alone, some beyond the base's vocabulary.
    """

    projections: dict[str, tuple[str, ...]]
    whole: dict[str, Tensor]
    rows: dict[str, tuple[list[int], Tensor]]
    embeddings: EmbeddingLowRank | None

    def of(self, place: MatrixPlace, weight: Tensor | None = None) -> Tensor: ...


@dataclass
class NoChanges:
    """A checkpoint without an adapter."""

    projections: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    whole: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    rows: dict[str, tuple[list[int], Tensor]] = field(default_factory=dict[str, tuple[list[int], Tensor]])
    embeddings: EmbeddingLowRank | None = None

    def of(self, place: MatrixPlace, weight: Tensor | None = None) -> Tensor:
        raise KeyError(place)


class Deltas:
    """An adapter's ΔW by place.

    Raises AdapterError, before anything is computed, if it does not fit the model.
    """

    def __init__(self, model: Decoder, folder: Path):
        self._model = model
        self._config, tensors = read_files(folder)
        tensors, beside = split_beside(model, self._config, tensors)
        self.embeddings = beside.embeddings
        self.rows = {f"{name}.weight": rows for name, rows in beside.rows.items()}
        self.whole: dict[str, Tensor] = {
            f"{name}.{leaf}": tensor for name, own in beside.whole.items() for leaf, tensor in own.items()
        }
        _refuse_untied(model, self.whole, folder)
        _refuse_untied_rows(model, self.rows, folder)
        self._layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            self._layers.setdefault(_layer(name), {})[name] = tensor
        self.projections: dict[str, tuple[str, ...]] = {}
        self.ranks: dict[str, int] = {}
        for layer in self._layers:
            for site, decoded in decode(model, self._config, self._layers[layer]).items():
                self.projections[site] = _projections(decoded)
                self.ranks[site] = max(
                    part.shape[-1] for name, part in decoded.state.items() if name[-1] == "B"
                )
        if not self.projections:
            raise AdapterError(f"{folder} adapts nothing: it holds no LoRA factors")
        self._held: tuple[str, Mapping[str, Decoded]] = ("", {})

    def of(self, place: MatrixPlace, weight: Tensor | None = None) -> Tensor:
        """ΔW float32 [out, in], with rows as in the base's weight.

        weight: W, on which DoRA's ΔW = W' − W depends.
        """
        decoded, owner = self._decoded(place.site), self._owner(place.site)
        state, e = decoded.state, place.expert
        if isinstance(owner, Linear):
            change = _product(state["A"], state["B"], decoded.scale)
            return _lengthened(weight, change, state["m"]) if "m" in state else change
        if place.projection == "down_proj":
            return _product(state["down_A"][e], state["down_B"][e], decoded.down_scale)
        # gate's rows of A and B come first, up's last (adapters/lora.py)
        parts = owner.before
        pairs = zip(state["gate_up_A"][e].chunk(parts), state["gate_up_B"][e].chunk(parts), strict=True)
        halves = [_product(A, B, decoded.scale) for A, B in pairs]
        if parts == 1:
            return halves[0]
        if place.half is not None:
            return halves[place.half]
        both = torch.empty(2 * owner.intermediate_size, owner.hidden_size)
        for rows, half in zip(owner.activation.split(both, 0), halves, strict=True):
            rows.copy_(half)
        return both

    def factors(self, site: str) -> dict[tuple[str, int | None], tuple[Tensor, Tensor, float]]:
        """(projection, GATE, UP or None) -> (A [R, in], B [out, R], scale); [E, …] of experts.

        ΔW = scale · B A. The rank R may differ between gate_up_proj and down_proj.
        """
        decoded, owner = self._decoded(site), self._owner(site)
        state = decoded.state
        if "m" in state:
            raise AdapterError(
                f"the adapter is DoRA, and {site}'s change is no product of two factors alone",
                next="merge it: without --adapter-only, or unfreeze merge RUN --to bf16",
            )
        if isinstance(owner, Linear):
            return {("", None): (state["A"], state["B"], decoded.scale)}
        pairs: dict[tuple[str, int | None], tuple[Tensor, Tensor, float]] = {}
        if "gate_up_B" in state:
            parts = owner.before
            halves = zip(state["gate_up_A"].chunk(parts, 1), state["gate_up_B"].chunk(parts, 1), strict=True)
            for half, (A, B) in enumerate(halves):
                pairs[owner.first, half if parts > 1 else None] = (A, B, decoded.scale)
        if "down_B" in state:
            pairs["down_proj", None] = (state["down_A"], state["down_B"], decoded.down_scale)
        return pairs

    def _decoded(self, site: str) -> Decoded:
        layer = _layer(f".{site}.")
        if self._held[0] != layer:
            self._held = layer, decode(self._model, self._config, self._layers[layer])
        return self._held[1][site]

    def _owner(self, site: str) -> Linear | Experts:
        owner = self._model.get_submodule(site)
        assert isinstance(owner, (Linear, Experts))
        return owner


def _refuse_untied(model: Decoder, whole: Mapping[str, Tensor], folder: Path) -> None:
    """Raise AdapterError if the embeddings and a tied head were trained apart (peft does so by default)."""
    table, head = (whole.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if model.shape.tied and (table is None) != (head is None):
        raise AdapterError(
            f"{folder}: the embeddings and the head of this model are one, but the adapter has one alone",
            next="train it with ensure_weight_tying=True in peft, or with --train-too here",
        )
    if model.shape.tied and table is not None and head is not None and not torch.equal(table, head):
        raise AdapterError(
            f"{folder}: the embeddings and the head of this model are one, but the adapter has two",
            next="train it with ensure_weight_tying=True in peft, or with --train-too here",
        )


def _refuse_untied_rows(model: Decoder, rows: Mapping[str, tuple[list[int], Tensor]], folder: Path) -> None:
    """Raise AdapterError if a tied head has rows of other tokens than the embeddings."""
    table, head = (rows.get(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    if model.shape.tied and head is not None and (table is None or table[0] != head[0]):
        raise AdapterError(
            f"{folder}: the embeddings and the head of this model are one, but rows of other tokens train in"
            " the head",
            next="in peft: trainable_token_indices=ids, which trains both",
        )


def _projections(decoded: Decoded) -> tuple[str, ...]:
    """The adapted projections of a site: ("",) for a linear layer."""
    if "A" in decoded.state:
        return ("",)
    owner = decoded.candidate.owner
    assert isinstance(owner, Experts)
    names = {"gate_up_B": owner.first, "down_B": "down_proj"}
    return tuple(name for factor, name in names.items() if factor in decoded.state)


def _lengthened(weight: Tensor | None, change: Tensor, m: Tensor) -> Tensor:
    """m ⊙ (W + ΔW) / ‖W + ΔW‖ − W, norms of rows (adapters/dora.py)."""
    if weight is None:
        raise AdapterError("the change of a DoRA adapter depends on the weight, which is not here")
    whole = change + weight
    norm = torch.linalg.vector_norm(whole, dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return whole.mul_(m.float()[:, None] / norm).sub_(weight)


def _product(A: Tensor, B: Tensor, scale: float) -> Tensor:
    return (B.float() @ A.float()).mul_(scale)


def _layer(name: str) -> str:
    """The number in "….layers.12.…", "none" if there is none."""
    match = _LAYER.search(name)
    return match[1] if match else "none"
