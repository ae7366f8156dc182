"""Loss-free load balancing of experts: a bias for selection only, adjusted after each optimizer step.

E experts. Source: Wang et al., arXiv:2408.15664; DeepSeek-V3, arXiv:2412.19437, 2.1.2 (rate 0.001 there).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from unfreeze.core.batch import send
from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import Rows
from unfreeze.models import Decoder


class AfterUpdate(Protocol):
    """Changes the model after each optimizer step.

    `tensors` are the tensors it changes; train/state.py saves and restores them.
    """

    def __call__(self, expert_load: Mapping[int, Sequence[int]]) -> None: ...

    def tensors(self) -> dict[str, Tensor]: ...


class LossFreeBalance:
    """bias_e += rate * sign(mean load - load_e) in each layer whose router has a selection bias.

    The bias is e_score_correction_bias, fp32 [E].
    train/fit.py calls this after the weight update, with the tokens per expert of *all* micro-batches of the
    step: not once per micro-batch, not in evaluation, and recomputation doesn't count (docs/why/trust.md M2).
    `num_updates` counts its updates in this process. Passes of a chain that share a gate share its bias; its
    load is then the sum of theirs.
    rows: the only experts whose bias moves; None: all.
    A rate of 0.001 changes a sigmoid score's rank slowly; tiny models trained for few steps need about 0.01.
    """

    def __init__(self, model: Decoder, rate: float = 0.001, rows: Rows | None = None):
        self.rate = rate
        self._rows = slice(None) if rows is None else rows.slice
        self.num_updates = 0
        biases = {
            layer: getattr(moe.gate, "e_score_correction_bias", None)
            for layer, moe in model.moe_layers().items()
        }
        self.biases: dict[int, Tensor] = {
            layer: bias for layer, bias in biases.items() if isinstance(bias, Tensor)
        }
        if not self.biases:
            raise ConfigError(
                "no router of this model has a selection bias, so loss-free balancing has nothing to adjust",
                next="drop it",
            )
        wrong = {layer: bias.dtype for layer, bias in self.biases.items() if bias.dtype != torch.float32}
        if wrong:
            layer, dtype = next(iter(wrong.items()))
            raise ConfigError(
                f"the selection bias of layer {layer} is {dtype}; steps of {rate} need torch.float32"
            )

    @torch.no_grad()
    def __call__(self, expert_load: Mapping[int, Sequence[int]]) -> None:
        loads: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, bias_E in self.biases.items():
            before = loads.get(id(bias_E), (bias_E, torch.zeros((), dtype=torch.float64)))[1]
            loads[id(bias_E)] = bias_E, before + torch.tensor(expert_load[layer], dtype=torch.float64)
        for bias_E, load_E in loads.values():
            step_E = send((load_E.mean() - load_E).sign().to(bias_E.dtype), bias_E.device)
            bias_E[..., self._rows].add_(step_E[self._rows], alpha=self.rate)
        self.num_updates += 1

    def tensors(self) -> dict[str, Tensor]:
        return {f"balance.{layer}": bias for layer, bias in self.biases.items()}
