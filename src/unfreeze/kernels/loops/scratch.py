"""Scratch memory that successive calls of an op reuse."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

_buffers: dict[
    tuple[int, str, torch.dtype, torch.device], Tensor
] = {}  # the first element of the key is the thread (CPU)
# The last views of a buffer, by shape: the same request returns the same tensor.
_views: dict[tuple[int, str, torch.dtype, torch.device], dict[tuple[int, ...], Tensor]] = {}
VIEWS = 4  # per buffer: a workspace is requested in two shapes in turn
# The contents of a buffer: the tensor they were computed from, and the part of it.
_contents: dict[tuple[int, str, torch.dtype, torch.device], tuple[weakref.ref[Tensor], object]] = {}


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory of `shape`, the same bytes at each call with this name, dtype and device.

    Contents last until the next such call.

    One buffer per thread and name. On a GPU one per name: backward runs in another thread, but on the same
    stream as forward, and a second workspace of all experts would cost gigabytes. A buffer grows in steps of
    an eighth (on a GPU: exactly) to the largest request so far and never shrinks: its size is constant once
    it has seen the largest expert. `release_scratch` frees everything.
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
        # The next caller may write in another grad mode, and torch refuses writes that autograd would record.
        # So the buffer must not inherit this caller's mode.
        with torch.inference_mode(False), torch.no_grad():
            if held is None or held.numel() < count:
                step = max(1024, 1 << max(0, count.bit_length() - 4)) if device.type == "cpu" else 1
                _buffers.pop(key, None)
                views.clear()
                held = None  # freed before more is allocated
                held = _buffers[key] = torch.empty(-(-count // step) * step, dtype=dtype, device=device)
            views[shape] = held[:count].view(shape)
    return views[shape]


def scratch_of(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, source: Tensor, part: object
) -> tuple[Tensor, bool]:
    """(memory as from `scratch`, True if it still holds that part of `source`).

    A caller that gets False must fill it before anything else requests that name.
    """
    key = _key(name, dtype, device)
    made_from, had = _contents.get(key, (None, None))
    filled = made_from is not None and made_from() is source and had == part
    memory = scratch(name, shape, dtype, device)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        _contents[key] = (weakref.ref(source), part)
        return memory, filled
    return memory, False  # a recorded graph fills it at each replay


def forget_contents() -> None:
    """Call after a replay, which writes to buffers without requesting them."""
    _contents.clear()


def _key(name: str, dtype: torch.dtype, device: torch.device) -> tuple[int, str, torch.dtype, torch.device]:
    return (threading.get_ident() if device.type == "cpu" else 0, name, dtype, device)


def scratch_bytes() -> int:
    """Bytes of the buffers of all threads."""
    return sum(buffer.nbytes for buffer in list(_buffers.values()))


def held() -> list[Tensor]:
    """The current buffers.

    A caller that keeps using their addresses (a recorded graph) must keep these references.
    """
    return list(_buffers.values())


def release_scratch() -> None:
    """Free all buffers. Not while a call runs in another thread."""
    _buffers.clear()
    _views.clear()
    _contents.clear()
