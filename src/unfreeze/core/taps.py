"""Taps: tensors inside a decoder that an objective reads besides the last hidden states.

An objective that has a field `taps` is called with a fourth argument, what was found there:

    class Mine:
        taps = frozenset({Tap(3, "v")})

        def __call__(self, hidden_TD, lm_head, batch, found) -> Loss:
            v_TGv = found[Tap(3, "v")]

It may give a gradient back to each of them, whatever of a layer is computed again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from unfreeze.core.batch import Loss

TapName = Literal["input", "q", "k", "v", "q_plain", "k_plain"]
"""What of a layer. T tokens, D model width, H query and G key/value heads, d and v widths of a head.

input    [T, D], what the layer is given; of layer `num_layers` what the last norm is given
q, k, v  [T, H, d], [T, G, d], [T, G, v], as attention takes them: normed and rotated. Latent attention (MLA)
         expands keys and values for every head, G = H
q_plain, k_plain   before the rotation, so that no position is in them: what the projections, and q_norm and
         k_norm, give. Of MLA the part of each head that never rotates
"""
TAP_NAMES: tuple[TapName, ...] = get_args(TapName)


class Tap(NamedTuple):
    """A place: layers are counted from 0."""

    layer: int
    name: TapName


def taps_of(objective: Callable[..., Loss]) -> frozenset[Tap]:
    """What an objective asks for; nothing where it has no field `taps`."""
    asked: Any = getattr(objective, "taps", ())
    return frozenset(asked)
