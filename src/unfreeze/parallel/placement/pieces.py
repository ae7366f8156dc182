"""Split experts of which one process gets more rows than the plan has memory for: tokens go in pieces.

The plan counts UNEVEN times the mean. Narrow data may route more to one process, which would run out of
memory. All processes see the same counts, so all cut their tokens into the same number of pieces, and every
piece is a call of its own: its rows are exchanged, go through the experts, and come back. Backward computes
each piece again, so that one piece's activations are alive at a time. The numbers are those of one call; only
sums over tokens, in the gradients of adapters, have another order.

A piece may be too large again, if its tokens are less even than all: then it is cut once more.
"""

# torch's Function.backward is untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import logging
from typing import Any, cast

import torch
from torch import Tensor

from unfreeze.models.blocks.experts import Experts
from unfreeze.parallel.placement.dispatch import RowsDispatch

log = logging.getLogger(__name__)
Tokens = tuple[Tensor, Tensor, Tensor]
"""x [T, D], ids [T, K], weights [T, K]."""
DEEPEST = 6  # cuts of a cut: a token's rows are never divided, however little room there is


def in_pieces(
    dispatch: RowsDispatch, experts: Experts, tokens: Tokens, most: int, *, read: bool, depth: int = 0
) -> Tensor:
    """Return the experts' output [T, D], from as many pieces as make `most` rows fit; zeros if not `read`.

    Every process calls it together, with the same `most`.
    """
    assert dispatch.room is not None
    pieces = max(2, -(-most // max(1, dispatch.room)))
    if depth == 0:
        _say_once(pieces)
    x_TD, ids_TK, weights_TK = tokens
    # gradients of adapters are added inside backward; as inputs they make autograd run it
    learns = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    call = _Pieces(dispatch, experts, ids_TK, pieces, read, depth)
    return cast(Tensor, _InPieces.apply(x_TD, weights_TK, call, *learns))


@functools.cache
def _say_once(pieces: int) -> None:
    log.info("experts: one process gets more rows than the plan has memory for: %d pieces", pieces)


class _Pieces:
    """The pieces of one call: `call(piece, x, weights)` is the output of one."""

    def __init__(
        self, dispatch: RowsDispatch, experts: Experts, ids_TK: Tensor, pieces: int, read: bool, depth: int
    ):
        self.dispatch, self.experts, self.read = dispatch, experts, read
        self.ids, self.pieces, self.depth = ids_TK.tensor_split(pieces), pieces, depth

    def __call__(self, piece: int, x_tD: Tensor, weights_tK: Tensor) -> Tensor:
        tokens = x_tD, self.ids[piece], weights_tK
        home = self.dispatch.home(tokens[1])
        room = cast(int, self.dispatch.room)
        if home.most > room and self.depth < DEEPEST:
            return in_pieces(self.dispatch, self.experts, tokens, home.most, read=True, depth=self.depth + 1)
        return self.dispatch.at(home, self.experts, x_tD, weights_tK)


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, call: _Pieces, *learns: Tensor) -> Tensor:
        ctx.call, ctx.inputs = call, (x_TD.detach(), weights_TK.detach())
        if not call.read:
            return torch.zeros_like(x_TD)
        parts = zip(x_TD.tensor_split(call.pieces), weights_TK.tensor_split(call.pieces), strict=True)
        return torch.cat([call(piece, *part) for piece, part in enumerate(parts)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: _Pieces = ctx.call
        of_all = [tensor.tensor_split(call.pieces) for tensor in (*ctx.inputs, gradients[0])]
        dxs: list[Tensor] = []
        dweights: list[Tensor] = []
        for piece, (x_tD, weights_tK, dy_tD) in enumerate(zip(*of_all, strict=True)):
            x, weights = x_tD.detach().requires_grad_(), weights_tK.detach().requires_grad_()
            with torch.enable_grad():
                y_tD = call(piece, x, weights)
            torch.autograd.backward((y_tD,), (dy_tD,))
            dxs.append(cast(Tensor, x.grad))
            dweights.append(cast(Tensor, weights.grad))
        learns = [None] * (len(ctx.needs_input_grad) - 3)
        return torch.cat(dxs), torch.cat(dweights), None, *learns
