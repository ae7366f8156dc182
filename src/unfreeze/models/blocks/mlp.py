"""Dense MLPs: gated (SwiGLU and similar) and plain. T tokens, D model width, I intermediate width."""

from __future__ import annotations

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.program import Row
from unfreeze.kernels.decode_step.rows import ACTIVATIONS
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.nonlinearity import GATED_SILU, Nonlinearity
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import CannotRecord, Recording


class MLP(Block):
    """y = down(silu(gate x) · up x), or with another activation than silu (nonlinearity.py)."""

    def __init__(
        self, *, gate_proj: Linear, up_proj: Linear, down_proj: Linear, activation: Nonlinearity = GATED_SILU
    ):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.activation = activation

    def forward(self, x_TD: Tensor, run: Pass | None = None) -> Tensor:
        return self.down_proj(self._inner(x_TD, run), None if run is None else run.skip_unread)

    def read(self, x_TD: Tensor, run: Pass) -> Tensor:
        """forward() for a caller whose backward reads y: recomputation returns y too, not zeros."""
        return self.down_proj(self._inner(x_TD, run), run.reuse_linear)

    def _inner(self, x_TD: Tensor, run: Pass | None) -> Tensor:
        reuse = None if run is None else run.reuse_linear
        return self.activation.apply(self.gate_proj(x_TD, reuse), self.up_proj(x_TD, reuse))

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · MLP(x)."""
        if self.activation.name not in ACTIVATIONS:
            raise CannotRecord(f"the activation {self.activation.name}")
        gate, up = self.gate_proj.record(to, x), self.up_proj.record(to, x)
        h = to.program.activate(gate, up, ACTIVATIONS[self.activation.name])
        return self.down_proj.record(to, h, add=add, factor=factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: gate, up and h, 3 I. No gradient needs down_proj's output.

        Own: 5 I are alive in SwiGLU's backward (`Nonlinearity.alive_on`). Later dgate and dup are alive with
        two gradients of the input, from the product and from its adapter: 2 I + 2 D.
        """
        D, I = self.down_proj.out_features, self.gate_proj.out_features
        worst = max(self.activation.alive_on(device) * I, 2 * I + 2 * D)
        size = dtype.itemsize
        return Bytes(held=3 * I * size, own=(worst - 3 * I) * size, linear=2 * I * size)


class FusedMLP(Block):
    """SwiGLU with one projection for gate and up, gate first along its output (Phi-3)."""

    def __init__(self, *, gate_up_proj: Linear, down_proj: Linear):
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x_TD: Tensor, run: Pass | None = None) -> Tensor:
        reuse, skip = (None, None) if run is None else (run.reuse_linear, run.skip_unread)
        return self.down_proj(GATED_SILU.apply(self.gate_up_proj(x_TD, reuse)), skip)

    def read(self, x_TD: Tensor, run: Pass) -> Tensor:
        """As MLP.read."""
        h_TI = GATED_SILU.apply(self.gate_up_proj(x_TD, run.reuse_linear))
        return self.down_proj(h_TI, run.reuse_linear)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · MLP(x)."""
        both, I = self.gate_up_proj.record(to, x), self.down_proj.in_features
        h = to.program.activate(both.part(0, I), both.part(I, I), ACTIVATIONS[GATED_SILU.name])
        return self.down_proj.record(to, h, add=add, factor=factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As for MLP."""
        D, I = self.down_proj.out_features, self.down_proj.in_features
        worst = max(GATED_SILU.alive_on(device) * I, 2 * I + 2 * D)
        size = dtype.itemsize
        return Bytes(held=3 * I * size, own=(worst - 3 * I) * size, linear=2 * I * size)


class InputOutputMLP(FusedMLP):
    """FusedMLP whose projections are named input_linear and output_linear (Granite)."""

    def __init__(self, *, input_linear: Linear, output_linear: Linear):
        Block.__init__(self)
        self.input_linear, self.output_linear = input_linear, output_linear

    @property
    def gate_up_proj(self) -> Linear:  # type: ignore[override]
        return self.input_linear

    @property
    def down_proj(self) -> Linear:  # type: ignore[override]
        return self.output_linear


class PlainMLP(Block):
    """y = fc2(a(fc1 x)), where a is an activation without a gate (nanochat)."""

    def __init__(self, *, fc1: Linear, fc2: Linear, activation: Nonlinearity):
        super().__init__()
        self.fc1, self.fc2, self.activation = fc1, fc2, activation

    def forward(self, x_TD: Tensor, run: Pass | None = None) -> Tensor:
        reuse, skip = (None, None) if run is None else (run.reuse_linear, run.skip_unread)
        return self.fc2(self.activation.apply(self.fc1(x_TD, reuse)), skip)

    def read(self, x_TD: Tensor, run: Pass) -> Tensor:
        """As MLP.read."""
        return self.fc2(self.activation.apply(self.fc1(x_TD, run.reuse_linear)), run.reuse_linear)

    def record(self, to: Recording, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · MLP(x)."""
        h = to.program.activate(self.fc1.record(to, x), None, ACTIVATIONS[self.activation.name])
        return self.fc2.record(to, h, add=add, factor=factor)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: the tensors before and after the activation, 2 I. Own: as in MLP, but later I + 2 D."""
        D, I = self.fc2.out_features, self.fc1.out_features
        worst = max(self.activation.alive_on(device) * I, I + 2 * D, 2 * I)
        size = dtype.itemsize
        return Bytes(held=2 * I * size, own=(worst - 2 * I) * size, linear=I * size)


class UpDownMLP(PlainMLP):
    """PlainMLP whose projections are named up_proj and down_proj (Nemotron-H)."""

    def __init__(self, *, up_proj: Linear, down_proj: Linear, activation: Nonlinearity):
        Block.__init__(self)
        self.up_proj, self.down_proj, self.activation = up_proj, down_proj, activation

    @property
    def fc1(self) -> Linear:  # type: ignore[override]
        return self.up_proj

    @property
    def fc2(self) -> Linear:  # type: ignore[override]
        return self.down_proj
