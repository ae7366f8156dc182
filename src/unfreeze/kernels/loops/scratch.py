"""Memory that one call of an op uses and the next call uses again."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

_buffers: dict[
    tuple[int, str, torch.dtype, torch.device], Tensor
] = {}  # the first of the key is the thread (CPU)
# The last views of a buffer, by shape: the same request gets the same tensor.
_views: dict[tuple[int, str, torch.dtype, torch.device], dict[tuple[int, ...], Tensor]] = {}
VIEWS = 4  # of a buffer: a workspace is asked for in two shapes in turn
# What a buffer was filled with: the tensor it was made from, and which part of it.
_contents: dict[tuple[int, str, torch.dtype, torch.device], tuple[weakref.ref[Tensor], object]] = {}


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory of `shape`, the same bytes at each call with this name, dtype and device.

    Contents last until the next such call.

    One buffer per thread and name (on a GPU per name: backward runs in a thread of its own, on the same
    stream as forward, and a second workspace of all experts would cost gigabytes), grown in steps of an
    eighth (on a GPU: as asked) to the largest request so far and never shrunk: flat once it has seen the
    largest expert.
    `release_scratch` gives everything back.
    """
    count = 1
    for size in shape:
        count *= size
    key = _key(name, dtype, device)
    _contents.pop(key, None)
    held = _buffers.get(key)
    views = _views.setdefault(key, {})
    if shape not in views:
        if len(views) == VIEWS:
            views.clear()
        # Whatever the caller's mode, the next one may write with another. A write that autograd would record
        # is refused by torch: the next caller must not inherit it.
        with torch.inference_mode(False), torch.no_grad():
            if held is None or held.numel() < count:
                step = max(1024, 1 << max(0, count.bit_length() - 4)) if device.type == "cpu" else 1
                _buffers.pop(key, None)
                views.clear()
                held = None  # given back before more is asked for
                held = _buffers[key] = torch.empty(-(-count // step) * step, dtype=dtype, device=device)
            views[shape] = held[:count].view(shape)
    return views[shape]


def scratch_of(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: Tensor, part: object
) -> tuple[Tensor, bool]:
    """Give (as `scratch`, whether it still holds that part of `source`).

    Who gets False fills it before anything else asks for that name.
    """
    key = _key(name, dtype, device)
    made_from, had = _contents.get(key, (None, None))
    filled = made_from is not None and made_from() is source and had == part
    memory = scratch(name, shape, dtype, device)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        _contents[key] = (weakref.ref(source), part)
        return memory, filled
    return memory, False  # a recording fills it at each replay


def forget_contents() -> None:
    """After a replay, which writes to buffers without asking for them."""
    _contents.clear()


def _key(name: str, dtype: torch.dtype, device: torch.device) -> tuple[int, str, torch.dtype, torch.device]:
    return (threading.get_ident() if device.type == "cpu" else 0, name, dtype, device)


def scratch_bytes() -> int:
    """Bytes the buffers of all threads hold."""
    return sum(buffer.nbytes for buffer in list(_buffers.values()))


def held() -> list[Tensor]:
    """The buffers as they are now.

    Whoever goes on using their addresses (a recorded graph) keeps them alive by keeping these.
    """
    return list(_buffers.values())


def release_scratch() -> None:
    """Forget all buffers. Not while a call runs in another thread."""
    _buffers.clear()
    _views.clear()
    _contents.clear()
