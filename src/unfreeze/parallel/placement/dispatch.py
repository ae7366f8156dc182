"""Expert parallelism: send each token's rows to the processes that hold its experts, and the results back.

sort the T K rows by expert, and so by process
exchange the number of rows per expert         once per layer and forward visit; the host waits for it
exchange rows and routing weights              all-to-all with uneven splits
expert_mlp of the received rows, K = 1         the same op as on one process
exchange the results, sum each token's K rows in float32

Backward exchanges gradients in the other direction: of the results, then of rows and weights. A process
without rows takes part in every exchange, forward and backward, because the number of exchanges depends only
on the layers.
In float32, results and gradients of experts are bit-identical to one process's, for the same rows in the same
order. In bf16 a row is rounded once more on its way back, and so is its gradient: 2.9e-3 of the norm.

T tokens, K experts per token, E experts of the model, n = T K rows sent, N rows received, D width.
"""

# torch's Function.backward is untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import Rows
from unfreeze.core.torch_types import buffers_of, parameters_of
from unfreeze.kernels import token_permute
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.recompute import Reuse
from unfreeze.models import Decoder
from unfreeze.models.blocks.experts import Experts
from unfreeze.parallel.processes.collectives import Group
from unfreeze.parallel.processes.mesh import Mesh


@dataclass(frozen=True)
class Home:
    """The routing of one call's rows; kept for the layer's recomputation.

    token_n   token of each sent row, sorted by expert
    place_TK  index among the sent rows of a token's K rows, in summation order
    slot_TK   the same in the order of ids
    ids_N1    expert of each received row, counted from the first one held here
    send, receive  number of rows to and from each process
    """

    group: Group
    token_n: Tensor
    place_TK: Tensor
    slot_TK: Tensor
    ids_N1: Tensor
    send: list[int]
    receive: list[int]

    def there(self, rows_n: Tensor) -> Tensor:
        """Send rows to the experts: sent rows -> received rows."""
        return self.group.exchange(rows_n, self.send, self.receive)

    def back(self, rows_N: Tensor) -> Tensor:
        """Send results back: received rows -> sent rows."""
        return self.group.exchange(rows_N, self.receive, self.send)

    def combine(self, rows_nD: Tensor) -> Tensor:
        """Sum y_t = Σ_k rows[place_tk] in float32; return it in the dtype of the rows.

        On a CPU experts are summed in ascending order, on a GPU in the order of k, like the expert op on
        each.
        """
        wide = torch.promote_types(rows_nD.dtype, torch.float32)
        y_TD = torch.zeros((len(self.place_TK), rows_nD.shape[1]), dtype=wide, device=rows_nD.device)
        bucket = token_permute.bucket(y_TD, self.place_TK, None, 0)
        permute = choose(token_permute.OP, rows_nD.device, rows_nD.dtype, bucket)
        assert isinstance(permute, token_permute.TokenPermute)
        permute.functions.combine(rows_nD, self.place_TK.flatten(), None, y_TD)
        return y_TD.to(rows_nD.dtype)


class RowsDispatch:
    """An `Experts.dispatch` that sends rows to their experts by all-to-all.

    group  the processes that share the experts
    parts  the experts of each of them, in rank order
    """

    def __init__(self, group: Group, parts: Sequence[Rows]):
        self.group, self.parts, self.rows = group, list(parts), parts[group.rank]

    def __call__(
        self,
        experts: Experts,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None,
        once: Reuse | None,
    ) -> Tensor:
        """Like Experts.forward. once: caches the exchanged counts for the layer's recomputation."""
        first_visit: list[bool] = []

        def find() -> Home:
            first_visit.append(True)
            return self._home(ids_TK)

        home: Home = find() if once is None else once(find)
        rows_ND, weights_N1 = cast("tuple[Tensor, Tensor]", _There.apply(x_TD, weights_TK, home))
        if home.ids_N1.numel():
            y_ND = experts.here(rows_ND, home.ids_N1, weights_N1, reuse)
        else:
            y_ND = _connected(experts, rows_ND, weights_N1)
        # the op's results are in `reuse`, so the second visit's results are not read
        return _Back.apply(y_ND, home, bool(first_visit) or reuse is None)

    @torch.no_grad()
    def _home(self, ids_TK: Tensor) -> Home:
        ids_n, own, device = ids_TK.flatten(), len(self.rows), ids_TK.device
        slots_n = torch.arange(len(ids_n), device=device)
        order_n = ids_n.argsort(stable=True)
        slot_TK = torch.empty_like(order_n).scatter_(0, order_n, slots_n).view_as(ids_TK)
        place_TK = slot_TK if slot_TK.is_cuda else slot_TK.sort(1).values

        # rows per expert, then the layer's one wait: how many rows come from each process
        counts_E = ids_n.new_zeros(self.rows.of).scatter_add_(0, ids_n, torch.ones_like(ids_n))
        sizes = [len(rows) for rows in self.parts]
        arriving_pe = self.group.exchange(counts_E, sizes, [own] * len(sizes)).view(len(sizes), own)
        leaving_p = torch.stack([part.sum() for part in counts_E.split(sizes)])
        send, receive = cast("list[list[int]]", torch.stack([leaving_p, arriving_pe.sum(1)]).tolist())
        local_e = torch.arange(own, device=device).repeat(len(sizes))
        ids_N = local_e.repeat_interleave(arriving_pe.flatten(), output_size=sum(receive))
        token_n = torch.div(order_n, ids_TK.shape[1], rounding_mode="floor")
        return Home(self.group, token_n, place_TK, slot_TK, ids_N[:, None], send, receive)


class _There(torch.autograd.Function):
    """(x [T, D], weights [T, K]) -> (rows [N, D], weights [N, 1]) of the experts held here."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, home: Home) -> tuple[Tensor, Tensor]:
        ctx.home = home
        weights_n1 = torch.empty_like(weights_TK).view(-1, 1)
        weights_n1.index_copy_(0, home.slot_TK.flatten(), weights_TK.reshape(-1, 1))
        return home.there(x_TD.index_select(0, home.token_n)), home.there(weights_n1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        home: Home = ctx.home
        drows_ND, dweights_N1 = gradients
        need_x, need_weights = ctx.needs_input_grad[:2]
        dx_TD = home.combine(home.back(drows_ND)) if need_x else None
        dweights_TK = None
        if need_weights:
            dweights_TK = home.back(dweights_N1)[:, 0][home.slot_TK]
        return dx_TD, dweights_TK, None


class _Back(torch.autograd.Function):
    """Results [N, D] of the experts held here -> y [T, D], the sum of each token's K.

    read False: y is not used and is zeros.
    """

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, home: Home, read: bool) -> Tensor:
        ctx.home = home
        if not read:
            return y_ND.new_zeros(len(home.place_TK), y_ND.shape[1])
        return home.combine(home.back(y_ND))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        home: Home = ctx.home
        (dy_TD,) = gradients
        return home.there(dy_TD.index_select(0, home.token_n)), None, None


def _connected(experts: Experts, rows_0D: Tensor, weights_01: Tensor) -> Tensor:
    """Return empty results through which backward still reaches the exchange and the experts' weights.

    Their gradients are zeros. Without this, a process without rows would skip the exchanges of backward, and
    the other processes would wait for it forever.
    """
    if not torch.is_grad_enabled():
        return rows_0D
    nothing = weights_01.sum().to(rows_0D.dtype)
    for parameter in experts.parameters():
        if parameter.requires_grad:
            nothing = nothing + parameter.flatten()[:0].sum().to(rows_0D.dtype)
    return rows_0D + nothing


def split_experts(model: Decoder, mesh: Mesh) -> None:
    """Keep only this process's experts, and send rows to the others'. The model may be on meta or in memory.

    Attach adapters afterwards, to the experts that are held.
    """
    if mesh.rows is None:
        return
    parts = [mesh.rows_of(index) for index in range(mesh.split)]
    for layer, moe in model.moe_layers().items():
        experts = moe.experts
        if experts.num_experts != mesh.num_experts:
            raise ConfigError(
                f"layer {layer} has {experts.num_experts} experts, the model {mesh.num_experts}: layers with"
                " experts of their own number cannot be split",
                next="--place.split 1",
            )
        experts.dispatch = RowsDispatch(mesh.experts, parts)
        for module in experts.modules():
            for name, tensor in list(parameters_of(module).items()):
                if tensor is not None:
                    part = _part(tensor.detach(), mesh.rows)
                    parameters_of(module)[name] = nn.Parameter(part, requires_grad=tensor.requires_grad)
            for name, buffer in list(buffers_of(module).items()):
                if buffer is not None:
                    buffers_of(module)[name] = _part(buffer, mesh.rows)


def _part(tensor: Tensor, rows: Rows) -> Tensor:
    """Copy those rows into their own memory."""
    return tensor[rows.slice].clone()
