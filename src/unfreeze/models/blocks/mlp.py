"""The dense SwiGLU MLP. T tokens, D model width, I intermediate width."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError
from unfreeze.kernels import dense_mlp
from unfreeze.kernels.swiglu import swiglu
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass

log = logging.getLogger(__name__)


class MLP(Block):
    """y = down(silu(gate x) · up x). Source: Shazeer 2020, arXiv:2002.05202.

    `impl`: of kernels/dense_mlp, see `with_residual`.
    """

    def __init__(self, *, gate_proj: Linear, up_proj: Linear, down_proj: Linear):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.impl = "auto"

    def forward(self, x_TD: Tensor, run: Pass | None = None) -> Tensor:
        return self.down_proj(self._inner(x_TD, run), None if run is None else run.skip_unread)

    def read(self, x_TD: Tensor, run: Pass) -> Tensor:
        """The same for a caller whose gradient reads y: a recomputed layer has y too, not zeros for it."""
        return self.down_proj(self._inner(x_TD, run), run.reuse_linear)

    def _inner(self, x_TD: Tensor, run: Pass | None) -> Tensor:
        reuse = None if run is None else run.reuse_linear
        return swiglu(self.gate_proj(x_TD, reuse), self.up_proj(x_TD, reuse))

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Held: gate, up and h, 3 I. No gradient needs down_proj's output.

        Own: 5 I is alive in SwiGLU's backward (gate, up, dh, dgate, dup), and later the last two beside two
        gradients of the input, of the product and of its adapter: 2 I + 2 D.
        """
        D, I = self.down_proj.out_features, self.gate_proj.out_features
        worst = max(5 * I, 2 * I + 2 * D)
        size = dtype.itemsize
        return Bytes(held=3 * I * size, own=(worst - 3 * I) * size, linear=2 * I * size)


def with_residual(mlp: Block, norm: RMSNorm, x_TD: Tensor, run: Pass) -> Tensor:
    """x + mlp(norm(x)), op by op.

    As one op where `mlp` is dense and a record of kernels/dense_mlp says that it is faster.

    Raises ConfigError where mlp.impl names a candidate that cannot take this block, with the reason.
    """
    impl = getattr(mlp, "impl", "auto")
    if impl != "reference" and x_TD.shape[0] >= dense_mlp.FEWEST:
        refused = refuses(mlp, run)
        if not refused:
            assert isinstance(mlp, MLP)
            gate, up, down = (linear.projection() for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
            assert gate is not None and up is not None and down is not None
            one_op = dense_mlp.implementation(x_TD, gate, up, down, impl)
            if one_op is not dense_mlp.OP.reference:  # the reference computes what follows below
                return one_op(x_TD, norm.weight, norm.eps, gate, up, down)
        elif impl != "auto":
            raise ConfigError(
                f"dense_mlp cannot run as {impl!r} here: {refused}", next="choose impl = 'auto'"
            )
        else:
            _say(refused)
    return x_TD + mlp(norm(x_TD), run)


def refuses(mlp: Block, run: Pass) -> str:
    """Why this block cannot be one op; "" where it can."""
    if not isinstance(mlp, MLP):
        return (
            "a mixture of experts: its expert op is one autograd function, which a compiler cannot see into"
        )
    if run.reuse_linear is not None:
        return (
            'recompute = "elementwise" keeps the product of each linear layer, which one op does not hand out'
        )
    if any(linear.codec is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        return "packed weights, which are expanded outside of any graph"
    return ""


@functools.cache
def _say(refused: str) -> None:
    log.info("dense_mlp: op by op, %s", refused)
