"""Taps: tensors inside a decoder that an objective reads besides the last hidden states.

An objective with a field `taps` is called with a fourth argument, the tapped tensors:

    class Mine:
        taps = frozenset({Tap(3, "v")})

        def __call__(self, hidden_TD, lm_head, batch, found) -> Loss:
            v_TGv = found[Tap(3, "v")]

Gradients flow back through each of them, whatever the recompute policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from unfreeze.core.batch import Loss

TapName = Literal["input", "q", "k", "v", "q_plain", "k_plain", "divergence", "logit", "router"]
"""Tensor of a layer. T tokens, D model width, H query and G key/value heads, d and v widths of a head.

input    [T, D], the layer's input; for layer `num_layers`, the input of the last norm
q, k, v  [T, H, d], [T, G, d], [T, G, v], as attention gets them: normed and rotated. Latent attention (MLA)
         expands keys and values for every head, G = H
q_plain, k_plain   the outputs of projection and q_norm or k_norm, before the rotation, so free of positions.
         For MLA, the part of each head that never rotates
divergence   [T], of a layer with an indexer: how far its scores are from its attention
         (kernels/sparse_attention.py, kernels/moba/divergence.py)
logit    float32 [T, H], the largest score of a query before softmax (kernels/attention/largest.py). It has no
         gradient
router   [T, E], of a layer with experts: the router's scores, divided by their sum over all experts. Of a
         chain of experts [T, C E], pass after pass
"""
TAP_NAMES: tuple[TapName, ...] = get_args(TapName)


class Tap(NamedTuple):
    """Location of a tap; layers are counted from 0."""

    layer: int
    name: TapName


def taps_of(objective: Callable[..., Loss]) -> frozenset[Tap]:
    """Taps that an objective reads; empty if it has no field `taps`."""
    taps: Any = getattr(objective, "taps", ())
    return frozenset(taps)
