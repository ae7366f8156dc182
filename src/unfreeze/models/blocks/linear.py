"""Linear: y = x Wᵀ + b, with W dense or packed (4 bits), and one joint where an adapter can be attached.

T rows, in/out features.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.kernels.dense_mlp import Projection
from unfreeze.kernels.expand import expand
from unfreeze.kernels.linear_cross_entropy import DenseHead
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.skinny_linear import is_skinny, skinny_linear
from unfreeze.models.blocks.saved import Skip
from unfreeze.quant.codec import Codec, Packed


class PackedHolder(nn.Module):
    """Registers the parts of a packed weight as buffers, optionally stacked over E experts.

    The buffers are named by the codec's suffixes.
    """

    codec: Codec | None

    def register_packed(
        self,
        codec: Codec,
        out_features: int,
        in_features: int,
        leading: tuple[int, ...] = (),
        device: torch.device | str | None = None,
    ) -> None:
        for suffix, (dtype, shape) in codec.parts(out_features, in_features).items():
            self.register_buffer(
                suffix, torch.empty((*leading, *shape), dtype=TORCH_DTYPE[dtype], device=device)
            )

    @property
    def packed(self) -> Packed:
        assert self.codec is not None
        return Packed(
            self.codec,
            {suffix: getattr(self, suffix) for suffix in self.codec.suffixes if hasattr(self, suffix)},
        )


class _PackedLinear(torch.autograd.Function):
    """y = x · expand(W)ᵀ. W is expanded in forward and again in backward; nothing expanded is saved."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return F.linear(x_TI, _expanded(packed, x_TI))

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, None]:
        return dy_TO @ _expanded(ctx.packed, dy_TO), None


def _matrix(weight: Tensor | None, packed: Packed | None, x_TI: Tensor) -> Tensor:
    """W as a tensor: `weight` itself, or what `packed` expands to in x's dtype."""
    if weight is not None:
        return weight
    assert packed is not None  # a linear layer has one of the two
    return _expanded(packed, x_TI)


class _ReusedLinear(torch.autograd.Function):
    """y = x Wᵀ + b, where a layer's second visit reuses y: no GEMM then, gradients the same to the bit.

    Zeros where `reuse` gives None at the second visit: nobody reads y there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        packed: Packed | None,
        reuse: Reuse | Skip,
    ) -> Tensor:
        ctx.packed = packed
        ctx.save_for_backward(x_TI if ctx.needs_input_grad[1] else None, weight)
        y_TO = reuse(lambda: F.linear(x_TI, _matrix(weight, packed, x_TI), bias))
        if y_TO is None:
            matrix = packed if weight is None else weight
            assert matrix is not None  # a linear layer has one of the two
            return x_TI.new_zeros(*x_TI.shape[:-1], matrix.shape[-2])
        return y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight = ctx.saved_tensors
        dx = (
            dy_TO @ (_expanded(ctx.packed, dy_TO) if weight is None else weight)
            if ctx.needs_input_grad[0]
            else None
        )
        dw = dy_TO.t() @ x_TI if ctx.needs_input_grad[1] else None
        return dx, dw, dy_TO.sum(0) if ctx.needs_input_grad[2] else None, None, None


def _expanded(packed: Packed, like: Tensor) -> Tensor:
    out = torch.empty(packed.shape[-2:], dtype=like.dtype, device=like.device)
    return expand(packed, None, out)


class LinearAdapter(Protocol):
    """What adapts one Linear: called with (x [T, in], y [T, out]) -> y + what it adds."""

    def __call__(self, x_TI: Tensor, y_TO: Tensor) -> Tensor: ...

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """(A [R, in], B [out, R], scale), for a layer that multiplies in another order."""
        ...


class Linear(PackedHolder):
    """y = x Wᵀ + b (+ adapter(x)).

    x [T, in] -> y [T, out]. `codec` None: W is a parameter `weight` [out, in]; otherwise W stays packed in
    buffers and is expanded at use.
    `reuse`: where the layer is recomputed, x Wᵀ + b of its first visit is reused at the second
    (PackedPass.reuse_linear). What an adapter adds is computed again.
    `adapter` is set by adapters.attach and by nothing else.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        codec: Codec | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        super().__init__()
        self.in_features, self.out_features, self.codec = in_features, out_features, codec
        self.dtype = dtype
        if codec is None:
            self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        else:
            self.register_packed(codec, out_features, in_features, device=device)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.adapter: LinearAdapter | None = None

    def forward(self, x_TI: Tensor, reuse: Reuse | Skip | None = None) -> Tensor:
        if reuse is not None:
            weight, packed = (self.weight, None) if self.codec is None else (None, self.packed)
            y_TO = _ReusedLinear.apply(x_TI, weight, self.bias, packed, reuse)
        elif self.codec is None:
            linear = skinny_linear if is_skinny(x_TI, self.weight) else F.linear
            y_TO = linear(x_TI, self.weight, self.bias)
        else:
            y_TO = _PackedLinear.apply(x_TI, self.packed)
            if self.bias is not None:
                y_TO = y_TO + self.bias
        return y_TO if self.adapter is None else self.adapter(x_TI, y_TO)

    def projection(self) -> Projection | None:
        """This layer as tensors, for an op made of several layers (kernels/dense_mlp).

        None where W is packed: it is expanded outside of any graph.
        """
        if self.codec is not None:
            return None
        if self.adapter is None:
            return Projection(self.weight, self.bias)
        A_RI, B_OR, scale = self.adapter.factors()
        return Projection(self.weight, self.bias, A_RI, B_OR, scale)

    def dense_head(self) -> DenseHead | None:
        """This layer as tensors, for a kernel that multiplies itself; None where it is more than W x + b."""
        return DenseHead(self.weight, self.bias) if self.codec is None and self.adapter is None else None

    def matrix(self) -> Tensor:
        """W [out, in] for reading, without bias and adapter.

        The parameter itself, or the packed weight expanded to the dtype of the computation.
        """
        return self.weight if self.codec is None else self.packed.dequantize().to(self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}" + (f", {self.codec.name}" if self.codec else "")
