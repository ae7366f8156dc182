"""Record a mixture of experts, and latent attention, into a Program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unfreeze.kernels.decode_step import experts, ops
from unfreeze.kernels.decode_step.dots import FLOAT32
from unfreeze.kernels.decode_step.experts import DOWN_ROWS, UP_ROWS
from unfreeze.kernels.decode_step.program import Program, Row, Store, Weight
from unfreeze.kernels.decode_step.slots import SlotTable
from unfreeze.kernels.decode_step.weights import DENSE
from unfreeze.kernels.expert_mlp import ExpertFactors
from unfreeze.quant.codec import Packed

Adapter = tuple[Tensor, Tensor, float] | SlotTable
"""A [R, K], B [O, R] and scale of the product that is added, scale · B A x; or those of each row."""


@dataclass(frozen=True)
class Routed:
    """The chosen experts of a step, sorted: tensors of the size that S sequences take at most."""

    ids: Tensor  # int64 [S, K]
    shares: Tensor  # float32 [S, K]
    used: Tensor  # int64 [1]: A
    experts: Tensor  # int64 [E]
    begins: Tensor  # int64 [E + 1]
    token: Tensor  # int64 [S K]
    weight: Tensor  # float32 [S K]


@dataclass(frozen=True)
class Choice:
    """A rule by which experts are chosen from the router's logits (models/blocks/routers.py, RoutingRule)."""

    top_k: int
    score: int
    correction: Tensor | None
    groups: int
    keep: int
    best: int
    normalize: bool
    after: bool
    per_expert: Tensor | None
    smallest: float
    added: float
    scale: float


def route(program: Program, logits: Row, rule: Choice) -> Routed:
    """Choose K experts for each sequence, and sort the rows by expert."""
    S, E, K = program.rows, logits.width, rule.top_k
    routed = Routed(
        torch.zeros(S, K, dtype=torch.int64),
        torch.zeros(S, K),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(E, dtype=torch.int64),
        torch.zeros(E + 1, dtype=torch.int64),
        torch.zeros(S * K, dtype=torch.int64),
        torch.zeros(S * K),
    )
    tensors = (
        routed.ids,
        routed.shares,
        routed.used,
        routed.experts,
        routed.begins,
        routed.token,
        routed.weight,
    )
    ids, shares, used, in_use, begins, token, weight = map(program.keep, tensors)
    arguments = [
        logits.address,
        logits.stride,
        E,
        K,
        rule.score,
        program.vector(rule.correction),
        rule.groups,
    ]
    arguments += [
        rule.keep,
        rule.best,
        rule.normalize,
        rule.after,
        program.vector(rule.per_expert),
        ids,
        shares,
    ]
    program.add(
        experts.choose,
        1,
        True,
        arguments,
        [rule.smallest, rule.added, rule.scale],
        reads=[logits],
        writes=[routed.ids, routed.shares],
    )
    program.add(
        experts.sort,
        1,
        False,
        [ids, shares, K, E, used, in_use, begins, token, weight],
        reads=[routed.ids, routed.shares],
        writes=[routed.used, routed.experts, routed.begins, routed.token, routed.weight],
    )
    return routed


class EachExperts(NamedTuple):
    """The adapters of the rows, of gate and up and of down; None: no row has one."""

    gate_up: SlotTable | None = None
    down: SlotTable | None = None


class Gated(NamedTuple):
    """An activation of gate and up: kind (rows.py), its numbers, and if rows of gate and up alternate."""

    kind: int
    alpha: float = 0.0
    limit: float = 0.0
    interleaved: bool = False


def expert_mlp(
    program: Program,
    x: Row,
    routed: Routed,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    factors: ExpertFactors | EachExperts | None,
    *,
    gated: Gated,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    scales_input: bool = False,
    add: Row | None = None,
) -> Row:
    """add + Σ_k w_k · down_e(act(gate_e x, up_e x)); scales_input: Σ_k down_e(act(gate_e w_k x, …)).

    biases: float32 or narrower, [E, 2I] and [E, D]. factors: of all rows, or those of each.
    """
    first, second = program.weight(gate_up), program.weight(down)
    D, I = down.shape[-2:]
    n = routed.token.numel()
    each = factors if isinstance(factors, EachExperts) else EachExperts()
    factors = factors if isinstance(factors, ExpertFactors) else ExpertFactors()
    sorted_ = [routed.experts, routed.begins, routed.token, routed.weight]
    experts_, begins, token, weight = (tensor.data_ptr() for tensor in sorted_)
    used = routed.used.data_ptr()

    def thin(
        A: Tensor | None,
        B: Tensor | None,
        source: Tensor,
        stride: int,
        gathered: bool,
        table: SlotTable | None,
    ) -> tuple[list[int], list]:
        """Record t = A x; return the arguments of B t, and what they read."""
        width, parts = (D, 2) if gathered else (I, 1)
        if table is not None:
            height = parts * table.rank
            held = [program.thin_tile(), 0, 4 * width]
            end = [0, 0, FLOAT32, DENSE[torch.float32][1].address(False)]
        elif A is None or B is None:
            return [0] * 6, []
        else:
            height, held_A = A.shape[1], program.weight(A.detach())
            held, end = [held_A.tile, held_A.codes, held_A.stride], [B.shape[2], *program.factor(B)]
        low = torch.zeros(n, height)
        arguments = [*held, height, width, source.data_ptr(), stride, gathered]
        arguments += [experts_, begins, token, program.keep(low), 4 * height, *program.tables(table), parts]
        program.add(experts.thin, 1, False, arguments, reads=[source, *sorted_], writes=[low], count=used)
        return [low.data_ptr(), 4 * height, *end], [low]

    # h = act(gate x, up x), packed for the second product
    packed = program.packed(x)
    stride = program.packed_stride(x)
    h = program.scratch(n, I)
    low, reads = thin(factors.gate_up_A, factors.gate_up_B, x.packed, stride, True, each.gate_up)
    act, alpha, limit, interleaved = gated
    arguments = [*first.arguments, D, I, interleaved, packed, stride, experts_, begins, token]
    arguments += [
        h.data_ptr(),
        I * program.size,
        act,
        program.vector(biases[0]),
        *low,
        weight if scales_input else 0,
        *program.tables(each.gate_up),
    ]
    program.add(
        experts.up,
        -(-I // UP_ROWS),
        False,
        arguments,
        [factors.scale, alpha, limit],
        reads=[x.packed, *sorted_, *reads],
        writes=[h],
        count=used,
    )

    # y = add + Σ w down h
    y = program.row(D)
    low, reads = thin(factors.down_A, factors.down_B, h, I * program.size, False, each.down)
    end = [add.address, add.stride] if add is not None else [0, 0]
    arguments = [*second.arguments, I, D, h.data_ptr(), I * program.size, used, experts_, begins, token]
    arguments += [0 if scales_input else weight, y.address, y.stride, *end, program.vector(biases[1]), *low]
    arguments += program.tables(each.down)
    program.add(
        experts.down,
        -(-D // DOWN_ROWS),
        False,
        arguments,
        [factors.down_scale],
        reads=[h, routed.used, *sorted_, *reads, *([add] if add is not None else [])],
        writes=[y],
    )
    return y


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention (models/blocks/mla.py): heads, widths of a head's parts, of the latent."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int


def latent_query(
    program: Program, q: Row, sizes: Latent, kv_b: Tensor | Packed, adapter: Adapter | None
) -> Row:
    """[W_kᵀ q_nope | q_rope] of every head, packed head by head. q: rotated."""
    W, thin, tables, scale = _kv_b(program, kv_b, adapter)
    width = sizes.latent + sizes.rope
    out = program.row(sizes.heads * width)
    arguments = [q.address, q.stride, sizes.nope + sizes.rope, sizes.nope, sizes.latent, W.kind]
    arguments += [
        sizes.nope + sizes.value,
        out.packed.data_ptr(),
        program.packed_stride(out),
        width * program.size,
    ]
    program.add(
        ops.into_latent,
        sizes.heads,
        False,
        [*arguments, *thin, *W.arguments, *tables],
        [scale],
        reads=[q],
        writes=[out.packed],
    )
    return out


def latent_value(
    program: Program, x: Row, sizes: Latent, kv_b: Tensor | Packed, adapter: Adapter | None
) -> Row:
    """W_v applied to the latents that attention summed, [S, heads · (latent …)] -> [S, heads · value]."""
    W, thin, tables, scale = _kv_b(program, kv_b, adapter)
    out = program.row(sizes.heads * sizes.value)
    packed = program.writes_packed(out, sizes.value)
    arguments = [x.address, x.stride, x.width // sizes.heads, sizes.latent, W.kind]
    arguments += [sizes.nope + sizes.value, sizes.nope, sizes.value, out.address, out.stride, *thin]
    arguments += [packed, program.packed_stride(out), *W.arguments, *tables]
    program.add(
        ops.out_of_latent, sizes.heads, False, arguments, [scale], reads=[x], writes=[out, out.packed]
    )
    return out


def cache_latent(
    program: Program,
    x: Row,
    gain: Tensor,
    eps: float,
    sizes: Latent,
    tables: tuple[int, int, int],
    pairing: int,
    store: Store,
) -> None:
    """Write [norm(latent) | rotated key] of each sequence to the cache."""
    cos, sin, _ = tables
    arguments = [x.address, x.stride, program.vector(gain), sizes.latent, sizes.rope, cos, sin, pairing]
    arguments += [*program.cache(store.rows), program.places.data_ptr()]
    program.add(ops.cache_latent, 1, True, arguments, [eps], reads=[x], writes=[store.rows])


def _kv_b(
    program: Program, kv_b: Tensor | Packed, adapter: Adapter | None
) -> tuple[Weight, list[int], list[int], float]:
    """The weight, and the arguments of its adapter or of each row's."""
    W = program.weight(kv_b)
    if isinstance(adapter, SlotTable):
        return W, [0, FLOAT32, 0, FLOAT32, adapter.rank], program.tables(adapter), 0.0
    if adapter is None:
        return W, [0] * 5, [0, 0], 0.0
    A, B = (program.dense(factor.detach()) for factor in adapter[:2])
    return W, [A.codes, A.kind, B.codes, B.kind, adapter[0].shape[0]], [0, 0], adapter[2]
