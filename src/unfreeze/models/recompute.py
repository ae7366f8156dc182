"""Activation checkpointing: the activations a layer keeps for backward; the others are recomputed.

    plain        autograd keeps everything
    keep_inputs  keep only the layer's input [T, D] and the experts it chose
    selective    also keep the outputs of attention and experts: most of the arithmetic for a few [T, ·]
                 tensors
    elementwise  also keep the outputs of linear layers: their GEMMs do not run twice

A layer is visited twice. The first visit runs without autograd and saves what the policy names
(blocks/saved.py). The second runs in backward, with autograd, and the layer reuses the saved results in the
same order. Tensors inside the layer that an objective requests (run.taps) are collected at the first visit;
their gradients enter at the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.blocks.residency import visited_again
from unfreeze.models.blocks.saved import Saved
from unfreeze.models.blocks.taps import LayerTaps
from unfreeze.models.layer import Layer

Recompute = Literal["layers", "selective", "elementwise", "nothing"]
"""What backward recomputes, by its name in the config; RECOMPUTE has the policy of each name."""


class RecomputePolicy(Protocol):
    """y = layer(x), x and y [T, D]: runs a layer, and so decides which of its tensors live until backward.

    It notifies run.residency before it computes the layer, in forward and in backward. If it keeps the
    layer's input, it stores it in run.boundary.
    """

    def __call__(self, layer: Layer, x_TD: Tensor, run: PackedPass, /) -> Tensor: ...


def plain(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """Run a layer and let autograd keep its activations."""
    run.residency.visit(layer)
    y_TD = visited_again(layer(x_TD, run), layer, run.residency)
    if run.taps is not None:
        run.taps.replace(visited_again(tensor, layer, run.residency) for tensor in run.taps.tensors())
    return y_TD


def keep_inputs(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """Run a layer, keeping its input [T, D] and the experts it chose; backward recomputes everything else.

    Gradients of parameters are added to `.grad` during backward (torch.autograd.backward is called inside).
    So call `loss.backward()`, not torch.autograd.grad.
    """
    return _recomputed(layer, x_TD, run)


def selective(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """As `keep_inputs`, but also keep the outputs of attention and experts.

    These few [T, ·] tensors save most of the arithmetic. Norms, projections and rotations are recomputed.
    Gradients are bit-identical.
    Source: selective recomputation, arXiv:2205.05198.
    """
    return _recomputed(layer, x_TD, run, expensive=True)


def elementwise(layer: Layer, x_TD: Tensor, run: PackedPass) -> Tensor:
    """As `selective`, but also keep outputs of linear layers (in attention and dense MLPs).

    Recomputation then runs norms, rotations, activations and routers. It keeps less than `plain`.
    Gradients are bit-identical.
    """
    return _recomputed(layer, x_TD, run, expensive=True, linear=True)


RECOMPUTE: dict[str, RecomputePolicy] = {
    "layers": keep_inputs,
    "selective": selective,
    "elementwise": elementwise,
    "nothing": plain,
}


def recompute_policy(name: str, layers: Sequence[Layer], keep_layers: int | None = None) -> RecomputePolicy:
    """RECOMPUTE[name] for the last `keep_layers` layers; the others use "layers". None: for all layers.

    keep_layers applies to "selective" and "elementwise". The last layers are chosen because backward reaches
    them first: their activations are freed before an earlier layer is recomputed.
    """
    keeps = RECOMPUTE[name]
    if name not in ("selective", "elementwise") or keep_layers is None:
        return keeps
    keeping = {id(layer) for layer in list(layers)[max(0, len(layers) - keep_layers) :]}
    return lambda layer, x_TD, run: (keeps if id(layer) in keeping else keep_inputs)(layer, x_TD, run)


def _recomputed(layer: Layer, x_TD: Tensor, run: PackedPass, **what: bool) -> Tensor:
    if not torch.is_grad_enabled():
        run.residency.visit(layer)
        visits = [(rows, chunk, Saved()) for rows, chunk in _chunks(layer, run)]
        return _chunk_by_chunk(layer, x_TD, visits, run.taps)
    # with a frozen embedding the first layer's input has no gradient, and autograd would skip its backward
    if not x_TD.requires_grad:
        x_TD = _Reached.apply(x_TD, x_TD.new_zeros((), requires_grad=True))
    if run.taps is None:
        return _Recompute.apply(x_TD, layer, run, what)
    y_TD, *tapped = _Recompute.apply(x_TD, layer, run, what)
    run.taps.replace(tapped)
    return y_TD


class _Reached(torch.autograd.Function):
    """Identity whose output requires grad, so autograd runs the first layer's backward.

    That layer's input (a frozen embedding) needs no gradient. Making the input itself a leaf would keep it
    and its gradient alive longer.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, leaf: Tensor) -> Tensor:
        return x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        return None, None


class _Recompute(torch.autograd.Function):
    """y = layer(x). With taps: (y, tapped tensor, …), each output with its own gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, layer: Layer, run: PackedPass, what: dict[str, bool]
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.layer, ctx.residency, ctx.keeper = layer, run.residency, run.boundary
        ctx.visits = [(rows, chunk, Saved(**what, unread=True)) for rows, chunk in _chunks(layer, run)]
        ctx.taps = None if run.taps is None else run.taps.names
        run.boundary.keep(ctx, layer, x_TD)
        run.residency.visit(layer)
        with torch.no_grad():
            y_TD = _chunk_by_chunk(layer, x_TD, ctx.visits, run.taps)
            if run.taps is None:
                return y_TD
            # an output without a gradient has None here, instead of zeros of its size
            ctx.set_materialize_grads(False)
            # copy slices of larger tensors, which would otherwise live as long as the objective
            return y_TD, *(tensor.detach().contiguous() for tensor in run.taps.tensors())

    @staticmethod
    def backward(
        ctx: Any, dy_TD: Tensor | None, *dtapped: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        if dy_TD is None and all(gradient is None for gradient in dtapped):
            return None, None, None, None
        ctx.residency.visit(ctx.layer)
        x_TD = ctx.keeper.give(ctx)
        dx_TD = None if len(ctx.visits) == 1 else torch.empty_like(x_TD)
        for rows, run, saved in reversed(ctx.visits):  # recomputation empties `saved`
            x_CD, saved.second = x_TD[rows].requires_grad_(), True
            taps: LayerTaps | None = None if ctx.taps is None else LayerTaps(ctx.taps)
            with torch.enable_grad(), run.visiting(saved, taps):
                y_CD = ctx.layer(x_CD, run)
                arriving = _arriving((y_CD, *(taps.tensors() if taps else ())), (dy_TD, *dtapped), rows)
            arriving.backward()
            if dx_TD is None:
                return x_CD.grad, None, None, None
            dx_TD[rows] = x_CD.grad
            del arriving, y_CD, taps, x_CD
        return dx_TD, None, None, None


def _arriving(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], rows: slice) -> Tensor:
    """Scalar whose backward() sends these rows of the gradients to the outputs; None: no gradient."""
    pairs = [(y_CD, dy_TD[rows]) for y_CD, dy_TD in zip(outputs, gradients, strict=True) if dy_TD is not None]
    ys, dys = zip(*pairs, strict=True)
    return _Arriving.apply(*ys, *dys)


class _Arriving(torch.autograd.Function):
    """`_Arriving.apply(y, …, dy, …).backward()` is torch.autograd.backward((y, …), (dy, …)).

    torch would compare the shapes of y and dy with sympy. Its import takes a quarter of a second of a run's
    first step.
    """

    @staticmethod
    def forward(ctx: Any, *both: Tensor) -> Tensor:
        ctx.save_for_backward(*both[len(both) // 2 :])
        return both[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.saved_tensors, *(None for _ in ctx.saved_tensors)


def _chunks(layer: Layer, run: PackedPass) -> Sequence[tuple[slice, PackedPass]]:
    """The run's chunks; only one if a bf16 parameter trains: autograd would sum its gradients in bf16."""
    whole = ((slice(None), run),)
    half_trains = any(p.requires_grad and p.element_size() < 4 for p in layer.parameters())
    return whole if half_trains else run.chunks or whole


def _chunk_by_chunk(
    layer: Layer, x_TD: Tensor, visits: Sequence[tuple[slice, PackedPass, Saved]], taps: LayerTaps | None
) -> Tensor:
    """y[chunk] = layer(x[chunk]), one after the other; each visit fills its `saved` and its rows of taps."""
    y_TD = None if len(visits) == 1 else torch.empty_like(x_TD)
    for rows, run, saved in visits:
        chunk_taps = taps if y_TD is None or taps is None else LayerTaps(taps.names)
        with run.visiting(saved, chunk_taps):
            y_CD = layer(x_TD[rows], run)
        if y_TD is None:
            return y_CD
        y_TD[rows] = y_CD
        if taps is not None and chunk_taps is not None:
            taps.put_rows(rows, chunk_taps, len(x_TD))
        del y_CD, chunk_taps
        # Copy the saved tensors once the visit's other tensors are freed. They were allocated among those and
        # would fragment the heap: the next chunk would not fit into the holes, and the peak would be higher.
        saved.values = tree_map_only(Tensor, Tensor.clone, saved.values)
    assert y_TD is not None
    return y_TD
