"""Expert parallelism: send each token's rows to the processes that hold its experts, and the results back.

sort the T K rows by expert, and so by process
exchange the number of rows per expert         once per layer and forward visit; the host waits for it
exchange rows and routing weights              all-to-all with uneven splits; meanwhile the shared experts
expert_mlp of the received rows, K = 1         the same op as on one process
exchange the results, sum each token's K rows in float32

Backward exchanges gradients in the other direction: of the results, then of rows and weights, with the shared
experts' backward beside them. A process without rows takes part in every exchange, forward and backward,
because the number of exchanges depends only on the layers.
If a process would get more rows than the plan has memory for, all cut their tokens in pieces (pieces.py).
In float32, results and gradients of experts are bit-identical to one process's, for the same rows in the same
order. In bf16 a row is rounded once more on its way back, and so is its gradient: 2.9e-3 of the norm.

T tokens, K experts per token, E experts of the model, n = T K rows sent, N rows received, D width.
"""

# torch's Function.backward is untyped
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

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
from unfreeze.parallel.processes.collectives import InFlight
from unfreeze.parallel.processes.mesh import Mesh


class Exchange(Protocol):
    """Moves rows between the processes that share experts: process `rank` of `size`.

    The reference is torch's all-to-all (a Group of collectives.py). Another way of moving them has the same
    method: the next send[r] rows go to process r, receive[r] rows come from it, in rank order.
    """

    rank: int
    size: int

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> InFlight: ...


@dataclass(frozen=True)
class Home:
    """The routing of one call's rows; kept for the layer's recomputation.

    token_n   token of each sent row, sorted by expert
    place_TK  index among the sent rows of a token's K rows, in summation order
    slot_TK   the same in the order of ids
    ids_N1    expert of each received row, counted from the first one held here
    send, receive  number of rows to and from each process
    most      rows that the busiest process receives; the same number on all
    """

    exchange: Exchange
    token_n: Tensor
    place_TK: Tensor
    slot_TK: Tensor
    ids_N1: Tensor
    send: list[int]
    receive: list[int]
    most: int = 0

    def there(self, rows_n: Tensor) -> InFlight:
        """Send rows to the experts: sent rows -> received rows."""
        return self.exchange.exchange(rows_n, self.send, self.receive)

    def back(self, rows_N: Tensor) -> InFlight:
        """Send results back: received rows -> sent rows."""
        return self.exchange.exchange(rows_N, self.receive, self.send)

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
    """An `Experts.dispatch` that sends rows to their experts by an Exchange.

    exchange  between the processes that share the experts
    parts     the experts of each of them, in rank order
    room      rows that the plan has memory for in one process; None: any number
    """

    def __init__(self, exchange: Exchange, parts: Sequence[Rows], room: int | None = None):
        self.exchange, self.parts, self.rows = exchange, list(parts), parts[exchange.rank]
        self.room = room

    def __call__(
        self,
        experts: Experts,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None,
        once: Reuse | None,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Like Experts.forward. once: caches the exchanged counts for the layer's recomputation."""
        first_visit: list[bool] = []

        def find() -> Home:
            first_visit.append(True)
            return self.home(ids_TK)

        home: Home = find() if once is None else once(find)
        # the op's results are in `reuse`, so the second visit's results are not read
        read = bool(first_visit) or reuse is None
        if self.room is not None and home.most > self.room:
            from unfreeze.parallel.placement.pieces import in_pieces

            y_TD = in_pieces(self, experts, (x_TD, ids_TK, weights_TK), home.most, read=read)
            return y_TD if beside is None else y_TD + beside()

        return self.at(home, experts, x_TD, weights_TK, reuse, read=read, beside=beside)

    def at(
        self,
        home: Home,
        experts: Experts,
        x_TD: Tensor,
        weights_TK: Tensor,
        reuse: Reuse | None = None,
        *,
        read: bool = True,
        beside: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Return the experts' output, plus that of `beside`, which is computed while the rows travel."""
        trip = _Trip(home)
        sent = cast("tuple[Tensor, Tensor]", _Begin.apply(x_TD, weights_TK, trip))
        other_TD = None if beside is None else beside()
        rows_ND, weights_N1 = cast("tuple[Tensor, Tensor]", _Arrive.apply(*sent, trip))
        if home.ids_N1.numel():
            y_ND = experts.here(rows_ND, home.ids_N1, weights_N1, reuse)
        else:
            y_ND = _connected(experts, rows_ND, weights_N1)
        y_TD = _Back.apply(y_ND, home, read)
        return y_TD if other_TD is None else y_TD + other_TD

    @torch.no_grad()
    def home(self, ids_TK: Tensor) -> Home:
        """Return where these tokens' rows go, and come from. Every process takes part."""
        ids_n, own, device = ids_TK.flatten(), len(self.rows), ids_TK.device
        slots_n = torch.arange(len(ids_n), device=device)
        order_n = ids_n.argsort(stable=True)
        slot_TK = torch.empty_like(order_n).scatter_(0, order_n, slots_n).view_as(ids_TK)
        place_TK = slot_TK if slot_TK.is_cuda else slot_TK.sort(1).values

        # every process's rows per expert, then the layer's one wait: how many rows come from each process
        counts_E = ids_n.new_zeros(self.rows.of).scatter_add_(0, ids_n, torch.ones_like(ids_n))
        sizes = [len(rows) for rows in self.parts]
        every = [self.rows.of] * len(sizes)
        counts_pE = self.exchange.exchange(counts_E.repeat(len(sizes)), every, every).arrived()
        counts_pE = counts_pE.view(len(sizes), self.rows.of)
        arriving_pe = counts_pE[:, self.rows.slice]
        leaving_p, total_p = (
            torch.stack([part.sum() for part in counts.split(sizes)])
            for counts in (counts_E, counts_pE.sum(0))
        )
        numbers = torch.stack([leaving_p, arriving_pe.sum(1), total_p]).tolist()
        send, receive, total = cast("list[list[int]]", numbers)
        local_e = torch.arange(own, device=device).repeat(len(sizes))
        ids_N = local_e.repeat_interleave(arriving_pe.flatten(), output_size=sum(receive))
        token_n = torch.div(order_n, ids_TK.shape[1], rounding_mode="floor")
        return Home(self.exchange, token_n, place_TK, slot_TK, ids_N[:, None], send, receive, most=max(total))


@dataclass
class _Trip:
    """A call's rows on their way: what has begun and not arrived, forward, then backward.

    need  gradients that are wanted: of x, of the weights
    """

    home: Home
    flights: list[InFlight] = field(default_factory=list[InFlight])
    need: tuple[bool, bool] = (False, False)


class _Begin(torch.autograd.Function):
    """(x [T, D], weights [T, K]) -> (rows [N, D], weights [N, 1]) of the experts held here, still arriving.

    Forward begins the exchange that _Arrive waits for; backward waits for what _Arrive began. Autograd runs
    the nodes that were made in between, those of the shared experts, between the two.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip, home = trip, trip.home
        trip.need = ctx.needs_input_grad[:2]
        weights_n1 = torch.empty_like(weights_TK).view(-1, 1)
        weights_n1.index_copy_(0, home.slot_TK.flatten(), weights_TK.reshape(-1, 1))
        trip.flights = [home.there(x_TD.index_select(0, home.token_n)), home.there(weights_n1)]
        return trip.flights[0].rows, trip.flights[1].rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        trip: _Trip = ctx.trip
        arrived = iter([flight.arrived() for flight in trip.flights])
        trip.flights = []
        need_x, need_weights = trip.need
        dx_TD = trip.home.combine(next(arrived)) if need_x else None
        dweights_TK = next(arrived)[:, 0][trip.home.slot_TK] if need_weights else None
        return dx_TD, dweights_TK, None


class _Arrive(torch.autograd.Function):
    """The rows and weights of _Begin, once they are here; backward begins to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_N1: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        for flight in trip.flights:
            flight.wait()
        trip.flights = []
        return rows_ND.view_as(rows_ND), weights_N1.view_as(weights_N1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        trip: _Trip = ctx.trip
        drows_ND, dweights_N1 = gradients
        wanted = zip((drows_ND, dweights_N1), trip.need, strict=True)
        trip.flights = [trip.home.back(gradient) for gradient, need in wanted if need]
        return drows_ND, dweights_N1, None


class _Back(torch.autograd.Function):
    """Results [N, D] of the experts held here -> y [T, D], the sum of each token's K.

    read False: y is not used and is zeros.
    """

    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, home: Home, read: bool) -> Tensor:
        ctx.home = home
        if not read:
            return y_ND.new_zeros(len(home.place_TK), y_ND.shape[1])
        return home.combine(home.back(y_ND).arrived())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        home: Home = ctx.home
        (dy_TD,) = gradients
        return home.there(dy_TD.index_select(0, home.token_n)).arrived(), None, None


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


def split_experts(model: Decoder, mesh: Mesh, exchange: Exchange | None = None) -> None:
    """Keep only this process's experts, and send rows to the others'. The model may be on meta or in memory.

    Attach adapters afterwards, to the experts that are held. exchange: None: torch's all-to-all.
    """
    if mesh.rows is None:
        return
    parts = [mesh.rows_of(index) for index in range(mesh.split)]
    for layer, moe in model.moe_layers().items():
        experts = moe.experts
        if experts.dispatch is not None:  # a later pass through experts that are split already
            continue
        if experts.num_experts != mesh.num_experts:
            raise ConfigError(
                f"layer {layer} has {experts.num_experts} experts, the model {mesh.num_experts}: layers with"
                " experts of their own number cannot be split",
                next="--place.split 1",
            )
        experts.dispatch = RowsDispatch(exchange or mesh.experts, parts)
        for module in experts.modules():
            for name, tensor in list(parameters_of(module).items()):
                if tensor is not None:
                    part = _part(tensor.detach(), mesh.rows)
                    parameters_of(module)[name] = nn.Parameter(part, requires_grad=tensor.requires_grad)
            for name, buffer in list(buffers_of(module).items()):
                if buffer is not None:
                    buffers_of(module)[name] = _part(buffer, mesh.rows)


def make_room(model: Decoder, rows: int) -> None:
    """Set the rows that the plan has memory for in each layer of this process."""
    for moe in model.moe_layers().values():
        if isinstance(moe.experts.dispatch, RowsDispatch):
            moe.experts.dispatch.room = rows


def _part(tensor: Tensor, rows: Rows) -> Tensor:
    """Copy those rows into their own memory."""
    return tensor[rows.slice].clone()
