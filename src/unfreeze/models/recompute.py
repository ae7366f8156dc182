"""Recomputation: what of a layer's activations is kept for backward, and what is computed again there.

    plain        autograd keeps everything
    keep_inputs  only the layer's input [T, D] and the experts it chose are kept
    selective    and what attention and the experts made: most of the arithmetic for a few [T, ·] tensors
    elementwise  and the outputs of linear layers: no GEMM is done twice

A layer is visited twice. First without autograd: a Memo keeps what the policy names. Then in backward, with
autograd: the Memo returns it in the order in which the layer asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from unfreeze.models.blocks.memo import Memo
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.layer import Layer

Through = Callable[[Layer, Tensor, PackedPass], Tensor]


def plain(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """Go through a layer and let autograd keep its activations."""
    return layer(x_TD, run)


def keep_inputs(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """Go through a layer keeping its input [T, D] and the experts it chose; the rest is computed again in backward.

    Gradients of parameters are accumulated into `.grad` during backward (torch.autograd.backward inside), so use `loss.backward()`, not
    torch.autograd.grad, around it.
    """
    return _again(layer, x_TD, run)


def selective(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """As `keep_inputs`, but the outputs of attention and experts are kept too: a few [T, ·] tensors that save
    most of the arithmetic. Norms, projections and rotations are computed again. Same gradients, to the bit.
    Source: selective recomputation, arXiv:2205.05198.
    """
    return _again(layer, x_TD, run, dear=True)


def elementwise(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """As `selective`, and outputs of linear layers are kept (of multi-head attention and dense MLPs). The
    second visit has no GEMM, only norms, rotations and activations; fewer bytes than keeping all. Same
    gradients, to the bit.
    """
    return _again(layer, x_TD, run, dear=True, products=True)


THROUGH: dict[str, Through] = {"layers": keep_inputs, "selective": selective, "elementwise": elementwise, "nothing": plain}


def through(name: str, layers: Sequence[Layer], keep_layers: int | None = None) -> Through:
    """THROUGH[name]. With "selective" and "elementwise" only the last `keep_layers` layers keep anything
    (None: all), the others use "layers".

    The last ones, because backward reaches them first: what they keep is freed before an earlier layer is
    recomputed.
    """
    keeps = THROUGH[name]
    if name not in ("selective", "elementwise") or keep_layers is None:
        return keeps
    keeping = {id(layer) for layer in list(layers)[max(0, len(layers) - keep_layers) :]}
    return lambda layer, x_TD, run: (keeps if id(layer) in keeping else keep_inputs)(layer, x_TD, run)


def _again(layer: Layer, x_TD: Tensor, run: PackedPass, **kept: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return _chunk_by_chunk(layer, x_TD, [(rows, chunk, Memo()) for rows, chunk in _chunks(layer, run)])
    # With a frozen embedding the first layer's input carries no gradient, and autograd would never come back to the layer.
    return _Recompute.apply(x_TD if x_TD.requires_grad else x_TD.detach().requires_grad_(), layer, run, kept)  # type: ignore[return-value]


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, layer: Layer, run: PackedPass, kept: dict[str, bool]) -> Tensor:  # type: ignore[override]
        ctx.layer, ctx.visits = layer, [(rows, chunk, Memo(**kept, unread=True)) for rows, chunk in _chunks(layer, run)]
        ctx.save_for_backward(x_TD)
        with torch.no_grad():
            return _chunk_by_chunk(layer, x_TD, ctx.visits)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        x_TD = ctx.saved_tensors[0].detach()
        dx_TD = None if len(ctx.visits) == 1 else torch.empty_like(x_TD)
        for rows, run, memo in reversed(ctx.visits):  # a memo is emptied by the second visit
            x_CD, memo.second = x_TD[rows].requires_grad_(), True
            with torch.enable_grad(), run.visiting(memo):
                y_CD = ctx.layer(x_CD, run)
            torch.autograd.backward(y_CD, dy_TD[rows])
            if dx_TD is None:
                return x_CD.grad, None, None, None
            dx_TD[rows] = x_CD.grad
            del y_CD, x_CD
        return dx_TD, None, None, None


def _chunks(layer: Layer, run: PackedPass) -> Sequence[tuple[slice, PackedPass]]:
    """The run's chunks; one chunk if a bf16 parameter trains, because autograd would sum its per-chunk
    gradients in bf16."""
    whole = ((slice(None), run),)
    return whole if any(p.requires_grad and p.element_size() < 4 for p in layer.parameters()) else run.chunks or whole


def _chunk_by_chunk(layer: Layer, x_TD: Tensor, visits: Sequence[tuple[slice, PackedPass, Memo]]) -> Tensor:
    """y[chunk] = layer(x[chunk]), one after the other; each visit's memo is filled."""
    y_TD = None if len(visits) == 1 else torch.empty_like(x_TD)
    for rows, run, memo in visits:
        with run.visiting(memo):
            y_CD = layer(x_TD[rows], run)
        if y_TD is None:
            return y_CD
        y_TD[rows] = y_CD
        del y_CD
        # Copy what is kept after the visit's other tensors are freed. It was allocated among them and would
        # fragment the heap: the next chunk would not fit into the pieces, and the peak would be higher.
        memo.values = tree_map_only(Tensor, Tensor.clone, memo.values)
    assert y_TD is not None
    return y_TD
