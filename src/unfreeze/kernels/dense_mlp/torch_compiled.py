"""The dense block as torch.compile makes it of plain torch.

Norm, activation and residual are fused around the GEMMs.

One graph serves every number of rows (they are marked dynamic: a graph that would hold for one number only is
an error). A graph of its own is made per kind of call: with gradients or without, dtype, widths, which
adapters there are and what trains. A model has two, the second being that of recomputation's first visit;
MAX_KINDS bounds them. A kind beyond runs the reference, and the log says so once. The scale of an adapter is
a tensor: the receipt sets it to 0 and back, which would cost a compilation each time if it were a number in
the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from unfreeze.kernels.dense_mlp import reference
from unfreeze.kernels.dense_mlp.reference import Projection
from unfreeze.kernels.rms_norm.reference import plain as rms_norm

log = logging.getLogger(__name__)
# kinds. torch stops at 8 graphs of one function; a kind can have two: indices in 32 bits, and in 64 where T ·
# I passes 2^31
MAX_KINDS = 4

Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]


def block(x_TD: Tensor, norm_D: Tensor, eps: float, gate: Parts, up: Parts, down: Parts) -> Tensor:
    """The reference by operations that the compiler sees through."""
    n_TD = rms_norm(x_TD, norm_D, eps)
    return x_TD + _projected(F.silu(_projected(n_TD, gate)) * _projected(n_TD, up), down)


def _projected(x_TI: Tensor, by: Parts) -> Tensor:
    weight, bias, A, B, scale = by
    y_TO = F.linear(x_TI, weight, bias)
    return (
        y_TO
        if A is None or B is None
        else y_TO + F.linear(F.linear(x_TI, A.to(x_TI.dtype)) * scale, B.to(x_TI.dtype))
    )


class Compiled:
    """An implementation of the op; `backend` is torch.compile's."""

    def __init__(self, backend: str | Callable[..., object] = "inductor"):
        self._run = torch.compile(block, fullgraph=True, backend=backend)
        self.kinds: set[Hashable] = set()
        self.full = False

    def __call__(
        self, x_TD: Tensor, norm_D: Tensor, eps: float, gate: Projection, up: Projection, down: Projection
    ) -> Tensor:
        if not self._room(
            (
                torch.is_grad_enabled(),
                eps,
                *map(_kind, (x_TD[:0], norm_D)),
                *(_kind_of(part) for part in (gate, up, down)),
            )
        ):
            return reference.dense_mlp(x_TD, norm_D, eps, gate, up, down)
        x_TD = x_TD.contiguous()
        torch._dynamo.mark_dynamic(x_TD, 0)
        try:
            return self._run(x_TD, norm_D, eps, _parts(gate), _parts(up), _parts(down))
        except (
            FailOnRecompileLimitHit
        ):  # torch guards on more than a kind says: its own limit is reached first
            self.full = True
            _log_once()
            return reference.dense_mlp(x_TD, norm_D, eps, gate, up, down)

    def _room(self, kind: Hashable) -> bool:
        if kind not in self.kinds:
            if self.full or len(self.kinds) == MAX_KINDS:
                _log_once()
                return False
            self.kinds.add(kind)
        return True


def _kind(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


def _kind_of(part: Projection) -> Hashable:
    return tuple(_kind(tensor) for tensor in (part.weight, part.bias, part.A, part.B))


def _parts(by: Projection) -> Parts:
    return by.weight, by.bias, by.A, by.B, torch.tensor(by.scale)


_LOGGED: list[bool] = []


def _log_once() -> None:
    if not _LOGGED:
        _LOGGED.append(True)
        log.warning(
            "dense_mlp: as many graphs are compiled as there may be (%d kinds of call); further kinds run the"
            " reference",
            MAX_KINDS,
        )
