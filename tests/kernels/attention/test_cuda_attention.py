"""torch's own attention as CUDA runs it, seen on meta."""

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze.kernels.attention import sdpa


class Squares(TorchDispatchMode):
    """Whether a tensor has two dimensions of `length`."""

    def __init__(self, length):
        super().__init__()
        self.length, self.seen = length, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        shapes = [t.shape for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.seen |= any(list(shape).count(self.length) > 1 for shape in shapes)
        return out


def as_on_a_gpu(q, k, v, *, is_causal, scale, enable_gqa):
    """Which kernel torch takes in float32 on CUDA: flash never, the efficient one only where no heads are
    grouped (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    if enable_gqa:
        return torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=True
        )[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, False, 0.0, is_causal, scale=scale
    )[0]


def test_grouped_heads_in_float32_hold_no_scores(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", as_on_a_gpu)
    q, k, v = (torch.empty(2, 300, n, 64, device="meta") for n in (8, 2, 2))
    with Squares(300) as seen:
        assert sdpa.sdpa(q, k, v, 0.1).shape == q.shape
    assert not seen.seen
    with Squares(300) as seen:  # control arm: grouped
        sdpa.torch_attention(q, k, v, 0.1)
    assert seen.seen
