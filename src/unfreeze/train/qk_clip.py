"""qk-clip: after an update, heads whose largest attention logit exceeded a limit are scaled back to it.

S_h = the largest scale · q k of head h over a step's tokens; where S_h > limit, the scores of the head are
multiplied by limit / S_h, in the rows of the projections (models/queries.py). Other heads keep their bits.
Muon's updates make logits grow more easily than AdamW's. Source: MuonClip, Kimi K2, arXiv:2507.20534, 2.1
(limit 100 there). S is that of the weights before the update, as there.
"""

# torch's split and named_modules are untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.core.batch import Batch, Loss
from unfreeze.core.metrics import OF_LOGITS
from unfreeze.core.taps import Tap, taps_of
from unfreeze.models import Decoder
from unfreeze.models.queries import scalable
from unfreeze.parallel.processes.collectives import Group
from unfreeze.train.optim import AdamW


class LargestLogits:
    """An objective that also keeps each head's largest logit, from the step's first micro-batch to `take`.

    Its loss and gradient are the objective's own. Logits of held-out documents, which need no gradient, do
    not count. If an update was refused, its step's logits count in the next.
    metrics: how to show the largest of all.
    """

    def __init__(self, objective: Callable[..., Loss], layers: Sequence[int]):
        self.objective, self.own = objective, [Tap(layer, "logit") for layer in layers]
        self._inner = taps_of(objective)
        self.taps = self._inner | frozenset(self.own)
        self.metrics = (*getattr(objective, "metrics", ()), *OF_LOGITS)
        self._largest: dict[int, Tensor] = {}
        if begin := getattr(objective, "begin", None):
            self.begin = begin  # what it must know of the whole step (train/ahead.py)

    def __call__(self, hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, tapped: Any = None) -> Loss:
        loss = self.objective(hidden_TD, lm_head, batch, *([tapped] if self._inner else []))
        if not torch.is_grad_enabled():
            return loss
        for tap in self.own:
            new_H = tapped[tap].detach().amax(0)
            before_H = self._largest.get(tap.layer)
            self._largest[tap.layer] = new_H if before_H is None else torch.maximum(before_H, new_H)
        largest = torch.cat([self._largest[tap.layer] for tap in self.own]).max().clamp_min(0)
        return replace(loss, largest={**loss.largest, "largest_logit": largest})

    def take(self, group: Group) -> dict[int, Tensor]:
        """Return layer -> [H] over all processes, and forget it. Every process calls it."""
        largest, self._largest = self._largest, {}
        if group.size > 1 and largest:
            device = next(iter(largest.values())).device
            every_PN = torch.zeros(group.size, sum(map(len, largest.values())), device=device)
            every_PN[group.rank] = torch.cat(list(largest.values()))
            group.sum_([every_PN])
            parts = every_PN.amax(0).split([len(part) for part in largest.values()])
            largest = dict(zip(largest, parts, strict=True))
        return largest


class QkClip:
    """Scale heads back after each update (train/balance.py: AfterUpdate).

    Half-precision weights follow their masters; a process that holds rows scales these.
    Raises ConfigError for a model whose heads cannot be scaled (models/queries.py).
    """

    def __init__(self, model: Decoder, optimizer: AdamW, logits: LargestLogits, limit: float, group: Group):
        self._optimizer, self._logits, self._limit, self._group = optimizer, logits, limit, group
        self._factors = scalable(model)
        names = {id(module): name for name, module in model.named_modules()}
        self._names = {
            layer: names[id(model.layers[layer].attention)] for layer in self._factors
        }  # "model.layers.0.self_attn"

    @torch.no_grad()
    def __call__(self, expert_load: Mapping[int, Sequence[int]]) -> None:
        for layer, largest_H in self._logits.take(self._group).items():
            over_H = largest_H > self._limit
            factor_H = torch.where(over_H, self._limit / largest_H, torch.ones_like(largest_H))
            for projection, factor_O in self._factors[layer](factor_H).items():
                for kind in ("weight", "bias"):
                    self._scale(f"{self._names[layer]}.{projection}.{kind}", factor_O)

    def _scale(self, name: str, factor_O: Tensor) -> None:
        """Multiply the rows that are held here; a projection may have no bias."""
        parameter = self._optimizer.parameters.get(name)
        if parameter is None:
            return
        master, rows = self._optimizer.masters[name], self._optimizer.held(name, self._group).rows
        factor = factor_O if rows is None else factor_O[rows.slice]
        master.mul_(factor.to(master.dtype).view(-1, *(1 for _ in master.shape[1:])))
        if parameter.dtype != master.dtype:
            parameter.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: what it changes is the optimizer's."""
        return {}
