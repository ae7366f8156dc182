"""AdamW on CUDA: one launch over all tensors of a dtype, each number read and written once.

As numba_cpu.py does it on a CPU. Tensors arrive as addresses in a table, so that 300 small adapters cost one
launch. The table goes to the device from pinned memory, without a wait.
"""

# A launch takes numbers for constexpr parameters, which the kernel's own signature doesn't say
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.adamw.rule import Rule, Update, numbers_of, refuse_unread

BLOCK = 4096  # numbers of a program: few enough that a tensor of an adapter fills several multiprocessors
WARPS = 16  # 8 numbers a thread: ptxas spills at 4 warps (docs/ptxas.md)
DTYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _step(
    chunks,
    addresses,
    numbers,
    keep1,
    keep2,
    eps,
    scale,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One update of all tensors of a dtype, a chunk per program.

    chunks [C, 3]: tensor, first, size of the tensor. addresses [n, 5]: master, m, v, gradient, weight.
    numbers [n, 3]: 1 - lr · decay, lr / (1 - b1^t), sqrt(1 - b2^t). WEIGHT None: masters are the weights.
    """
    chunk = chunks + tl.program_id(0) * 3
    tensor = tl.load(chunk)
    i = tl.load(chunk + 1) + tl.arange(0, BLOCK)
    inside = i < tl.load(chunk + 2)
    address = addresses + tensor * 5
    w_i = tl.load(address).to(tl.pointer_type(tl.float32)) + i
    m_i = tl.load(address + 1).to(tl.pointer_type(tl.float32)) + i
    v_i = tl.load(address + 2).to(tl.pointer_type(tl.float32)) + i
    g = (
        tl.load(tl.load(address + 3).to(tl.pointer_type(GRADIENT)) + i, mask=inside, other=0.0).to(tl.float32)
        * scale
    )
    m = tl.load(m_i, mask=inside, other=0.0)
    v = tl.load(v_i, mask=inside, other=0.0)
    m += (g - m) * (1.0 - keep1)
    v = v * keep2 + g * g * (1.0 - keep2)
    shrink, size, root = (
        tl.load(numbers + tensor * 3),
        tl.load(numbers + tensor * 3 + 1),
        tl.load(numbers + tensor * 3 + 2),
    )
    w = tl.load(w_i, mask=inside, other=0.0) * shrink - size * m / (tl.sqrt(v) / root + eps)
    tl.store(w_i, w, mask=inside)
    tl.store(m_i, m, mask=inside)
    tl.store(v_i, v, mask=inside)
    if WEIGHT is not None:
        tl.store(tl.load(address + 4).to(tl.pointer_type(WEIGHT)) + i, w.to(WEIGHT), mask=inside)


@torch.no_grad()
def step(updates: Sequence[Update], rule: Rule) -> list[Tensor]:
    """As kernels.adamw.adamw, for float32 masters; gradients and weights in float32 or half precision."""
    refuse_unread(updates, DTYPES)
    kinds: dict[tuple[tl.dtype, tl.dtype | None], list[Update]] = {}
    for u in updates:
        kinds.setdefault(
            (DTYPES[u.gradient.dtype], None if u.weight is None else DTYPES[u.weight.dtype]), []
        ).append(u)
    for (gradient, weight), alike in kinds.items():
        _launch(alike, rule, gradient, weight)
    for u in updates:
        for tensor in (u.master, u.exp_avg, u.exp_avg_sq, *([] if u.weight is None else [u.weight])):
            torch.autograd.graph.increment_version(tensor)  # as an in-place operation of torch does
    return [x for u in updates for x in (u.master, u.exp_avg, u.exp_avg_sq)]


def _launch(updates: Sequence[Update], rule: Rule, gradient: tl.dtype, weight: tl.dtype | None) -> None:
    # a copy must live until the launch; its memory is then reused in the stream's order
    gradients = [u.gradient.contiguous() for u in updates]
    tensors = [
        (u.master, u.exp_avg, u.exp_avg_sq, g, u.master if u.weight is None else u.weight)
        for u, g in zip(updates, gradients, strict=True)
    ]
    chunks = [
        (index, first, u.master.numel())
        for index, u in enumerate(updates)
        for first in range(0, u.master.numel(), BLOCK)
    ]
    if not chunks:
        return
    device = updates[0].master.device
    _step[(len(chunks),)](
        _on(device, chunks, torch.int64),
        _on(device, [[x.data_ptr() for x in five] for five in tensors], torch.int64),
        _on(device, [numbers_of(u, rule) for u in updates], torch.float32),
        rule.betas[0],
        rule.betas[1],
        rule.eps,
        rule.gradient_scale,
        GRADIENT=gradient,
        WEIGHT=weight,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def _on(device: torch.device, table: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    made = torch.tensor(table, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
