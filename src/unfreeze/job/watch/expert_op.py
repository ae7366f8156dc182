"""At the first step, the expert op of one layer is compared with the reference, on rows of the run itself.

A check before the run draws its inputs. This one takes what the run computes with: its weights in their
format, its adapters and its routing.

T tokens, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from unfreeze.core.torch_types import named_modules
from unfreeze.kernels.choice.measure import relative_error
from unfreeze.kernels.expert_mlp import reference_expert_mlp
from unfreeze.models import Decoder
from unfreeze.models.blocks.experts import Experts
from unfreeze.parallel.placement.dispatch import RowsDispatch

ROWS, FEWEST = 64, 8  # rows compared, and of a call that is worth it
# the largest |got - want| / |want| of the output and of each gradient, Frobenius norms. float32: sums of
# some thousand terms in another order. bf16: a correct implementation is off by less than 1.5 %
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.03}
# weights that the reference expands: on a CPU within a second
EXPANDED = {"cpu": 5e7, "cuda": 3e10}
# bytes of a row's expanded experts in float32; above this only the output is compared
KEPT = {"cpu": 64 << 20, "cuda": 512 << 20}
_Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertOp:
    """Watches the first layer with routed experts until it has computed FEWEST rows or more.

    result  {layer, rows, error, limit, gradients}, error None: not finite. None before, for a model without
            routed experts, and if the layer's experts are never all on the device (loaded in groups).
    """

    def __init__(self, model: Decoder):
        self.result: dict[str, Any] | None = None
        self._close: Callable[[], object] = lambda: None
        for name, module in named_modules(model):
            if isinstance(module, Experts) and isinstance(module.dispatch, RowsDispatch | None):
                self._name = name
                self._close = module.register_forward_hook(self._look).remove
                return

    def close(self) -> dict[str, Any] | None:
        """Stop watching and return the result."""
        self._close()
        return self.result

    def _look(self, experts: Experts, arguments: tuple[Any, ...], output: Tensor) -> None:
        x_TD, ids_TK, weights_TK = cast("tuple[Tensor, Tensor, Tensor]", arguments[:3])
        expanded = 3 * experts.hidden_size * experts.intermediate_size * ids_TK.shape[1]
        rows = min(ROWS, len(x_TD), int(EXPANDED[x_TD.device.type] // expanded))
        if len(x_TD) < FEWEST or self.result is not None or x_TD.dtype not in LIMIT:
            return
        limit, gradients = LIMIT[x_TD.dtype], 4 * expanded <= KEPT[x_TD.device.type]
        self.result = {"layer": self._name, "rows": rows, "limit": limit, "gradients": gradients}
        if not rows:
            return
        try:
            with torch.inference_mode(False):
                x_TD, ids_TK, weights_TK = (part.detach().clone() for part in (x_TD, ids_TK, weights_TK))
                error = error_of(experts, x_TD, ids_TK, weights_TK, rows, gradients=gradients)
                self.result["error"] = error if math.isfinite(error) else None
        except torch.AcceleratorError:
            raise
        except RuntimeError:  # the card is full, or a library of it has no memory: no reason to stop the run
            self.result["rows"] = 0


def is_wrong(compared: Mapping[str, Any]) -> bool:
    """True if the op of a result differs by more than rounding."""
    if "error" not in compared:
        return False
    return compared["error"] is None or compared["error"] > compared["limit"]


def error_of(
    experts: Experts, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, rows: int, *, gradients: bool = True
) -> float:
    """The largest relative error of the op: of its output, and of the gradients of x, weights and adapters.

    The output is computed of all rows, as the run does, since other kernels run for few; the first `rows` of
    it are compared, and the gradients of these alone. The reference computes in float32, one row after the
    other, so that few experts are expanded at once. Of experts that another process holds, nothing is
    compared.
    """
    held = experts.held
    here = (ids_TK >= held.first) & (ids_TK < held.last)
    ids_TK = torch.where(here, ids_TK - held.first, 0)
    weights_TK = torch.where(here, weights_TK, 0)
    with torch.no_grad():
        y_TD = experts.product(x_TD, ids_TK, weights_TK)[:rows].clone()
    x_TD, ids_TK, weights_TK = x_TD[:rows], ids_TK[:rows], weights_TK[:rows]
    upstream = torch.randn(x_TD.shape, generator=torch.Generator().manual_seed(0)).to(x_TD)
    bias = getattr(experts, "gate_up_proj_bias", None)
    base = (experts.gate_up_proj.value(), experts.down_proj.value())
    adapter = cast("nn.Module | None", experts.adapter)
    trained = [] if adapter is None else [p for p in adapter.parameters() if p.requires_grad]

    def reference(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        factors = None if experts.adapter is None else experts.adapter.factors()
        return reference_expert_mlp(x_TD, ids_TK, weights_TK, *base, factors, None, experts.activation, bias)

    def results(call: _Call, *inputs: Tensor, upstream: Tensor) -> list[Tensor]:
        """The output, and if wanted the gradients of x and weights, then of the adapters."""
        x_TD, ids_TK, weights_TK = inputs
        if not gradients:
            with torch.no_grad():
                return [call(x_TD, ids_TK, weights_TK)]
        with torch.enable_grad():
            x_TD, weights_TK = (part.detach().requires_grad_() for part in (x_TD, weights_TK))
            y_TD = call(x_TD, ids_TK, weights_TK)
            leaves = [x_TD, weights_TK, *trained]
            grads = torch.autograd.grad(y_TD, leaves, upstream, allow_unused=True, materialize_grads=True)
            return [y_TD.detach(), *grads]

    got = results(experts.product, x_TD, ids_TK, weights_TK, upstream=upstream)
    of_rows: list[list[Tensor]] = []
    of_adapters: list[Tensor] = []
    for row in range(rows):
        one = slice(row, row + 1)
        inputs = (x_TD[one].float(), ids_TK[one], weights_TK[one])
        every = results(reference, *inputs, upstream=upstream[one].float())
        of_rows.append(every[:3])
        if not of_adapters:
            of_adapters = every[3:]
        else:
            for total, part in zip(of_adapters, every[3:], strict=True):
                total += part
    exact = [*(torch.cat(parts) for parts in zip(*of_rows, strict=True)), *of_adapters]
    errors = [relative_error(ours, theirs) for ours, theirs in zip(got, exact, strict=True)]
    return max(*errors, relative_error(y_TD, exact[0]))
