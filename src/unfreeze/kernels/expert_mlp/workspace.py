"""The base weights in the form that a GEMM takes.

The workspace of a matrix W [N, M] with adapter A [Q, M], B [N, Q] is  WS [N + Q, M + Q] = [[W, B], [A,
unused]]:

    forward   y  = [x | x Aᵀ]   WS[:N, :]ᵀ  =  x Wᵀ + x Aᵀ Bᵀ
    backward  dx = [dy | dy B]  WS[:, :M]   =  dy W + dy B A

base and adapter in one GEMM per direction. Each direction writes only the factor that it reads.

A dense W in the computation's dtype needs no workspace on CUDA: x Wᵀ and (x Aᵀ) Bᵀ are two GEMMs there, and
W is read in place. A copy of every expert would cost 2.4 GB of memory traffic a layer and visit for
Qwen3-30B-A3B.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from unfreeze.kernels.expand import expand_stack
from unfreeze.kernels.expand.codes import Codes, DenseWeights, codes_of, expandable
from unfreeze.kernels.expert_mlp.factors import Adapter
from unfreeze.kernels.loops.numba_options import array
from unfreeze.kernels.loops.scratch import scratch, scratch_of
from unfreeze.quant.codec import Packed

Direction = Literal["forward", "backward"]
# bytes of expanded experts at once on a GPU. For Kimi-K2 at rank 16, gate_up and down of 48 experts take
# 4.3e9, and gate_up of 77 takes 4.6e9: its 384 experts go in five groups
WORKSPACE = 9 << 29
GROUP_BYTES = 4 << 20  # weights and rows of a group on a CPU: they fit a core's L2 and its share of L3


@contextmanager
def at_most(size: int | None) -> Iterator[None]:
    """WORKSPACE is `size` bytes within; None: as it is."""
    global WORKSPACE
    was = WORKSPACE
    WORKSPACE = was if size is None else size
    try:
        yield
    finally:
        WORKSPACE = was


def workspace_bytes(
    num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str, before: int = 2
) -> int:
    """Bytes of expanded weights that one call holds at once, without adapters.

    Of packed ones, or of dense ones in another dtype than the computation's: on CUDA others are read in
    place. before: matrices before the activation, gate and up or up alone.

    cuda  all experts of the layer, E · 3 D I, or if that exceeds WORKSPACE a group's gate_up, 2 D I each
          (grouped.py, loop_cuda.py)
    cpu   one expert, and a group of small ones (loop_cpu.py): GROUP_BYTES in forward, and in backward as much
          again for the gradients of its rows
    """
    matrices = (before + 1) * hidden * intermediate
    if device == "cuda":
        groups = expert_groups(num_experts, hidden, intermediate, dtype, device, before)
        of_one = matrices if groups == 1 else before * hidden * intermediate
        return -(-num_experts // groups) * of_one * dtype.itemsize
    return 2 * GROUP_BYTES + matrices * dtype.itemsize


def expert_groups(
    num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, device: str, before: int = 2
) -> int:
    """Number of groups of a layer's experts on CUDA, without adapters.

    One, or as many as WORKSPACE requires if it holds gate_up without down. 1 on other devices.
    """
    every = num_experts * hidden * intermediate * dtype.itemsize
    if device != "cuda" or (before + 1) * every <= WORKSPACE:
        return 1
    return -(-before * every // WORKSPACE)


def adapter_columns(
    num_experts: int, hidden: int, intermediate: int, groups: int = 1, before: int = 2
) -> int:
    """E · (3 D + 5 I): elements of E adapters in the workspace per unit of rank.

    With several groups, those of one group's gate_up, 2 D + 4 I each. B is block-diagonal. Rank 16 needs no
    padding, others pad to multiples of 8. before: as in `workspace_bytes`; up alone takes 2 D + 2 I.
    """
    if before == 1:
        both, own = 2 * (hidden + intermediate), hidden + intermediate
        return -(-num_experts // groups) * (own if groups > 1 else both)
    if groups > 1:
        return -(-num_experts // groups) * (2 * hidden + 4 * intermediate)
    return num_experts * (3 * hidden + 5 * intermediate)


def remembers(device: torch.device) -> bool:
    """True if a workspace on that device can be reused by its contents.

    Not on a CPU, where a checkpoint is read into a weight's memory without torch knowing of it.
    """
    return device.type != "cpu"


class Computed(ABC):
    """A stack of weights [E, N, M] whose matrices are computed where they are used; none is kept."""

    shape: tuple[int, int, int]
    device: torch.device

    @abstractmethod
    def fill(self, experts: Sequence[int], out: Tensor) -> None:
        """out[m] = weight[experts[m]], out [M, N, M'] in its own dtype, rows may be strided."""


class Base:
    """One base weight, packed, dense or computed [E, N, M], for the duration of a call.

    `Base.stack` returns matrices as one 3-D tensor.
    """

    def __init__(
        self,
        weight: Tensor | Packed | Computed,
        dtype: torch.dtype,
        name: str,
        *,
        in_place: bool = False,
        expand: str = "auto",
    ):
        """in_place: Backend.dense_in_place; expand: Backend.expand."""
        self.weight, self.dtype, self.name = weight, dtype, name
        self.in_place, self.expand = in_place, expand
        _, self.rows, self.columns = weight.shape
        self._expander = None
        self._views: tuple[Tensor, ...] = ()  # views of the memory shared by groups of one size: see operand
        if isinstance(weight, Packed) and weight.device.type == "cpu":
            from unfreeze.kernels.expand.numba_cpu import Expander

            self._expander = Expander(weight) if expandable(weight) else None

    @cached_property
    def codes(self) -> Codes | DenseWeights:
        """The weight as the CPU loops read it. Raises ValueError if they cannot."""
        if isinstance(self.weight, Computed):
            raise ValueError("a weight that is computed where it is used has no codes")
        return codes_of(self.weight) if isinstance(self.weight, Packed) else DenseWeights(array(self.weight))

    def nbytes(self, adapter: Adapter | None) -> int:
        """Bytes of one matrix with its adapter in the workspace; 0 if it is read in place."""
        if self.in_place and self.dense(adapter) is not None:
            return 0
        width = adapter.width if adapter else 0
        return (self.rows + width) * (self.columns + width) * self.dtype.itemsize

    def dense(self, adapter: Adapter | None) -> Tensor | None:
        """The weight in place, if a GEMM can take it; else None.

        It can if the weight is dense, has the computation's dtype, and no adapter, which would be beside it
        in a workspace; with `in_place` that has a GEMM of its own.
        """
        alone = adapter is None or self.in_place
        if alone and isinstance(self.weight, Tensor) and self.weight.dtype == self.dtype:
            return self.weight
        return None

    def stack(self, experts: Sequence[int], name: str, width: int) -> tuple[Tensor, ...]:
        """WS [len(experts), N + Q, M + Q], Q = `width`, with W filled in; as views W, [W | B], B, [W; A], A.

        Valid until the next call with this name.
        """
        device = self.weight.device
        shape = (len(experts), self.rows + width, self.columns + width)
        parts = self._parts() if remembers(device) else []
        if not parts:
            space, filled = scratch(name, shape, self.dtype, device), False
        else:
            # Experts are consecutive there. A recomputed layer's forward and backward follow each other, and
            # backward can reuse forward's workspace.
            content = (*(part._version for part in parts), experts[0], shape)
            space, filled = scratch_of(name, shape, self.dtype, device, parts[0], content)
        views = self._views  # read once: another thread may replace it with views of its own memory
        if not views or views[0] is not space:
            (above, below), (left, _) = (
                space.split([size, width], dim=dim) for dim, size in ((1, self.rows), (2, self.columns))
            )
            W, B = above.split([self.columns, width], dim=2)
            views = self._views = (space, W, above, B, left, below[:, :, : self.columns])
        if not filled:
            self._fill(experts, views[1])
        return views

    def operand(
        self, experts: Sequence[int], factor: Tensor | None, direction: Direction, name: str
    ) -> Tensor:
        """The operand of a GEMM in that direction: [W | B] (forward) or [W; A].

        `factor` is B or A of `experts`. `name`: of the workspace.
        """
        forward = direction == "forward"
        width = 0 if factor is None else factor.shape[2 if forward else 1]
        _, _, above, B, left, A = self.stack(experts, name, width)
        if factor is not None:
            (B if forward else A).copy_(factor)
        return above if forward else left

    def _parts(self) -> list[Tensor]:
        """The parts of a packed weight; [] for a dense one, and if torch counts no versions."""
        parts = list(self.weight.parts.values()) if isinstance(self.weight, Packed) else []
        return [] if any(part.is_inference() for part in parts) else parts

    def _fill(self, experts: Sequence[int], out: Tensor) -> None:
        if self._expander is not None:
            self._expander.fill(experts, out)
            return
        if isinstance(self.weight, Computed):
            self.weight.fill(experts, out)
        elif isinstance(self.weight, Packed):
            expand_stack(self.weight, experts, out, self.expand)
        elif len(experts) == len(self.weight):
            out.copy_(self.weight)
        else:
            for position, expert in enumerate(experts):
                out[position].copy_(self.weight[expert])
