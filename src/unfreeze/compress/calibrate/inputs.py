"""The inputs of a layer's matrices, collected while rows go through it.

Of a linear layer only H = 2/n Σ x xᵀ is kept; layers that read the same tensor (q, k and v; gate and up)
share it. Of experts their inputs and the choice of each token are kept: an expert's H is computed when its
matrices are rounded, from the tokens that it was chosen for. So one expert's H is in memory at a time.

T tokens, K experts per token, D model width, I expert width, n tokens of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from unfreeze.compress.calibrate.gptq import Hessian
from unfreeze.models.blocks.experts import Experts


class Inputs:
    """with Inputs(modules by name): rows run through the layer; then `linear` and `expert` have their inputs.

    A module that is never called (its matrix is used another way) has no inputs.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = modules
        self._hessians: dict[str, Hessian] = {}
        self._same: dict[str, str] = {}
        self._seen: dict[int, tuple[Tensor, str]] = {}
        self._routed: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._divided: set[str] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for name, module in self._modules.items():
            hook = self._of_experts(name) if isinstance(module, Experts) else self._of_linear(name)
            self._hooks.append(module.register_forward_pre_hook(hook))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._seen.clear()

    def next_batch(self) -> None:
        """Forget which tensors were seen: call it after each batch."""
        self._seen.clear()

    def add(self, name: str, x_TI: Tensor) -> None:
        """Add inputs of a linear layer that need not be called for them."""
        self._hessians.setdefault(name, Hessian(x_TI.shape[-1])).add(x_TI)

    def linear(self, name: str) -> Hessian | None:
        """H of a linear layer's inputs; None if it was never called."""
        return self._hessians.get(self._same.get(name, name))

    def mean(self, name: str) -> tuple[Tensor, int]:
        """(mean of |x| [D] over all tokens that experts of this name got, their number)."""
        routed = self._routed[name]
        tokens = sum(len(x_TD) for x_TD, _ in routed)
        return torch.stack([x_TD.float().abs().sum(0) for x_TD, _ in routed]).sum(0) / tokens, tokens

    def divide(self, name: str, s_I: Tensor) -> None:
        """Divide the inputs of a linear layer, and of all that read the same tensor, by s, once."""
        owner = self._same.get(name, name)
        if owner in self._hessians and owner not in self._divided:
            self._hessians[owner].divide(s_I)
            self._divided.add(owner)

    def expert(self, name: str, expert: int) -> Tensor:
        """The inputs [n, D] of one expert."""
        return torch.cat([x_TD[(ids_TK == expert).any(1)] for x_TD, ids_TK in self._routed[name]])

    def called(self, name: str) -> bool:
        """True if the experts of this name were called."""
        return name in self._routed

    def _of_linear(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_TI: Tensor = arguments[0]
            _, first = self._seen.get(id(x_TI), (x_TI, name))
            owner = self._same.setdefault(name, first)
            self._seen[id(x_TI)] = x_TI, owner  # held, so that its id stays its own
            if owner == name:
                self.add(name, x_TI)

        return hook

    def _of_experts(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x_TD, ids_TK = arguments[:2]
            self._routed.setdefault(name, []).append((x_TD.detach(), ids_TK))

        return hook


@torch.no_grad()
def inner(experts: Experts, expert: int, x_nD: Tensor) -> Tensor:
    """h [n, I]: what one expert's down_proj reads, with its weights as they are."""
    both = x_nD @ experts.gate_up_proj.value()[expert].to(x_nD.dtype).t()  # type: ignore[union-attr]
    bias, _ = experts.biases()
    both = both if bias is None else both + bias[expert]
    return experts.activation.forward(*experts.activation.split(both))
