"""The dense SwiGLU MLP. T tokens, D model width, I intermediate width."""

from __future__ import annotations

import functools
import logging

from torch import Tensor, nn

from unfreeze.core.errors import ConfigError
from unfreeze.kernels import dense_mlp
from unfreeze.kernels.swiglu import swiglu
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass

log = logging.getLogger(__name__)


class MLP(nn.Module):
    """y = down(silu(gate x) · up x), which a layer adds to its result last. Source: Shazeer 2020, arXiv:2002.05202.

    `impl`: of kernels/dense_mlp, see `with_residual`.
    """

    def __init__(self, *, gate_proj: Linear, up_proj: Linear, down_proj: Linear):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj
        self.impl = "auto"

    def forward(self, x_TD: Tensor, run: Pass | None = None) -> Tensor:
        kept, last = (None, None) if run is None else (run.products, run.last)
        return self.down_proj(swiglu(self.gate_proj(x_TD, kept), self.up_proj(x_TD, kept)), last)


def with_residual(mlp: nn.Module, norm: RMSNorm, x_TD: Tensor, run: Pass) -> Tensor:
    """x + mlp(norm(x)), op by op; as one op where `mlp` is dense and a record of kernels/dense_mlp says that it pays.

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
            if one_op is not dense_mlp.OP.reference:  # that is what follows, in other words
                return one_op(x_TD, norm.weight, norm.eps, gate, up, down)
        elif impl != "auto":
            raise ConfigError(f"dense_mlp cannot run as {impl!r} here: {refused}", next="choose impl = 'auto'")
        else:
            _say(refused)
    return x_TD + mlp(norm(x_TD), run)


def refuses(mlp: nn.Module, run: Pass) -> str:
    """Why this block cannot be one op; "" where it can."""
    if not isinstance(mlp, MLP):
        return "a mixture of experts: its expert op is one autograd function, which a compiler cannot see into"
    if run.products is not None:
        return 'recompute = "elementwise" keeps the product of each linear layer, which one op does not hand out'
    if any(linear.codec is not None for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        return "packed weights, which are expanded outside of any graph"
    return ""


@functools.cache
def _say(refused: str) -> None:
    log.info("dense_mlp: op by op, %s", refused)
