"""Attention candidates on CUDA: cuDNN's kernel, torch's flash kernel over padded values, FlexAttention. Shapes as in documents.py.

Their speed on a GPU is not measured yet, so none is chosen until a record says so. `kept` is not used: a second visit computes again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from unfreeze.kernels.attention.sdpa import plain

Kept = Callable[..., Any]


def cudnn(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, kept: Kept | None = None) -> Tensor:
    """cuDNN's attention, which takes MLA's q, k of 192 and v of 128 on Hopper. RuntimeError where cuDNN doesn't take the inputs."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return plain(q_SLHd, *_ungrouped(q_SLHd, k_SLGd, v_SLGv), scale)


def padded(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, kept: Kept | None = None) -> Tensor:
    """torch's flash kernel, which takes equal widths only: values padded with zeros to the width of keys."""
    width = v_SLGv.shape[-1]
    k, v = _ungrouped(q_SLHd, k_SLGd, F.pad(v_SLGv, (0, q_SLHd.shape[-1] - width)))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return plain(q_SLHd, k, v, scale)[..., :width]


def flex(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor, scale: float, kept: Kept | None = None) -> Tensor:
    """FlexAttention with a causal block mask, compiled once for all lengths."""
    q, k, v = (x.transpose(1, 2) for x in (q_SLHd, k_SLGd, v_SLGv))
    grouped = k.shape[1] != q.shape[1]
    o: Any = _compiled()(q, k, v, block_mask=_causal(q.shape[2], q.device), scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)


def _ungrouped(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values per query head: whether a backend takes grouped ones depends on its version."""
    repeat = q_SLHd.shape[2] // k_SLGd.shape[2]
    return (k_SLGd, v_SLGv) if repeat == 1 else (k_SLGd.repeat_interleave(repeat, dim=2), v_SLGv.repeat_interleave(repeat, dim=2))


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@functools.lru_cache(maxsize=256)
def _causal(length: int, device: torch.device) -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)
