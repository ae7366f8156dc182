"""Bytes of torch's memory alive at once, counted by torch's own dispatch: on meta too, where nothing lies."""

import functools
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from unfreeze.core.cpu import multiplies_bf16


class Mode(TorchDispatchMode):
    """Without the frames that torch puts around each operation for its compiler, which nothing uses here."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False


class Live(Mode):
    """Bytes of all storages that live, beyond those `there` before, and the most there ever were.

    Autograd adds a second gradient in place to a first that nobody else holds; under a dispatch mode it makes
    a third tensor. Such a sum is counted as what runs without one. allowing: False counts the third.
    """

    def __init__(self, there=(), allowing=True):
        super().__init__()
        alone()
        self.allowing = allowing
        self.now = self.peak = 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in there}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        in_place = function is ADD and self.allowing and references(args[0]) == alone() and by_autograd()
        out = quick(function, args, kwargs or {})
        if in_place:
            key = args[0].untyped_storage()._cdata
            self.now -= self.sizes.get(key, 0)
            self.sizes[key] = 0
        for tensor in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key)

    def gone(self, key):
        self.now -= self.sizes.pop(key, 0)


ADD = torch.ops.aten.add.Tensor
ATEN = torch.ops.aten
INTO = {  # an operation that writes to `out` or its first argument: the one that returns the same
    ATEN.mm.out: ATEN.mm.default,
    ATEN.addmm.out: ATEN.addmm.default,
    ATEN.addmm_.default: ATEN.addmm.default,
}
ATTENTION = (
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
BF16 = multiplies_bf16()
PRODUCTS = {*INTO, *INTO.values(), ATEN.bmm.default, ATEN.baddbmm.default, *ATTENTION}


def quick(function, args, kwargs):
    """The operation's result. A CPU without bf16 units multiplies in float32, 40 times as fast: what lies on the
    way is not counted, and tensors of the same size and dtype come out."""
    if function not in PRODUCTS or args[0].dtype != torch.bfloat16 or args[0].device.type != "cpu" or BF16:
        return function(*args, **kwargs)
    target = kwargs.get("out", args[0]) if function in INTO else None
    left = {key: value for key, value in kwargs.items() if key != "out"}
    wide, named = tree_map_only(torch.Tensor, torch.Tensor.float, (args, left))
    out = INTO.get(function, function)(*wide, **named)
    if target is not None:
        return target.copy_(out)
    if function is ATTENTION[0]:
        return out[0].bfloat16(), out[1]  # and the sums of exponentials
    return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, out)


def references(tensor):
    """To the tensor in C++, to its storage, and in Python."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)


@functools.cache
def alone():
    """`references` of a gradient that autograd alone holds, as a dispatch mode sees them."""
    seen = []

    class Look(Mode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is ADD:
                seen.append(references(args[0]))
            return function(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True) * 1
    with Look():
        torch.stack((x * 2, x * 3)).sum().backward()
    return seen[-1]


def by_autograd():
    """Whether autograd itself runs the operation, not a line of Python."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in ("_fn", "inner"):  # torch's own around a dispatch mode
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"
