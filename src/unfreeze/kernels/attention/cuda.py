"""Attention candidates on CUDA: cuDNN's kernel, torch's flash kernel over padded values, FlexAttention.

Shapes as in documents.py. They have not been measured on a GPU yet, so none is chosen without a record. They
ignore `reuse` and recompute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from unfreeze.kernels.attention.sdpa import torch_attention, ungrouped
from unfreeze.kernels.recompute import Reuse

BLOCK = 128  # queries and keys of a block of flex's mask: torch's default


def cudnn(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, reuse: Reuse | None = None) -> Tensor:
    """cuDNN's attention, which takes MLA's q, k of 192 and v of 128 on Hopper.

    RuntimeError if cuDNN doesn't take the inputs.
    """
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch_attention(q_SLHd, *ungrouped(q_SLHd, k_SLGd, v_SLGv), scale)


def padded(
    q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, reuse: Reuse | None = None
) -> Tensor:
    """torch's flash kernel, which takes equal widths only: values are zero-padded to the width of keys."""
    width = v_SLGv.shape[-1]
    k, v = ungrouped(q_SLHd, k_SLGd, F.pad(v_SLGv, (0, q_SLHd.shape[-1] - width)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch_attention(q_SLHd, k, v, scale)[..., :width]


def flex(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, reuse: Reuse | None = None) -> Tensor:
    """FlexAttention with a causal block mask, compiled once for all lengths."""
    q, k, v = (x.transpose(1, 2) for x in (q_SLHd, k_SLGd, v_SLGv))
    grouped = k.shape[1] != q.shape[1]
    o: Any = _compiled()(q, k, v, block_mask=_causal(q.shape[2], q.device), scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@functools.lru_cache(maxsize=256)
def _causal(length: int, device: torch.device) -> BlockMask:
    """create_block_mask for q >= k, without its 10 · length² temporary bytes.

    A block of queries sees all earlier blocks of keys in full, and its own in part.
    """
    blocks, cut = -(-length // BLOCK), length % BLOCK > 0
    row = torch.arange(blocks, dtype=torch.int32, device=device)
    own = (row[:, None] + row) % blocks  # for block i: i first, and only that one counts
    whole, partial = row.clone(), torch.ones_like(row)
    if cut:  # the last block of queries has rows beyond the length, so it sees no block in full
        own[-1], whole[-1], partial[-1] = row, 0, blocks
    return BlockMask.from_kv_blocks(
        partial[None, None],
        own[None, None],
        whole[None, None],
        row.expand(1, 1, blocks, blocks).contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, q, k: q >= k,
        seq_lengths=(length, length),
    )
