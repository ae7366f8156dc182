"""Muon for the matrices of hidden layers, AdamW for all other weights (models/matrices.py says which).

The update of a matrix is orthogonal: all its singular values are about 1, so rare directions move as far as
common ones. Its arithmetic is in orthogonal.py. One moment, 4 bytes per weight; AdamW's two are 8.

Stacked experts [E, out, in] are E matrices, each orthogonalised by itself.
Rows of a matrix on several processes (FSDP2): of as many matrices as there are processes, each gets one
whole, orthogonalises it and returns to every process its rows. So no work is done twice, and the update is
that of one process. A process that holds experts holds them whole, and needs no exchange.
Replicas of a matrix are updated by each process that holds one.
"""

# torch's tolist and hooks are untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.precision import multiplies
from unfreeze.models.matrices import PIECE
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.parallel.processes.mesh import HeldPart
from unfreeze.train.moments import Float32, Int8, Moments, Momentum
from unfreeze.train.optim import AdamW
from unfreeze.train.orthogonal import MuonRule, apply, direction, orthogonal, scale_of


class Muon(AdamW):
    """The optimizer of a model's weights whose hidden matrices move by Muon.

        matrices  names of the parameters that are matrices or stacks of them
        rule      momentum, scale and the learning rate of the others
        group     all processes of the run, if they hold rows of a matrix
        moments   of the weights that AdamW updates

    `learning_rate` is that of the matrices; the others have rule.adamw_rate times it. Weight decay is on
    every matrix, and by AdamW's rule on the others.
    Raises ConfigError if there is no matrix, or if one has no two dimensions.
    """

    def __init__(
        self,
        model: nn.Module,
        matrices: Collection[str],
        *,
        rule: MuonRule | None = None,
        weight_decay: float = 0.0,
        moments: Moments = "float32",
        impl: str = "auto",
        held: Callable[[str], HeldPart] | None = None,
        group: Group = ALONE,
    ):
        if not matrices:
            raise ConfigError("the model has no matrix for Muon", next="--optimizer.kind adamw")
        self._elsewhere = frozenset(matrices)
        super().__init__(model, weight_decay=weight_decay, moments=moments, impl=impl, held=held)
        flat = [name for name in matrices if self.parameters[name].dim() not in (2, 3)]
        if flat:
            words = f"{flat[0]} is no matrix and no stack of matrices"
            raise ConfigError(words, next="--optimizer.kind adamw")
        self._rule, self._group = rule or MuonRule(), group
        self.settings |= {
            "kind": "muon",
            "momentum": self._rule.momentum,
            "update_scale": self._rule.scale,
            "adamw_rate": self._rule.adamw_rate,
        }
        device = next(iter(self._masters.values())).device
        fast = torch.bfloat16 if multiplies(device) else torch.float32
        self._dtype = self._rule.dtype or fast
        self._momentum = {n: Momentum(m) for n, m in self._masters.items() if n in self._elsewhere}
        self._counts = self._rows_everywhere()

    def _moments_of(self, name: str) -> Float32 | Int8 | Momentum:
        return self._momentum[name] if name in self._elsewhere else super()._moments_of(name)

    def _rows_everywhere(self) -> dict[str, list[int]]:
        """Return name -> rows on each process, of the matrices that are divided by rows. Collective."""
        own: dict[str, int] = {}
        for name in self._momentum:
            rows = None if self._held is None else self._held(name).rows
            if rows is not None and self._masters[name].dim() == 2:
                own[name] = len(rows)
        if self._group.size == 1 or not own:
            return {}
        every = [json.loads(text) for text in self._group.texts(json.dumps(own))]
        return {name: [counts[name] for counts in every] for name in own}

    @torch.no_grad()
    def _move(self, learning_rate: float, scale: float) -> float:
        """Update the others by AdamW, then the matrices; return the rate that these moved by."""
        wanted = learning_rate * self._rule.adamw_rate
        of_others = super()._move(wanted, scale)
        due = [name for name in self._momentum if self.gradient(name) is not None]
        for name in due:
            self._momentum[name].step += 1.0
            if name not in self._counts and self._masters[name].numel():
                self._update(name, learning_rate, scale)
        divided, size = [name for name in due if name in self._counts], self._group.size
        for begin in range(0, len(divided), size):
            self._update_together(divided[begin : begin + size], learning_rate, scale)
        if not self._on_cpu:
            return learning_rate
        measured = self._measured(learning_rate)
        return measured if of_others == wanted else of_others / self._rule.adamw_rate

    def _update(self, name: str, learning_rate: float, scale: float) -> None:
        """Update a matrix, or the matrices of a stack some at a time, all of which this process has."""
        master, gradient, momentum = self._of(name)
        factor = scale_of(self._rule.scale, master.shape)
        for part in _pieces(master):
            u = self._direction(momentum[part], gradient[part], scale)
            apply(master[part], orthogonal(u, self._dtype), learning_rate, self._weight_decay, factor)
        self._round(name)

    def _update_together(self, names: Sequence[str], learning_rate: float, scale: float) -> None:
        """Update matrices of which each process has some rows; process i orthogonalises the i-th of them."""
        group, counts = self._group, [self._counts[name] for name in names]
        shapes = [(sum(rows), self._masters[name].shape[1]) for name, rows in zip(names, counts, strict=True)]
        parts: list[Tensor] = []
        for name in names:
            _, gradient, momentum = self._of(name)
            parts.append(self._direction(momentum, gradient, scale).to(self._dtype).flatten())
        send = [part.numel() for part in parts] + [0] * (group.size - len(names))
        mine = group.rank if group.rank < len(names) else None
        take = [0] * group.size if mine is None else [n * shapes[mine][1] for n in counts[mine]]
        whole = group.exchange(torch.cat(parts), send, take).arrived()
        if mine is not None:
            whole = orthogonal(whole.view(shapes[mine]), self._dtype).reshape(-1)
        back = group.exchange(whole, take, send).arrived()
        for name, shape, o in zip(names, shapes, back.split(send)[: len(names)], strict=True):
            master = self._masters[name]
            factor = scale_of(self._rule.scale, shape)
            apply(master, o.view_as(master), learning_rate, self._weight_decay, factor)
            self._round(name)

    def _of(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return (master, gradient, momentum) of a matrix that has a gradient."""
        gradient = self.gradient(name)
        assert gradient is not None
        return self._masters[name].detach(), gradient.detach(), self._momentum[name].momentum

    def _direction(self, momentum: Tensor, gradient: Tensor, scale: float) -> Tensor:
        gradient = gradient.to(momentum.dtype)
        return direction(momentum, gradient if scale == 1.0 else gradient * scale, self._rule.momentum)

    def _round(self, name: str) -> None:
        """Give a half-precision weight its rounded master."""
        if name in self._half:
            self.parameters[name].detach().copy_(self._masters[name])

    def _measured(self, learning_rate: float) -> float:
        """Return the rate by which a matrix [1, 1] of value 0 and gradient 1 moved, like the others."""
        one = torch.ones(1, 1)
        o = orthogonal(one, self._dtype)
        master, factor = torch.zeros(1, 1), scale_of(self._rule.scale, one.shape)
        apply(master, o, learning_rate, 0.0, factor)
        moved = -float(master) / (float(o) * factor)
        return learning_rate if math.isclose(moved, learning_rate, rel_tol=1e-5) else moved


def _pieces(master: Tensor) -> Iterator[slice]:
    """Yield parts of dimension 0: all rows of a matrix; of a stack as many matrices as PIECE numbers hold."""
    each = len(master) if master.dim() == 2 else max(1, PIECE // max(1, master[0].numel()))
    for first in range(0, len(master), each):
        yield slice(first, first + each)
