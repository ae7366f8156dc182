"""The routed experts of one layer, stacked: y_t = Σ_k w_tk · down_e(silu(gate_e x_t) · up_e x_t), e = ids_tk.

T tokens, K experts per token, E experts, D model width, I expert width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from unfreeze.core.rows import Rows
from unfreeze.kernels.decode_step.mixture import Gated, Routed
from unfreeze.kernels.decode_step.mixture import expert_mlp as record_experts
from unfreeze.kernels.decode_step.program import Row
from unfreeze.kernels.decode_step.rows import ACTIVATIONS
from unfreeze.kernels.expert_mlp import (
    SWIGLU,
    Activation,
    ExpertFactors,
    adapter_columns,
    expert_groups,
    expert_mlp,
    workspace_bytes,
)
from unfreeze.kernels.recompute import Reuse
from unfreeze.kernels.swiglu.activation import ClampedSwiGLU
from unfreeze.models.blocks.bytes import Bytes
from unfreeze.models.blocks.each import ExpertAdapters
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.models.blocks.part import Part
from unfreeze.models.blocks.recording import CannotRecord, Recording
from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.halves import stacked

UNEVEN = 1.25  # rows of the busiest group of experts over the mean group's


class ExpertWeight(PackedHolder):
    """One projection of all E experts: `weight` [E, out, in], or the codec's parts with a leading E.

    held: the dtype of a frozen `weight`, if it is narrower than the computation's.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        codec: Codec | None,
        dtype: torch.dtype,
        device: torch.device | str,
        held: torch.dtype | None = None,
    ):
        super().__init__()
        self.codec = codec
        self.part: Part | None = None  # set where only some experts train (models/only.py)
        if codec is None:
            shape = (num_experts, out_features, in_features)
            empty = torch.empty(shape, dtype=held or dtype, device=device)
            self.weight = nn.Parameter(empty, requires_grad=held in (None, dtype))
        else:
            self.register_packed(codec, out_features, in_features, (num_experts,), device)

    def value(self) -> Tensor | Packed:
        if self.part is not None:
            return self.part.joined(self.weight)
        return self.weight if self.codec is None else self.packed

    def dense_in(self, dtype: torch.dtype) -> bool:
        """True if the weight is not packed and has that dtype: a GEMM on CUDA reads it in place."""
        return self.codec is None and self.weight.dtype == dtype


class ExpertAdapter(Protocol):
    """Adapter of the E experts of a layer; a module, so that its parameters are registered."""

    def factors(self) -> ExpertFactors: ...


class WholeExpertAdapter(ABC):
    """Adapter whose update depends on the weights: it computes the experts' whole output."""

    @abstractmethod
    def output(
        self,
        experts: Experts,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None,
        gate_up_bias: Tensor | None,
    ) -> Tensor:
        """y [T, D], without what other processes hold; arguments as in `expert_mlp`."""

    @abstractmethod
    def kept(self, experts: Experts) -> tuple[Tensor | Packed, Tensor | Packed, ExpertFactors] | None:
        """The changed weights, and factors beside them, which a recorded step reads; None: it has none."""


class Dispatch(Protocol):
    """Sends rows to the processes that hold their experts and brings the results back.

    rows  the experts that this process holds, of all E
    beside  as in Experts.forward; it may be computed while the rows travel
    """

    rows: Rows

    def __call__(
        self,
        experts: Experts,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None,
        once: Reuse | None,
        beside: Callable[[], Tensor] | None,
        /,
    ) -> Tensor: ...


class Experts(nn.Module):
    """E gated experts: gate_up_proj [E, 2I, D], down_proj [E, D, I].

    `activation`: SwiGLU or another (kernels/swiglu/activation.py). It decides how gate and up are stacked
    on the output dimension: gate first, or interleaved row by row. `adapter.factors()` returns the low-rank
    factors of every expert (see kernels/expert_mlp); `each`: the adapters of several sequences. `dispatch`:
    set if other processes hold some of the E experts (parallel/placement/dispatch.py). Dimension 0 of the
    tensors then counts the experts held here; ids still count all E. down: down_proj, if its format is not
    that of gate_up_proj.
    """

    adaptable = True
    first: ClassVar[str] = "gate_up_proj"  # name of the matrix before the activation

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        codec: Codec | None,
        dtype: torch.dtype,
        device: torch.device | str,
        activation: Activation = SWIGLU,
        held: torch.dtype | None = None,
        down: ExpertWeight | None = None,
    ):
        super().__init__()
        self.num_experts, self.activation = num_experts, activation
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size

        def weight(in_features: int, out_features: int, codec: Codec | None) -> ExpertWeight:
            options: dict[str, Any] = {"codec": codec, "dtype": dtype, "device": device, "held": held}
            return ExpertWeight(num_experts, in_features, out_features, **options)

        both = codec
        if codec is not None and self.before > 1 and not activation.interleaved:  # on disk it is one matrix
            both = stacked(codec, 2 * intermediate_size, hidden_size)
        setattr(self, self.first, weight(hidden_size, self.before * intermediate_size, both))
        self.down_proj = weight(intermediate_size, hidden_size, codec) if down is None else down
        self.adapter: ExpertAdapter | None = None
        self.each: ExpertAdapters | None = None
        self.dispatch: Dispatch | None = None
        self.impl = "auto"

    @property
    def before(self) -> int:
        """Matrices before the activation: gate and up, or up alone."""
        return len(self.activation.projections)

    @property
    def gate_up_proj(self) -> ExpertWeight:
        """The matrix before the activation, whatever its name."""
        return cast(ExpertWeight, self._modules[self.first])

    @property
    def held(self) -> Rows:
        """The experts that this process holds, of all E."""
        return Rows(0, self.num_experts, self.num_experts) if self.dispatch is None else self.dispatch.rows

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None = None,
        once: Reuse | None = None,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """-> y [T, D]. reuse: PackedPass.reuse_expensive; once: PackedPass.reuse, for a dispatch.

        beside: returns what is added to y, the output of shared experts.
        """
        if self.dispatch is not None:
            return self.dispatch(self, x_TD, ids_TK, weights_TK, reuse, once, beside)
        y_TD = self.here(x_TD, ids_TK, weights_TK, reuse)
        return y_TD if beside is None else y_TD + beside()

    def here(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, reuse: Reuse | None = None) -> Tensor:
        """Output of the experts held here for these rows; ids count from the first of them."""
        return self.biased(self.product(x_TD, ids_TK, weights_TK, reuse), ids_TK, weights_TK)

    def record(
        self, to: Recording, x: Row, routed: Routed, *, add: Row | None = None, scales_input: bool = False
    ) -> Row:
        """add + the experts' output; scales_input: the weight scales an expert's input."""
        if self.dispatch is not None:
            raise CannotRecord("experts that are not all here")
        gate_up, down = self.gate_up_proj.value(), self.down_proj.value()
        factors = None if self.adapter is None else self.adapter.factors()
        if isinstance(self.adapter, WholeExpertAdapter):
            if (kept := self.adapter.kept(self)) is None:
                raise CannotRecord("experts whose adapter needs the weights")
            gate_up, down, factors = kept
        act = self.activation
        if self.before == 1:
            raise CannotRecord("experts without a gate")
        if isinstance(act, ClampedSwiGLU) and act.added != 1:
            raise CannotRecord(f"a clamped SwiGLU that adds {act.added:g}")
        kind = ACTIVATIONS[act.kind]
        numbers = (act.alpha, act.limit) if isinstance(act, ClampedSwiGLU) else (0.0, 0.0)
        if (each := self.each) is not None:
            factors = each.recorded()
        return record_experts(
            to.program,
            x,
            routed,
            gate_up,
            down,
            factors,
            gated=Gated(kind, *numbers, act.interleaved),
            biases=self.biases(),
            scales_input=scales_input,
            add=add,
        )

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Biases of gate_up [E, 2I] and of down [E, D]."""
        return None, None

    def product(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, reuse: Reuse | None = None) -> Tensor:
        """`here` without the biases of down, which need no streamed weight."""
        return self._mlp(x_TD, ids_TK, weights_TK, reuse, None)

    def biased(self, y_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Add the biases of down: `product` -> `here`."""
        return y_TD

    def _mlp(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None,
        gate_up_bias: Tensor | None,
    ) -> Tensor:
        if isinstance(self.adapter, WholeExpertAdapter):
            return self.adapter.output(self, x_TD, ids_TK, weights_TK, reuse, gate_up_bias)

        def compute(x: Tensor, ids: Tensor, weights: Tensor, factors: ExpertFactors | None) -> Tensor:
            return expert_mlp(
                x,
                ids,
                weights,
                self.gate_up_proj.value(),
                self.down_proj.value(),
                factors,
                impl=self.impl,
                reuse=reuse,
                activation=self.activation,
                gate_up_bias=gate_up_bias,
            )

        if (each := self.each) is not None:
            return each.product(x_TD, ids_TK, weights_TK, compute)
        return compute(x_TD, ids_TK, weights_TK, None if self.adapter is None else self.adapter.factors())

    def bytes(self, per_token: int, dtype: torch.dtype, device: str) -> Bytes:
        """Bytes for K = `per_token` rows of each token, and the expert op's scratch.

        held       gate and up of each row, 2 I, or up alone
        own        the float32 sum dx of a token, D, with its rounded copy, or on CUDA the rows in flight
                   (`bytes_at_work`)
        expensive  gate and up of each row, on a CPU an eighth more for padding
        scratch    of packed experts, or of dense ones in another dtype; others are read in place on CUDA
        adapter_per_rank  the factors in the computation's dtype and their gradient, on a CPU in float32
        """
        K, D, I, size = per_token, self.hidden_size, self.intermediate_size, dtype.itemsize
        gate_up, before = K * self.before * I * size, self.before
        sizes = (self.num_experts, D, I)
        in_place = device == "cuda" and self.gate_up_proj.dense_in(dtype) and self.down_proj.dense_in(dtype)
        groups = 1 if in_place else expert_groups(*sizes, dtype, device, before)
        of_rows = bytes_at_work(K, D, I, size, groups) if device == "cuda" else 0
        return Bytes(
            held=gate_up,
            own=4 * D + max(of_rows, D * size),
            expensive=gate_up if device == "cuda" else gate_up * 9 // 8,
            scratch=0 if in_place else workspace_bytes(*sizes, dtype, device, before),
            scratch_per_rank=(
                adapter_columns(*sizes, groups, before) if device == "cuda" and not in_place else 0
            ),
            adapter_per_rank=adapter_columns(*sizes, 1, before)
            * (2 * size if device == "cuda" else size + 4),
        )


class PlainExperts(Experts):
    """E experts without a gate, down_e(a(up_e x)): up_proj [E, I, D] (Nemotron-H)."""

    first = "up_proj"


class BiasedExperts(Experts):
    """Experts with biases: down_e(a(gate_up_e x + b_e)) + c_e (gpt-oss).

    gate_up_proj_bias [E, 2I], with gate and up laid out as in gate_up_proj; down_proj_bias [E, D].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        codec: Codec | None,
        dtype: torch.dtype,
        device: torch.device | str,
        activation: Activation = SWIGLU,
        held: torch.dtype | None = None,
        down: ExpertWeight | None = None,
    ):
        super().__init__(
            num_experts,
            hidden_size,
            intermediate_size,
            codec=codec,
            dtype=dtype,
            device=device,
            activation=activation,
            held=held,
            down=down,
        )

        def bias(width: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, width, dtype=dtype, device=device))

        self.gate_up_proj_bias, self.down_proj_bias = bias(2 * intermediate_size), bias(hidden_size)

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        return self.gate_up_proj_bias, self.down_proj_bias

    def product(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, reuse: Reuse | None = None) -> Tensor:
        return self._mlp(x_TD, ids_TK, weights_TK, reuse, self.gate_up_proj_bias)

    def biased(self, y_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Add Σ_k w_tk c_e as one product: the weights as [T, E] times all biases."""
        share_TE = weights_TK.new_zeros(len(y_TD), len(self.held)).scatter(1, ids_TK, weights_TK)
        return y_TD + share_TE.to(y_TD.dtype) @ self.down_proj_bias

    def bytes(self, per_token: int, dtype: torch.dtype, device: str) -> Bytes:
        """As Experts, plus each token's weights as [T, E], twice in backward."""
        shares = Bytes(held=self.num_experts * dtype.itemsize, own=self.num_experts * (4 + dtype.itemsize))
        return super().bytes(per_token, dtype, device) + shares


def bytes_at_work(per_token: int, hidden: int, intermediate: int, size: int, groups: int) -> int:
    """Bytes per token of the rows that backward holds on CUDA, with elements of `size` bytes.

    Each row takes two tensors of width D (dy, then x; dx) and 3 I (dh, then the weighted h; gradients of gate
    and up). All experts work at once, or 1/G of them in each of G groups. The busiest group has UNEVEN times
    its share; dx of all rows comes on top.
    """
    row = 2 * hidden + 3 * intermediate
    if groups == 1:
        return per_token * size * row
    return int(per_token * size * (row * min(1.0, UNEVEN / groups) + hidden))
