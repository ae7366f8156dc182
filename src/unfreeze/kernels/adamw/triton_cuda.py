"""AdamW on CUDA: one launch over all tensors of a dtype, each number read and written once.

The CUDA version of numba_cpu.py. Tensors are passed as addresses in a table, so 300 small adapters cost one
launch. The table of tensors that do not move is kept on the device. Addresses of gradients and the step's
numbers are copied at each step, from pinned memory, without a wait.
"""

# A launch takes numbers for constexpr parameters, which the kernel's signature doesn't declare
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unfreeze.kernels.adamw.rule import AdamWRule, AdamWUpdate, numbers_of, refuse_unread

BLOCK = 4096  # numbers per program: few enough that one adapter tensor fills several multiprocessors
TABLES = 256  # cached tables: one per pair of dtypes; for moments in host memory one per 64 MiB and slot
WARPS = 16  # 8 numbers a thread: ptxas spills at 4 warps (docs/measured/ptxas.md)
DTYPES: dict[torch.dtype, tl.dtype] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _step(
    chunks,
    addresses,
    gradients,
    numbers,
    keep1,
    keep2,
    eps,
    scale,
    GRADIENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One update of all tensors of a dtype, a chunk per program.

    chunks [C, 3]: tensor, first, size of the tensor. addresses [n, 4]: master, m, v, weight. gradients [n]:
    their addresses. numbers [n, 3]: 1 - lr · decay, lr / (1 - b1^t), sqrt(1 - b2^t). WEIGHT None: masters are
    the weights. ALIGNED: every address and size is a multiple of 16, so a thread reads 16 bytes at once.
    """
    chunk = chunks + tl.program_id(0) * 3
    tensor = tl.load(chunk)
    first, size = tl.load(chunk + 1), tl.load(chunk + 2)
    if ALIGNED:
        first, size = tl.multiple_of(first, 16), tl.multiple_of(size, 16)
    i = first + tl.arange(0, BLOCK)
    inside = i < size
    address = addresses + tensor * 4
    w_at = tl.load(address).to(tl.pointer_type(tl.float32))
    m_at = tl.load(address + 1).to(tl.pointer_type(tl.float32))
    v_at = tl.load(address + 2).to(tl.pointer_type(tl.float32))
    g_at = tl.load(gradients + tensor).to(tl.pointer_type(GRADIENT))
    if ALIGNED:  # said of the pointers: what is said of a number is lost where it becomes one
        w_at, m_at = tl.multiple_of(w_at, 16), tl.multiple_of(m_at, 16)
        v_at, g_at = tl.multiple_of(v_at, 16), tl.multiple_of(g_at, 16)
    w_i, m_i, v_i, g_i = w_at + i, m_at + i, v_at + i, g_at + i
    g = tl.load(g_i, mask=inside, other=0.0).to(tl.float32) * scale
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
        weight_at = tl.load(address + 3).to(tl.pointer_type(WEIGHT))
        if ALIGNED:
            weight_at = tl.multiple_of(weight_at, 16)
        tl.store(weight_at + i, w.to(WEIGHT), mask=inside)


@torch.no_grad()
def step(updates: Sequence[AdamWUpdate], rule: AdamWRule) -> list[Tensor]:
    """As kernels.adamw.adamw, for float32 masters; gradients and weights in float32 or half precision."""
    refuse_unread(updates, DTYPES)
    kinds: dict[tuple[tl.dtype, tl.dtype | None], list[AdamWUpdate]] = {}
    for u in updates:
        kinds.setdefault(
            (DTYPES[u.gradient.dtype], None if u.weight is None else DTYPES[u.weight.dtype]), []
        ).append(u)
    for (gradient, weight), alike in kinds.items():
        _launch(alike, rule, gradient, weight)
    for u in updates:
        for tensor in (u.master, u.exp_avg, u.exp_avg_sq, *([] if u.weight is None else [u.weight])):
            torch.autograd.graph.increment_version(tensor)  # as torch's in-place operations do
    return [x for u in updates for x in (u.master, u.exp_avg, u.exp_avg_sq)]


def _launch(
    updates: Sequence[AdamWUpdate], rule: AdamWRule, gradient: tl.dtype, weight: tl.dtype | None
) -> None:
    # a copy must live until the launch; afterwards its memory is reused in stream order
    gradients = [u.gradient.contiguous() for u in updates]
    rows = tuple(
        (*(x.data_ptr() for x in (u.master, u.exp_avg, u.exp_avg_sq)), address_of(u.weight), u.master.numel())
        for u in updates
    )
    device = updates[0].master.device
    chunks, addresses = _tables(device, rows)
    if not len(chunks):
        return
    _step[(len(chunks),)](
        chunks,
        addresses,
        _on(device, [g.data_ptr() for g in gradients], torch.int64),
        _on(device, [numbers_of(u, rule) for u in updates], torch.float32),
        rule.betas[0],
        rule.betas[1],
        rule.eps,
        rule.gradient_scale,
        GRADIENT=gradient,
        WEIGHT=weight,
        BLOCK=BLOCK,
        ALIGNED=_multiples(rows) and all(g.data_ptr() % 16 == 0 for g in gradients),
        num_warps=WARPS,
    )


def address_of(weight: Tensor | None) -> int:
    """The tensor's address; 0 for None, which the kernel never reads."""
    return 0 if weight is None else weight.data_ptr()


@functools.lru_cache(maxsize=TABLES)
def _multiples(rows: tuple[tuple[int, int, int, int, int], ...]) -> bool:
    """True if every address and every size is a multiple of 16."""
    return all(number % 16 == 0 for row in rows for number in row)


@functools.lru_cache(maxsize=TABLES)
def _tables(device: torch.device, rows: tuple[tuple[int, int, int, int, int], ...]) -> tuple[Tensor, Tensor]:
    """(chunks, addresses) of tensors that do not move, made once per run; a row's last number is its size.

    Rebuilding them at each step would make the GPU wait: Qwen3-30B's adapters of rank 16 have 200,000 chunks.
    """
    sizes = torch.tensor([row[-1] for row in rows], dtype=torch.int64)
    count = -(-sizes // BLOCK)
    tensor = torch.repeat_interleave(torch.arange(len(rows)), count)
    before = torch.cumsum(count, 0) - count
    first = (torch.arange(len(tensor)) - before[tensor]) * BLOCK
    chunks = torch.stack((tensor, first, sizes[tensor]), dim=1)
    return _on(device, chunks, torch.int64), _on(device, [row[:4] for row in rows], torch.int64)


def _on(device: torch.device, table: Sequence[Any] | Tensor, dtype: torch.dtype) -> Tensor:
    host = torch.as_tensor(table, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
