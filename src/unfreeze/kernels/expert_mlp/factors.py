"""The LoRA factors of one MoE layer's routed experts: the op's inputs and their form in its workspace.

E experts, D model width, I intermediate width, R rank of gate and up, Rd rank of down, Q = 2R and P = Rd
rounded up (`columns`); the extra columns are zero.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.kernels.swiglu.activation import SWIGLU, Activation


@dataclass(frozen=True)
class ExpertFactors:
    """LoRA of one MoE layer; either pair may be None, but A and B of a pair come together.

    gate_up_A [E, 2R, D]  rows 0:R are the A of gate, R:2R the A of up       gate_up_B [E, 2I, R]  rows 0:I
                          the B of gate, I:2I the B of up; without a gate [E, R, D] and [E, I, R]
    down_A    [E, Rd, I]                                                     down_B    [E, D, Rd]
    Applied as  W x + scale * B A x,  with `scale` for gate and up, `down_scale` for down.
    """

    gate_up_A: Tensor | None = None
    gate_up_B: Tensor | None = None
    down_A: Tensor | None = None
    down_B: Tensor | None = None
    scale: float = 1.0
    down_scale: float = 1.0

    def __post_init__(self) -> None:
        if (self.gate_up_A is None) != (self.gate_up_B is None) or (self.down_A is None) != (
            self.down_B is None
        ):
            raise ValueError("A and B of a pair come together: one of them is None")


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def columns(rank: int, width: int, stride: int) -> int:
    """Columns of an adapter of `rank` beside a matrix of `width` columns.

    A multiple of 8, as grouped GEMMs need strides of 16 bytes. stride 16: width and columns together are a
    multiple of 16. Triton then knows that each row of the workspace starts at 16 bytes and stores 16 at once,
    else 2. stride 8 adds nothing.
    """
    wanted = round_up(rank, 8)
    return wanted + (8 if stride == 16 and (width + wanted) % 16 == 8 else 0)


@dataclass(frozen=True)
class Adapter:
    """One pair in the dtype of the computation, for the experts in use.

    A [., Q, in], B [., out, Q] with the scale folded in. Folding costs nothing (one rounding of scale * B
    instead of B) and leaves y = [x | x Aᵀ] [W | B]ᵀ as a single GEMM.
    """

    A: Tensor
    B: Tensor

    @property
    def width(self) -> int:
        """Q."""
        return self.A.shape[1]

    @functools.cached_property
    def Bt(self) -> Tensor:
        """B transposed, [., Q, out]: backward's thin GEMM dy B reads it row by row."""
        return self.B.transpose(1, 2).contiguous()


def width(adapter: Adapter | None) -> int:
    """The adapter's columns; 0 if there is none."""
    return adapter.width if adapter else 0


@torch.no_grad()
def gate_up_adapter(
    A: Tensor,
    B: Tensor,
    scale: float,
    experts: Tensor | None,
    dtype: torch.dtype,
    stride: int = 8,
    activation: Activation = SWIGLU,
) -> Adapter:
    """A [E, 2R, D], B [E, 2I, R] -> Adapter whose B [., 2I, Q] is block diagonal.

    Gate rows use the gate's columns, up rows the up's; the rows have `activation`'s layout, as in the base.
    stride: as in `columns`. Without a gate, as `down_adapter`.
    """
    if len(activation.projections) == 1:
        return down_adapter(A, B, scale, experts, dtype, stride)
    A, B = _select(A, experts), _select(B, experts)
    rank, half = B.shape[2], B.shape[1] // 2
    Q = columns(2 * rank, A.shape[2], stride)
    blocks = B.new_zeros((B.shape[0], 2 * half, Q), dtype=dtype)
    (of_gate, of_up), (gate, up) = activation.split(blocks, 1), (B * scale).split(half, dim=1)
    of_gate[:, :, :rank].copy_(gate)
    of_up[:, :, rank : 2 * rank].copy_(up)
    return Adapter(_padded(A, 1, Q, dtype), blocks)


def down_adapter(
    A: Tensor, B: Tensor, scale: float, experts: Tensor | None, dtype: torch.dtype, stride: int = 8
) -> Adapter:
    """A [E, Rd, I], B [E, D, Rd] -> Adapter with P columns."""
    A, B = _select(A, experts), _select(B, experts)
    P = columns(A.shape[1], A.shape[2], stride)
    return Adapter(_padded(A, 1, P, dtype), _padded(B * scale, 2, P, dtype))


def adapters(
    factors: ExpertFactors,
    experts: Tensor | None,
    dtype: torch.dtype,
    stride: int = 8,
    activation: Activation = SWIGLU,
) -> tuple[Adapter | None, Adapter | None]:
    """The adapters (of gate_up, of down) for `experts` (None: all).

    None if `factors` lacks a pair. stride, activation: as in `gate_up_adapter`.
    """
    gate_up = down = None
    if factors.gate_up_A is not None and factors.gate_up_B is not None:
        pair = factors.gate_up_A, factors.gate_up_B
        gate_up = gate_up_adapter(*pair, factors.scale, experts, dtype, stride, activation)
    if factors.down_A is not None and factors.down_B is not None:
        down = down_adapter(factors.down_A, factors.down_B, factors.down_scale, experts, dtype, stride)
    return gate_up, down


def gate_up_grads(
    dA: Tensor,
    dBt: Tensor,
    A: Tensor,
    B: Tensor,
    scale: float,
    experts: Tensor | None,
    activation: Activation = SWIGLU,
) -> tuple[Tensor, Tensor]:
    """Gradients in the shape and dtype of the parameters.

    dA [., Q, D]; dBt [., Q, 2I] = (x Aᵀ)ᵀ dy, in which only the two diagonal blocks count; its columns have
    the base's layout. Without a gate, as `down_grads`.
    """
    if len(activation.projections) == 1:
        return down_grads(dA, dBt, A, B, scale, experts)
    rank, half = B.shape[2], B.shape[1] // 2
    grad_B = torch.empty((dBt.shape[0], 2 * half, rank), dtype=B.dtype, device=B.device)
    of_gate, of_up = activation.split(dBt, 2)
    grad_B[:, :half].copy_(of_gate[:, :rank].transpose(1, 2))
    grad_B[:, half:].copy_(of_up[:, rank : 2 * rank].transpose(1, 2))
    return _spread(dA[:, : 2 * rank].to(A.dtype), experts, A.shape[0]), _spread(
        grad_B.mul_(scale), experts, B.shape[0]
    )


def down_grads(
    dA: Tensor, dBt: Tensor, A: Tensor, B: Tensor, scale: float, experts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As gate_up_grads: dA [., P, I], dBt [., P, D]."""
    rank = B.shape[2]
    grad_B = torch.empty((dBt.shape[0], B.shape[1], rank), dtype=B.dtype, device=B.device)
    grad_B.copy_(dBt[:, :rank].transpose(1, 2))
    return _spread(dA[:, :rank].to(A.dtype), experts, A.shape[0]), _spread(
        grad_B.mul_(scale), experts, B.shape[0]
    )


def _select(tensor: Tensor, experts: Tensor | None) -> Tensor:
    """Select the experts in use (None: all).

    A decode step uses a handful: converting the other factors would cost more than its GEMMs.
    """
    return tensor if experts is None else tensor.index_select(0, experts)


def _spread(grad: Tensor, experts: Tensor | None, num_experts: int) -> Tensor:
    """Inverse of _select: zero gradient for experts without tokens."""
    if experts is None:
        return grad.contiguous()
    return grad.new_zeros((num_experts, *grad.shape[1:])).index_copy_(0, experts, grad)


def _padded(tensor: Tensor, dim: int, size: int, dtype: torch.dtype) -> Tensor:
    """`tensor` in dtype, padded with zeros to `size` along dim."""
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor.to(dtype)
    shape = list(tensor.shape)
    shape[dim] += missing
    padded = torch.zeros(shape, dtype=dtype, device=tensor.device)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded
