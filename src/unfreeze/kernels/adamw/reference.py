"""AdamW by torch's own fused step, one tensor at a time.

With the passes around it: gradients to float32, clipping, the copy to half precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.kernels.adamw.rule import AdamWRule, AdamWUpdate


@torch.no_grad()
def step(updates: Sequence[AdamWUpdate], rule: AdamWRule) -> list[Tensor]:
    """As kernels.adamw.adamw."""
    for u in updates:
        gradient = u.gradient.to(u.master.dtype)
        gradient = gradient * rule.gradient_scale if rule.gradient_scale != 1.0 else gradient
        steps = torch.full((), float(u.step), dtype=torch.float32, device=u.master.device)
        torch._fused_adamw_(  # type: ignore[attr-defined]
            [u.master],
            [gradient],
            [u.exp_avg],
            [u.exp_avg_sq],
            [],
            [steps],
            lr=rule.learning_rate,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            weight_decay=u.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=False,
        )
        if u.weight is not None:
            u.weight.copy_(u.master)
    return [x for u in updates for x in (u.master, u.exp_avg, u.exp_avg_sq)]
