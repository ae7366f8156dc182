"""Linear: y = x Wᵀ + b, with W dense or packed (4 bits), and one place to attach an adapter.

A frozen W may be held in a narrower dtype than the computation's, as in the files: bf16 under float32. It is
widened panel by panel as it is used (kernels/widened.py).

T rows, in/out features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.kernels.expand import expand
from unfreeze.kernels.linear_cross_entropy import DenseHead
from unfreeze.kernels.recompute import Reuse, compute_now
from unfreeze.kernels.skinny_linear import is_skinny, skinny_linear
from unfreeze.kernels.widened import times, times_transposed
from unfreeze.models.blocks.saved import Skip
from unfreeze.quant.codec import Codec, Packed

if TYPE_CHECKING:
    from unfreeze.kernels.decode_step.program import Row
    from unfreeze.models.blocks.each import LinearAdapters
    from unfreeze.models.blocks.recording import Recording


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


Product = Callable[[Tensor, Any, Tensor | None], Tensor]
"""(x, W, b) -> x Wᵀ + b."""


class _FrozenLinear(torch.autograd.Function):
    """y = x · wide(W)ᵀ, with W packed or in a narrower dtype than x.

    W is widened in forward and again in backward; no wide copy is saved.
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, base: Tensor | Packed) -> Tensor:
        ctx.base = base
        return _product(x_TI, base)

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor, None]:
        return _product_back(dy_TO, ctx.base), None


def _product(x_TI: Tensor, base: Tensor | Packed, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b in x's dtype."""
    if isinstance(base, Packed):
        y_TO = F.linear(x_TI, _expanded(base, x_TI))
    elif base.dtype == x_TI.dtype:
        return F.linear(x_TI, base, bias)
    else:
        y_TO = times_transposed(x_TI, base)
    return y_TO if bias is None else y_TO + bias


def _product_back(dy_TO: Tensor, base: Tensor | Packed) -> Tensor:
    """dy W in dy's dtype."""
    if isinstance(base, Packed):
        return dy_TO @ _expanded(base, dy_TO)
    return dy_TO @ base if base.dtype == dy_TO.dtype else times(dy_TO, base)


class _ReusedLinear(torch.autograd.Function):
    """y = x Wᵀ + b that reuses y when the layer is recomputed: no GEMM then, bit-identical gradients.

    If `reuse` returns None during recomputation, y is zeros: nobody reads it there.
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
        base = packed if weight is None else weight
        assert base is not None  # a linear layer has one of the two

        y_TO = reuse(lambda: _product(x_TI, base, bias))
        return _unread(x_TI, base) if y_TO is None else y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight = ctx.saved_tensors
        base = ctx.packed if weight is None else weight
        dx = _product_back(dy_TO, base) if ctx.needs_input_grad[0] else None
        dw = dy_TO.t() @ x_TI if ctx.needs_input_grad[1] else None
        return dx, dw, dy_TO.sum(0) if ctx.needs_input_grad[2] else None, None, None


def _unread(x_TI: Tensor, base: Tensor | Packed) -> Tensor:
    """Zeros in the place of an output that nobody reads."""
    return x_TI.new_zeros(()).expand(*x_TI.shape[:-1], base.shape[-2])


def _expanded(packed: Packed, like: Tensor) -> Tensor:
    out = torch.empty(packed.shape[-2:], dtype=like.dtype, device=like.device)
    return expand(packed, None, out)


class _AdaptedLinear(torch.autograd.Function):
    """y = x Wᵀ + b + scale · (x Aᵀ) Bᵀ, with the update added by the GEMM that computes it.

    forward   t = scale · x Aᵀ [T, R];  y = x Wᵀ + b, then y += t Bᵀ in place
    backward  dt = scale · dy B;  dx = dy W, then dx += dt A in place;  dA = dtᵀ x;  dB = dyᵀ t

    As modules of their own the sums were a copy of y and three passes over dx: 6 % of a step of Llama-3.1-8B
    on an H100. `reuse` keeps y with its update, so a recomputation multiplies by A only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        packed: Packed | None,
        A_RI: Tensor,
        B_OR: Tensor,
        scale: float,
        product: Product,
        reuse: Reuse | Skip,
    ) -> Tensor:
        base = packed if weight is None else weight
        assert base is not None  # a linear layer has one of the two
        a_RI, b_OR = A_RI.to(x_TI.dtype), B_OR.to(x_TI.dtype)
        t_TR = F.linear(x_TI, a_RI).mul_(scale)
        ctx.packed, ctx.scale, ctx.held = packed, scale, A_RI.dtype
        ctx.save_for_backward(x_TI, t_TR, a_RI, b_OR, weight)

        def compute() -> Tensor:
            y_TO = product(x_TI, base, bias)
            y_TO.flatten(0, -2).addmm_(t_TR.flatten(0, -2), b_OR.t())
            return y_TO

        y_TO = reuse(compute)
        return _unread(x_TI, base) if y_TO is None else y_TO

    @staticmethod
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, t_TR, a_RI, b_OR, weight = ctx.saved_tensors
        base = ctx.packed if weight is None else weight
        dt_TR = (dy_TO @ b_OR).mul_(ctx.scale)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = _product_back(dy_TO, base)
            dx.flatten(0, -2).addmm_(dt_TR.flatten(0, -2), a_RI)
        dy, x, t, dt = (each.flatten(0, -2) for each in (dy_TO, x_TI, t_TR, dt_TR))
        if ctx.needs_input_grad[1]:
            dw = dy.t() @ x
        db = dy.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, (dt.t() @ x).to(ctx.held), (dy.t() @ t).to(ctx.held), None, None, None


class LinearAdapter(Protocol):
    """Adapter of one Linear: y += scale · (x Aᵀ) Bᵀ."""

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """(A [R, in], B [out, R], scale)."""
        ...


class WholeAdapter(ABC):
    """Adapter whose update depends on W itself, such as DoRA's: it computes the layer's whole output.

    A class, not a Protocol, whose check takes 200 times as long: each layer asks in each pass.
    """

    @abstractmethod
    def output(self, linear: Linear, x_TI: Tensor, reuse: Reuse | Skip | None) -> Tensor:
        """y [T, out] of x [T, in]: W's product, the bias and the update."""


class KeptAdapter(WholeAdapter):
    """A WholeAdapter that may have the changed weight in a format, which a recorded step reads."""

    @abstractmethod
    def kept(self, linear: Linear) -> Packed | None:
        """The changed weight, or None if it is not kept now."""


class WithMatrix(WholeAdapter):
    """A WholeAdapter that gives the weight with its update, for attention that multiplies by parts of it."""

    @abstractmethod
    def matrix(self, linear: Linear) -> Tensor:
        """W' [out, in], in the computation's dtype."""


class Linear(PackedHolder):
    """y = x Wᵀ + b (+ adapter(x)).

    x [T, in] -> y [T, out]. `codec` None: W is a parameter `weight` [out, in]; otherwise W stays packed in
    buffers and is expanded at each use. dtype: of the computation. held: the dtype of `weight` if it differs;
    only a frozen weight can have one.

    `reuse`: if the layer is recomputed, reuse y from its first visit (PackedPass.reuse_linear).

    `adapter` is set by adapters.attach only; `each`, the adapters of several sequences, by adapters.several.
    """

    adaptable = True  # False for one that can carry no adapter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        codec: Codec | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        held: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.codec = in_features, out_features, codec
        self.dtype = dtype
        self.widened = None if held in (None, dtype) else dtype
        if codec is None:
            empty = torch.empty(out_features, in_features, dtype=held or dtype, device=device)
            self.weight = nn.Parameter(empty, requires_grad=held in (None, dtype))
        else:
            self.register_packed(codec, out_features, in_features, device=device)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.adapter: LinearAdapter | None = None
        self.each: LinearAdapters | None = None

    def forward(self, x_TI: Tensor, reuse: Reuse | Skip | None = None) -> Tensor:
        y_TO, each = self._with_one(x_TI, reuse), self.each
        return y_TO if each is None else each.add(x_TI, y_TO)

    def _with_one(self, x_TI: Tensor, reuse: Reuse | Skip | None) -> Tensor:
        if self.adapter is None:
            return self.plain(x_TI, reuse)
        if isinstance(self.adapter, WholeAdapter):
            return self.adapter.output(self, x_TI, reuse)
        return self.with_factors(x_TI, self.adapter.factors(), self.bias, reuse)

    def plain(self, x_TI: Tensor, reuse: Reuse | Skip | None = None) -> Tensor:
        """x Wᵀ + b, without the adapter."""
        weight, packed = (self.weight, None) if self.codec is None else (None, self.packed)
        skinny = weight is not None and reuse is None and is_skinny(x_TI, weight)
        if reuse is not None:
            return _ReusedLinear.apply(x_TI, weight, self.bias, packed, reuse)
        if weight is None or (weight.dtype != x_TI.dtype and not skinny):
            y_TO = _FrozenLinear.apply(x_TI, packed if weight is None else weight)
            return y_TO if self.bias is None else y_TO + self.bias
        return (skinny_linear if skinny else F.linear)(x_TI, weight, self.bias)

    def with_factors(
        self,
        x_TI: Tensor,
        factors: tuple[Tensor, Tensor, float],
        bias: Tensor | None,
        reuse: Reuse | Skip | None,
    ) -> Tensor:
        """x Wᵀ + bias + scale · (x Aᵀ) Bᵀ of (A, B, scale)."""
        weight, packed = (self.weight, None) if self.codec is None else (None, self.packed)
        skinny = weight is not None and reuse is None and is_skinny(x_TI, weight)
        product = skinny_linear if skinny else _product
        reuse = compute_now if reuse is None else reuse
        return _AdaptedLinear.apply(x_TI, weight, bias, packed, *factors, product, reuse)

    @torch.no_grad()
    def product(self, x_TI: Tensor) -> Tensor:
        """x Wᵀ in x's dtype, without bias, adapter and gradient."""
        return _product(x_TI, self.weight if self.codec is None else self.packed)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · (W x + b + scale · B A x), one operation and one for A x."""
        kept = self.adapter.kept(self) if isinstance(self.adapter, KeptAdapter) else None
        if isinstance(self.adapter, WholeAdapter) and kept is None:
            called = to.called(lambda x_SI: Linear.forward(self, x_SI), x, self.out_features)
            return to.total(called, add, factor)
        adapter = None if self.adapter is None or kept is not None else self.adapter.factors()
        weight = kept or (self.weight if self.codec is None else self.packed)
        options: dict[str, Any] = {"adapter": adapter, "add": add, "factor": factor}
        options["each"] = None if (each := self.each) is None else each.recorded()
        recorded = to.program.attempt(lambda: to.program.linear(x, weight, self.bias, **options))
        if recorded is not None:
            return recorded
        return to.total(to.called(lambda x_SI: Linear.forward(self, x_SI), x, self.out_features), add, factor)

    def dense_head(self) -> DenseHead | None:
        """This layer as tensors, for a kernel that multiplies itself; None if it is more than W x + b."""
        adapted = self.adapter is not None or self.each is not None
        return DenseHead(self.weight, self.bias) if self.codec is None and not adapted else None

    def matrix(self) -> Tensor:
        """W [out, in] for reading, without bias and adapter.

        In the computation's dtype: the parameter itself, or the widened weight.
        """
        if self.codec is not None:
            return self.packed.dequantize().to(self.dtype)
        return self.weight if self.widened is None else self.weight.to(self.widened)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}" + (f", {self.codec.name}" if self.codec else "")
