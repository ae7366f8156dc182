"""AdamW by torch's own fused step, many tensors in a call.

Gradients that are in half precision or clipped are copied to float32 first, some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from unfreeze.kernels.adamw.rule import AdamWRule, AdamWUpdate

AT_ONCE = 1 << 22  # numbers in one call, and so of copied gradients: 16 MiB


@torch.no_grad()
def step(updates: Sequence[AdamWUpdate], rule: AdamWRule) -> list[Tensor]:
    """As kernels.adamw.adamw."""
    pieces = [piece for u in updates for piece in _pieces(u)]
    for decay in dict.fromkeys(u.weight_decay for u in pieces):
        some, count = [], 0
        for u in pieces:
            if u.weight_decay != decay:
                continue
            if some and count + u.master.numel() > AT_ONCE:
                _fused(some, rule, decay)
                some, count = [], 0
            some.append(u)
            count += u.master.numel()
        _fused(some, rule, decay)
    for u in updates:
        for tensor in (u.master, u.exp_avg, u.exp_avg_sq, *([] if u.weight is None else [u.weight])):
            torch.autograd.graph.increment_version(tensor)  # the fused step itself does not say so
    return [x for u in updates for x in (u.master, u.exp_avg, u.exp_avg_sq)]


def _pieces(u: AdamWUpdate) -> Iterator[AdamWUpdate]:
    """The update of one tensor, in parts of at most AT_ONCE numbers: views."""
    if u.master.numel() <= AT_ONCE or not all(x.is_contiguous() for x in (u.master, u.exp_avg, u.exp_avg_sq)):
        yield u
        return
    parts = [x.view(-1).split(AT_ONCE) for x in (u.master, u.exp_avg, u.exp_avg_sq)]
    gradients = u.gradient.reshape(-1).split(AT_ONCE)
    weights = [None] * len(gradients) if u.weight is None else u.weight.view(-1).split(AT_ONCE)
    for w, m, v, g, half in zip(*parts, gradients, weights, strict=True):
        yield AdamWUpdate(w, g, m, v, half, u.weight_decay, u.step)


def _fused(updates: Sequence[AdamWUpdate], rule: AdamWRule, decay: float) -> None:
    """One call for tensors of one decay, then their copies in half precision."""
    scale = rule.gradient_scale
    gradients = [u.gradient.to(u.master.dtype) for u in updates]
    if scale != 1.0:
        gradients = torch._foreach_mul(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
    masters = [u.master for u in updates]
    torch._fused_adamw_(  # type: ignore[attr-defined]
        masters,
        gradients,
        [u.exp_avg for u in updates],
        [u.exp_avg_sq for u in updates],
        [],
        [torch.full((), float(u.step), dtype=torch.float32, device=u.master.device) for u in updates],
        lr=rule.learning_rate,
        beta1=rule.betas[0],
        beta2=rule.betas[1],
        weight_decay=decay,
        eps=rule.eps,
        amsgrad=False,
        maximize=False,
    )
    halves = [u.weight for u in updates if u.weight is not None]
    if halves:
        of = [u.master for u in updates if u.weight is not None]
        torch._foreach_copy_(halves, of)  # pyright: ignore[reportPrivateImportUsage]
