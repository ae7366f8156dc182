"""Parts that a registry of the tests has: one that adds a matrix, one of other shapes, one without packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.mla import MLA
from unfreeze.models.blocks.recording import CannotRecord
from unfreeze.models.parts import ATTENTION, LAYER, Option, Part


class Gated(MLA):
    """MLA times 2 · sigmoid(gate x): a gate of 0 changes nothing."""

    def forward(self, x_TD: Tensor, run):
        return super().forward(x_TD, run) * 2 * torch.sigmoid(self.out_gate(x_TD, run.reuse_linear))

    def record(self, to, x, *, add=None, factor=1.0):
        raise CannotRecord("a gated output")


def gated(own, at):
    own.__class__ = Gated
    width = at.shape.hidden_size
    own.out_gate = at.make.linear(f"{at.module}.out_gate", width, width)
    return own


def narrow(own, at, *, heads: int):
    """Attention with fewer keys and values."""
    for name in ("k_proj", "v_proj"):
        setattr(own, name, at.make.linear(f"{at.module}.{name}", at.shape.hidden_size, heads * own.head_dim))
    return own


def unpacked(layer, at):
    """A layer with the same experts, not packed."""
    own = layer.mlp.experts
    sizes = own.num_experts, own.hidden_size, own.intermediate_size
    layer.mlp.experts = Experts(*sizes, codec=None, dtype=at.make.dtype, device="meta")
    return layer


def kept(own, at):
    return own


PLANTED = {
    name: Part(slot, name, "tests", f"tests.compress.planted_parts:{name}", options)
    for name, slot, options in (
        ("gated", ATTENTION, {}),
        ("narrow", ATTENTION, {"heads": Option(1, "key heads", least=1)}),
        ("unpacked", LAYER, {}),
        ("kept", LAYER, {}),
    )
}
