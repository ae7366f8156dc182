"""One AdamW step over a list of tensors: adapters (many and small) or all weights of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unfreeze.kernels.adamw import reference
from unfreeze.kernels.adamw.rule import AdamWRule, AdamWUpdate
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Implementation, Op
from unfreeze.kernels.loops import triton_options

__all__ = ["OP", "AdamWRule", "AdamWUpdate", "adamw", "bucket"]

SMALL = 1 << 20  # numbers per tensor on average; below this the overhead of a call counts


def adamw(
    updates: Sequence[AdamWUpdate],
    rule: AdamWRule,
    impl: str = "auto",
    among: Sequence[AdamWUpdate] | None = None,
) -> list[Tensor]:
    """Update weights in place by AdamW, all tensors on one device.

        g = s grad;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g²
        w = w (1 - lr decay) - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)

    among: all updates of this step, if `updates` are only a part of them. The implementation is then chosen
    for all, so the bits are the same. A half precision weight beside its float32 master gets the rounded
    master. Returns master, exp_avg and exp_avg_sq of each tensor.
    Source: Loshchilov & Hutter, arXiv:1711.05101; the arithmetic of torch.optim.AdamW to float32 rounding.
    """
    master = updates[0].master
    return choose(OP, master.device, master.dtype, bucket(among or updates, rule), impl)(updates, rule)


def bucket(updates: Sequence[AdamWUpdate], rule: AdamWRule) -> str:
    """The bucket by the size of the tensors, and by half precision weights and gradients."""
    small = sum(u.master.numel() for u in updates) < SMALL * len(updates)
    half = any(u.weight is not None for u in updates)
    return f"{'small' if small else 'large'} tensors, {'half precision weights' if half else 'as they are'}"


def _load_numba() -> Implementation:
    from unfreeze.kernels.adamw import numba_cpu

    return numba_cpu.step


def _load_triton() -> Implementation:
    from unfreeze.kernels.adamw import triton_cuda

    return triton_cuda.step


def _triton_refuses(device: str, dtype: torch.dtype) -> str:
    return triton_options.refuses(device, dtype) or (
        "" if dtype == torch.float32 else f"{dtype}: it keeps float32 masters"
    )


def _numba_refuses(device: str, dtype: torch.dtype) -> str:
    if device != "cpu":
        return f"it runs on cpu, not {device}"
    return "" if dtype == torch.float32 else f"{dtype}: its loops keep float32 masters"


def _case(sizes: Sequence[tuple[int, ...]], half: bool, step: int = 10) -> Case:
    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        updates = []
        for size in sizes:
            master, gradient, m, v = (torch.randn(size, generator=generator) for _ in range(4))
            gradient = gradient.to(device, torch.bfloat16 if half else dtype)
            weight = master.to(device, torch.bfloat16) if half else None
            master, m, v = (x.to(device, dtype) for x in (master, 0.1 * m, v.square()))
            updates.append(AdamWUpdate(master, gradient, m, v, weight, weight_decay=0.1, step=step))
        return updates, AdamWRule(learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-8, gradient_scale=0.5)

    blank = [torch.empty(size, device="meta") for size in sizes]
    metas = [AdamWUpdate(x, x, x, x, x if half else None, weight_decay=0.0, step=1) for x in blank]
    return Case(bucket(metas, AdamWRule(0.0, (0.0, 0.0), 0.0)), inputs, (torch.float32,))


OP = Op(
    name="adamw",
    reference=reference.step,
    candidates={
        "numba": Candidate(
            _load_numba,
            _numba_refuses,
            predicted_on=("cpu",),
            because="one pass over all tensors, the reference two for each",
        ),
        "triton": Candidate(
            _load_triton,
            _triton_refuses,
            named_on=("cpu",),
            predicted_on=("cuda",),
            waits_on=("cuda",),
            because="28 bytes a parameter in one launch, the reference 36 in two for each tensor",
        ),
    },
    cases=(
        _case([(8, 1024)] * 300, False),
        _case([(128, 16, 1024)] * 8, False),
        _case([(896, 896)] * 20, True),
        _case([(4864, 896)] * 4, True),
    ),
    # bias correction is largest in the first step
    uses=tuple(replace(_case([(7, 13), (4097,)], half, step=1), name="first step") for half in (False, True)),
    tolerance={torch.float32: 1e-6},  # a handful of float32 roundings per number
    differentiable=False,
)
