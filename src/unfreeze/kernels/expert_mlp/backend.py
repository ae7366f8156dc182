"""The types shared by the files of this folder: a backend, the routing of a call, a group of its experts.

The path of a packed INT4 weight to its GEMM; each name is a definition to look up:

    Packed                  quant/codec.py   the checkpoint's codes and scales
    expert_mlp              __init__.py      backend_for(x, gate_up, down): Panels, LoopCpu or Grouped; where
                                             grouped GEMMs cannot run, LoopCuda
    fused_expert_mlp        fused.py         Call.gate_up, Call.down: a workspace.Base around the Packed
    Backend.forward_group   below            a group of experts at a time
    ByGemms                 by_gemms.py      Base.stack expands the group's experts; ByGemms.nt multiplies
    Panels                  panels_cpu.py    Base.codes: Int4Codes; pack.py; products.py; a tile of loops/

T tokens, K experts per token, E experts, D model width, I expert width. n rows: a token at one expert, sorted
by expert. Q and P adapter columns (factors.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from unfreeze.kernels.expert_mlp.factors import ExpertFactors, adapters, width
from unfreeze.kernels.expert_mlp.workspace import Base
from unfreeze.kernels.loops.scratch import scratch
from unfreeze.kernels.swiglu.activation import Activation
from unfreeze.kernels.token_permute import TokenPermute
from unfreeze.quant.codec import Packed


@dataclass(frozen=True)
class Routing:
    """The rows of a call, sorted by expert. The subclasses hold what only the host or only a GPU knows.

    experts      ids of the experts that are divided into groups, ascending
    weight_n     float32, the routing weight of each row
    row_of_slot  int64 [T K], the row of slot t K + k
    """

    num_experts: int
    experts: list[int]
    weight_n: Tensor
    row_of_slot: Tensor

    @property
    def num_rows(self) -> int:
        """n, padding included."""
        return self.weight_n.numel()

    def selection(self) -> Tensor | None:
        """Index of `experts` among all E on the host; None if they are all."""
        if len(self.experts) == self.num_experts:
            return None
        return torch.tensor(self.experts, dtype=torch.int64)


@dataclass(frozen=True)
class HostRouting(Routing):
    """Counted on the host: `experts` are those with rows.

    sizes    rows of each of `experts`, padding included
    token_n  int32, the token of each row; -1 marks padding, whose weight is 0
    """

    sizes: list[int]
    token_n: Tensor


@dataclass(frozen=True)
class DeviceRouting(Routing):
    """Counted on the device, without making the host wait: `experts` are all.

    slot_n     int64, row r is slot slot_n[r] = t K + k
    offsets_E  int32, the end of each expert's rows
    per_token  K
    permute    the implementation that sorted, and will gather and combine
    """

    slot_n: Tensor
    offsets_E: Tensor
    per_token: int
    permute: TokenPermute

    @cached_property
    def ends(self) -> list[int]:
        """offsets_E on the host, which waits for the device: only used if experts go in groups."""
        ends: list[int] = self.offsets_E.tolist()
        return ends

    @cached_property
    def token_n(self) -> Tensor:
        """The token of each row."""
        return torch.div(self.slot_n, self.per_token, rounding_mode="floor")


R = TypeVar("R", bound=Routing)


@dataclass(frozen=True)
class ExpertGroup(Generic[R]):
    """Some experts and their rows.

    `positions`: their places in routing.experts; `rows`: theirs among all n. `workspace`: the name of the
    workspace that gate_up and down share; "": each has its own.
    """

    routing: R
    positions: slice
    rows: slice
    workspace: ClassVar[str] = ""

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    @cached_property
    def experts(self) -> list[int]:
        return self.routing.experts[self.positions]

    @cached_property
    def weight(self) -> Tensor:
        """The routing weight of each of its rows."""
        return self.rows_of(self.routing.weight_n)

    def rows_of(self, whole: Tensor) -> Tensor:
        """The group's rows of a tensor of all n."""
        return whole[self.rows]

    def experts_of(self, whole: Tensor) -> Tensor:
        """The group's experts of a tensor of all in routing.experts."""
        return whole[self.positions]


class SavedRows(NamedTuple):
    """Results that forward saves for backward; None if nothing is saved, or there is no adapter."""

    gate_up: Tensor | None  # [n, 2I] before the activation, [n, I] without a gate
    xA: Tensor | None  # [n, Q]
    hA: Tensor | None  # [n, P]


class Call(Generic[R]):
    """State shared by forward and backward of one call.

    Routing, base weights, and the adapters in the dtype of the computation.
    """

    def __init__(
        self,
        backend: Backend[R],
        dtype: torch.dtype,
        routing: R,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        factors: ExpertFactors,
        activation: Activation,
        gate_up_bias: Tensor | None,
    ):
        self.backend, self.dtype, self.routing = backend, dtype, routing
        self.activation, self.gate_up_bias = activation, gate_up_bias
        self.gate_up, self.down = (
            Base(weight, dtype, name, in_place=backend.dense_in_place, expand=backend.expand)
            for weight, name in ((gate_up, "base gate_up"), (down, "base down"))
        )
        self.experts = routing.selection()
        self.gate_up_adapter, self.down_adapter = adapters(
            factors, self.experts, dtype, backend.row_stride, activation
        )
        self.I, self.Q, self.P = self.down.columns, width(self.gate_up_adapter), width(self.down_adapter)

    def groups(self, *, both: bool) -> Iterator[ExpertGroup[R]]:
        """Divide the experts into groups.

        `both`: gate_up and down are needed at once (backward); else one after the other.
        """
        weight_bytes = (self.gate_up.nbytes(self.gate_up_adapter), self.down.nbytes(self.down_adapter))
        row_bytes = (2 * self.gate_up.columns + 3 * self.down.columns) * self.dtype.itemsize
        return self.backend.groups(self.routing, weight_bytes, row_bytes, both=both)

    def workers(self) -> int:
        """Cores that share the call."""
        return self.backend.workers(self.routing, 3 * self.down.columns * self.gate_up.columns)

    def sums(self, x_TD: Tensor) -> Tensor:
        """Zeros [workers, T, D] float32.

        Two workers may have rows of one token, so each adds into its own.
        """
        shape = (self.workers(), *x_TD.shape)
        # Scratch: new memory would cost a page fault for every 4 KB.
        return scratch("sums", shape, torch.float32, x_TD.device).zero_()

    def total(self, sums: Tensor) -> Tensor:
        """Add up the workers' sums to [T, D] in the dtype of the computation.

        In place: [workers, T, D] float32 is the largest buffer of a call.
        """
        for worker in range(1, len(sums)):
            sums[0] += sums[worker]
        return sums[0].to(self.dtype, copy=True)


class ExpertGradients:
    """Buffers for the gradients of a call's groups.

    Adapters: a matrix per expert in use, float32 like the parameters; A's buffer is its gradient. If a
    backend's GEMM allocates its result (factor_buffers False), these are None until that result is stored
    here, in the dtype of the computation. Dense base: a matrix per expert, in the dtype of the computation,
    zero for experts without rows.
    """

    def __init__(self, call: Call[R], D: int, *, gate_up: bool, down: bool, gate_up_bias: bool = False):
        active, I, Q, P = len(call.routing.experts), call.I, call.Q, call.P
        N = call.gate_up.rows
        device = call.routing.weight_n.device

        def factor(columns: int, length: int) -> Tensor | None:
            shape = (active, columns, length)
            wanted = columns and call.backend.factor_buffers
            return torch.empty(shape, dtype=torch.float32, device=device) if wanted else None

        def base(rows: int, columns: int) -> Tensor:
            make = torch.empty if call.experts is None else torch.zeros
            return make((call.routing.num_experts, rows, columns), dtype=call.dtype, device=device)

        self.gate_up_A, self.gate_up_Bt = factor(Q, D), factor(Q, N)
        self.down_A, self.down_Bt = factor(P, I), factor(P, D)
        self.gate_up = base(N, D) if gate_up else None
        self.down = base(D, I) if down else None
        bias = (call.routing.num_experts, N)
        self.gate_up_bias = torch.zeros(bias, dtype=torch.float32, device=device) if gate_up_bias else None


class Backend(ABC, Generic[R]):
    """Computes `fused` on one kind of device.

    row_stride       a workspace's rows have a multiple of this many elements (factors.columns)
    factor_buffers   True if `ExpertGradients` allocates buffers for the gradients of adapters
    dense_in_place   True if a dense weight and its adapter are two GEMMs, without a workspace
    expand           the implementation of `expand` that fills a workspace
    """

    row_stride = 8
    factor_buffers = True
    dense_in_place = False
    expand = "auto"

    @abstractmethod
    def route(self, ids_TK: Tensor, weights_TK: Tensor, num_experts: int, dtype: torch.dtype) -> R:
        """Sort the slots by expert."""

    @abstractmethod
    def groups(
        self, routing: R, weight_bytes: tuple[int, int], row_bytes: int, *, both: bool
    ) -> Iterator[ExpertGroup[R]]:
        """Yield all experts of `routing` in groups.

        An expert costs weight_bytes (of gate_up, of down), each of its rows row_bytes. both: as in
        Call.groups.
        """

    @abstractmethod
    def workers(self, routing: R, weights: int) -> int:
        """Number of cores that share a call whose experts have `weights` weights each."""

    @abstractmethod
    def each(
        self, groups: Iterator[ExpertGroup[R]], workers: int, work: Callable[[ExpertGroup[R], int], None]
    ) -> None:
        """Call work(group, worker) for every group."""

    @abstractmethod
    def decode(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        factors: ExpertFactors,
    ) -> Tensor | None:
        """The result without gradients, multiplied directly with the codes, or None.

        None unless each expert has so few rows that expanding it would cost more.
        """

    @abstractmethod
    def forward_group(
        self, call: Call[R], group: ExpertGroup[R], x: Tensor, saved: SavedRows, y: Tensor
    ) -> None:
        """Add the group's share to y [T, D] float32.

        Also store its rows of gate_up, xA and hA in `saved` if that has buffers.
        """

    @abstractmethod
    def backward_group(
        self,
        call: Call[R],
        group: ExpertGroup[R],
        x: Tensor,
        dy: Tensor,
        saved: SavedRows,
        score_n: Tensor,
        grads: ExpertGradients,
        dx: Tensor | None,
    ) -> None:
        """Compute the group's gradients.

        It writes the group's rows of score_n (the gradient of the routing weight) and its experts' part of
        `grads`, and adds the group's share to dx [T, D] float32 (None: not needed).
        """
