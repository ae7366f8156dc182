"""Tracks the matrices that a gradient reached, at their modules' outputs during backward.

A weight's gradient is a sum over tokens of (gradient of its output) x (its input). A zero gradient of the
weight is correct if one of the two is zero for every token:

    the output's gradient   an expert without tokens, or one of the last layer whose tokens are unsupervised
    the input               a weight after a norm or a matrix of zeros (a bias has no input)

If a token has both and the weight's gradient is still zero, something left the weight out. Only outputs and
inputs can distinguish the two cases, so they are watched.

T tokens, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.tokens import TokenRows
from unfreeze.models import Decoder
from unfreeze.models.blocks.embedding import Embedding
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.layer import Layer

Sum = Callable[[list[Tensor]], Any]
"""Sums tensors over all processes, in place (parallel.collectives.Group.sum_)."""


class Reach:
    """Watches the backward passes of a model until `close`; `of` returns the results.

    A forward hook on every module that owns a trained parameter puts a hook on its output, so recomputed
    layers are covered too. It costs one pass over each input and each output's gradient; no gradient is
    changed, and nothing waits for the device.
    """

    def __init__(self, model: Decoder):
        watched = {name: m for name, m in model.named_modules() if isinstance(m, Layer) or _trains(m)}
        self._seen: dict[str, Tensor] = {}
        self._sites = {
            name: module.num_experts if isinstance(module, Experts) else 2 for name, module in watched.items()
        }
        self._stacks = {name for name, module in watched.items() if isinstance(module, Experts)}
        self._handles = [m.register_forward_hook(partial(self._forward, name)) for name, m in watched.items()]

    def _forward(self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if not (isinstance(output, Tensor) and output.requires_grad):
            return
        if isinstance(module, Experts):
            output.register_hook(
                partial(self._experts, name, module.num_experts, _alive(arguments[0]), *arguments[1:3])
            )
        else:
            has_input = not isinstance(module, Layer) and bool(arguments) and arguments[0].is_floating_point()
            fed_T = _alive(arguments[0]) if has_input else None
            if isinstance(module, Embedding) and isinstance(module.adapter, TokenRows):
                fed_T = module.adapter.places[arguments[0]] >= 0
            output.register_hook(partial(self._whole, name, fed_T))

    @torch.no_grad()
    def _whole(self, name: str, fed_T: Tensor | None, dy: Tensor) -> None:
        """Record two flags: some token has a gradient at the output; some token has a nonzero input too."""
        alive_T = _alive(dy)
        both_T = alive_T if fed_T is None else alive_T & fed_T
        self._add(name, torch.stack([alive_T.any(), both_T.any()]).double())

    @torch.no_grad()
    def _experts(
        self, name: str, num_experts: int, fed_T: Tensor, ids_TK: Tensor, weights_TK: Tensor, dy_TD: Tensor
    ) -> None:
        """A token reaches an expert if x_t, dy_t and the weight are not zero.

        Its output adds weight · expert(x_t) to y_t.
        """
        alive_T = _alive(dy_TD) & fed_T
        hits = (alive_T[:, None] & weights_TK.ne(0)).double().flatten()
        self._add(name, hits.new_zeros(num_experts).scatter_add_(0, ids_TK.flatten(), hits))

    def _add(self, name: str, hits: Tensor) -> None:
        self._seen[name] = self._seen[name] + hits if name in self._seen else hits

    def of(self, module: str, count: int, device: torch.device, *, bias: bool = False) -> Tensor:
        """bool [count]: True for each of a module's sites (E experts, or 1) that was reached.

        A site is reached if it had a gradient at its output and, except for a bias, an input at the same
        token. A module whose call was not seen (part of a larger op, or left out) counts as reached if its
        layer's output was. Outside the layers it always does: the loss passes through embedding and head.
        """
        if module in self._seen:
            seen = self._seen[module].gt(0)
            return seen if module in self._stacks else seen[:1] if bias else seen[1:]
        layer = ".".join(module.split(".")[:3])  # model.layers.<index>
        reached = (
            bool(self._seen[layer][0].gt(0)) if layer in self._seen else not layer.startswith("model.layers.")
        )
        return torch.full((count,), reached, device=device)

    def over_processes(self, sum_: Sum, device: torch.device) -> None:
        """Combine the results of all processes: each saw its own share of the micro-batches."""
        hits = [torch.zeros(1 + sites, dtype=torch.float64, device=device) for sites in self._sites.values()]
        for name, hits_1S in zip(self._sites, hits, strict=True):
            if name in self._seen:
                hits_1S.copy_(torch.cat([self._seen[name].new_ones(1), self._seen[name]]))
        sum_(hits)
        self._seen = {
            name: hits_1S[1:] for name, hits_1S in zip(self._sites, hits, strict=True) if hits_1S[0]
        }

    def forget(self) -> None:
        """Start again: the results so far belong to a step without an update."""
        self._seen.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


@torch.no_grad()
def _alive(x: Tensor) -> Tensor:
    """bool [T]: the tokens at which a tensor [T, …] is not zero."""
    return torch.linalg.vector_norm(x.detach().flatten(1), ord=math.inf, dim=1).gt(0)


def _trains(module: nn.Module) -> bool:
    """True if it owns a trained parameter: its own, its adapter's, or its stacked experts'."""
    inner = [module, getattr(module, "adapter", None)]
    if isinstance(module, Experts):
        inner += [module.gate_up_proj, module.down_proj]
    return any(
        p.requires_grad
        for part in inner
        if isinstance(part, nn.Module)
        for p in part.parameters(recurse=False)
    )
