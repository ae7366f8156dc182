"""Divide the reading of a checkpoint: every byte is read once, and each process reads about as much.

placements of the whole model (checkpoint/resolve.py)
-> those of the experts held here, and those of replicated weights    narrowed to rows
-> divided among the processes that hold them                         cut at elements
read, then sent to the other holders                                  broadcast, as bytes

Process r of n reads the experts that only it holds, plus a share of the replicated weights that makes the
sums equal. They differ by at most 3 %, unless some processes hold one expert more and the replicated weights
are smaller than that.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from unfreeze.checkpoint.packing import bytes_read
from unfreeze.checkpoint.resolve import Params, Placement
from unfreeze.checkpoint.stream import LoadStats, Progress, stream
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import CheckpointError, UserError
from unfreeze.core.rows import Rows
from unfreeze.core.torch_types import split
from unfreeze.parallel.processes.collectives import BUCKET, Group
from unfreeze.parallel.processes.mesh import Mesh

Span = tuple[str, int, int]
"""Elements start:stop of a flattened parameter."""


@dataclass(frozen=True)
class Shared:
    """Weights replicated on a group of processes: spans[r] is read by process r and sent to the others."""

    group: Group
    spans: list[list[Span]]


@dataclass(frozen=True)
class Owned:
    """This process's reads of a checkpoint, and the data it receives.

    mine            placements to read, relative to the parameters as held here
    shared          what one process reads for several
    bytes_by_rank   of all processes
    expanded_bytes  of all placements, as in LoadStats
    """

    mine: list[Placement]
    shared: list[Shared] = field(default_factory=list[Shared])
    bytes_by_rank: list[int] = field(default_factory=list[int])
    expanded_bytes: int = 0


def held_here(placements: Sequence[Placement], params: Params, mesh: Mesh) -> list[Placement]:
    """Return the placements that this process holds. params: of the whole model."""
    parts: list[Placement] = []
    for placement in placements:
        rows = mesh.held(placement.param).rows
        part = (
            placement if rows is None else placement_of_experts(placement, params[placement.param][1], rows)
        )
        parts += [part] if part is not None else []
    return parts


def owned(
    placements: Sequence[Placement],
    params: Params,
    mesh: Mesh,
    streamed: Container[str] = (),
    beside: Sequence[int] = (),
) -> Owned:
    """Divide the placements of a whole model among the processes. params: of the whole model.

    streamed: names of parameters that are read elsewhere; only the scales beside them are compared here.
    beside: bytes of them that each process reads while loading.
    Every process computes the same result, so nothing is exchanged.
    """
    placements = [p for p in placements if p.param not in streamed or p.expected is not None]
    size, split = mesh.all.size, mesh.split
    expanded = sum(placement.expanded_bytes for placement in placements)
    if size == 1:
        return Owned(list(placements), [], [_nbytes(placements)], expanded)
    copies = size // split

    # group experts by their holders; each set is divided evenly among its replicas
    rest = [p for p in placements if mesh.axis_of(p.param) == "all"]
    experts = [p for p in placements if mesh.axis_of(p.param) != "all"]
    of_place: list[list[list[Placement]]] = []
    for place in range(split if experts else 0):
        rows = mesh.rows_of(place)
        theirs = [
            part for p in experts if (part := placement_of_experts(p, params[p.param][1], rows)) is not None
        ]
        of_place.append(divide(theirs, [1.0] * copies))
    own = [_nbytes(of_place[r % split][r // split]) if of_place else 0 for r in range(size)]
    own = [mine + other for mine, other in zip(own, beside or [0] * size, strict=True)]

    # replicated weights go to the processes that have fewer bytes of their own
    mean = (sum(own) + _nbytes(rest)) / size
    of_rest = divide(rest, [max(0.0, mean - mine) for mine in own])
    by_rank = [mine + _nbytes(part) for mine, part in zip(own, of_rest, strict=True)]

    mine, shared = list(of_rest[mesh.all.rank]), [Shared(mesh.all, [spans_of(part) for part in of_rest])]
    if of_place:
        here = of_place[mesh.experts.rank]
        mine += here[mesh.all.rank // split]
        if copies > 1:
            shared.append(Shared(mesh.data, [spans_of(part) for part in here]))
    return Owned(mine, shared, by_rank, expanded)


def placement_of_experts(placement: Placement, shape: Sequence[int], rows: Rows) -> Placement | None:
    """Return the part of a placement in those rows of its parameter, counted from the first of them.

    shape: of the whole parameter, [E, …]. None if no row does.
    """
    info, index = placement.info, placement.index
    row = prod(shape[1:])
    if index:
        expert, *inner = index
        assert isinstance(expert, int)
        if not rows.first <= expert < rows.last:
            return None
        back = 0 if placement.expected is not None else rows.first * row
        return replace(
            placement,
            index=(expert - rows.first, *inner),
            start=placement.start - back,
            stop=placement.stop - back,
        )
    if placement.expected is not None:  # values for a whole stack: one process compares them
        return placement if rows.first == 0 else None
    if info.packed_from is not None and info.packed_from.experts == rows.of:
        part = replace(info, packed_from=info.packed_from.of_experts(rows.first, rows.last))
        return replace(placement, info=part, start=0, stop=len(rows) * row)
    if placement.parse is not None or info.shape[:1] != (rows.of,):
        raise ValueError(f"{info.name} {list(info.shape)} cannot be cut into {rows.of} experts")
    count = info.nbytes // ITEMSIZE[info.dtype] // rows.of
    part = cut_placement(placement, rows.first * count, rows.last * count, (len(rows), *info.shape[1:]))
    return replace(part, start=0, stop=len(rows) * row)


def divide(placements: Sequence[Placement], weights: Sequence[float]) -> list[list[Placement]]:
    """Cut the placements, in file order, into parts of bytes proportional to the weights.

    A tensor that is copied as is can be cut at any element, a transposed stack between matrices. What is
    compared, parsed or packed stays whole, and a packed weight's parts together.
    """
    parts: list[list[Placement]] = [[] for _ in weights]
    total, sum_ = _nbytes(placements), sum(weights) or 1.0
    ends = [round(total * sum(weights[: i + 1]) / sum_) for i in range(len(weights))]
    ends[-1] = total
    part = done = 0
    for placement in sorted(placements, key=lambda p: (p.info.file, p.info.offset, not bytes_read(p))):
        info, itemsize = placement.info, ITEMSIZE[placement.info.dtype]
        if info.packed_from is not None:
            while part < len(parts) - 1 and done >= ends[part] and bytes_read(placement):
                part += 1
            parts[part].append(placement)
            done += bytes_read(placement)
            continue
        numel = info.nbytes // itemsize
        step = _step(placement)
        first = 0
        while first < numel or (numel == 0 and first == 0):
            while part < len(parts) - 1 and done >= ends[part]:
                part += 1
            room = -(-(ends[part] - done) // (itemsize * step)) * step if part < len(parts) - 1 else numel
            last = min(numel, first + max(step, room))
            whole = first == 0 and last == numel
            shape = (last - first,) if step == 1 else ((last - first) // step, *info.shape[-2:])
            parts[part].append(placement if whole else cut_placement(placement, first, last, shape))
            done += (last - first) * itemsize
            if last == numel:
                break
            first = last
    return parts


def _step(placement: Placement) -> int:
    """Return the number of elements that must stay together."""
    numel = placement.info.nbytes // ITEMSIZE[placement.info.dtype]
    if placement.expected is not None or placement.parse is not None:
        return max(1, numel)
    return prod(placement.info.shape[-2:]) if placement.transposed else 1


def cut_placement(placement: Placement, first: int, last: int, shape: tuple[int, ...]) -> Placement:
    """Return elements first:last of the tensor on disk, as a placement into as many of its parameter."""
    info, itemsize = placement.info, ITEMSIZE[placement.info.dtype]
    part = replace(info, shape=shape, nbytes=(last - first) * itemsize, offset=info.offset + first * itemsize)
    expanded = placement.expanded_bytes * (last - first) * itemsize // max(1, info.nbytes)
    start = placement.start
    return replace(placement, info=part, start=start + first, stop=start + last, expanded_bytes=expanded)


def spans_of(placements: Sequence[Placement]) -> list[Span]:
    """Return the spans that the placements fill, merging neighbours."""
    filled = sorted((p.param, p.start, p.stop) for p in placements if p.expected is None and not p.alias)
    spans: list[Span] = []
    for param, start, stop in filled:
        if spans and spans[-1][0] == param and spans[-1][2] == start:
            spans[-1] = (param, spans[-1][1], stop)
        else:
            spans.append((param, start, stop))
    return spans


def fill_owned(
    division: Owned, tensors: Mapping[str, Tensor], mesh: Mesh, progress: Progress | None = None
) -> LoadStats:
    """Read this process's part and exchange it, so that the tensors are filled on every process.

    Return the bytes of all processes and the seconds of this one. Raises CheckpointError; in the other
    processes UserError.
    """
    started, everyone, rounded = time.perf_counter(), mesh.all, 0
    # tensors stored twice are compared with the first copy, so only once that is complete everywhere
    for aliases in (False, True):
        mine = [placement for placement in division.mine if placement.alias == aliases]
        rounded += read_part(everyone, mine, tensors, progress)
        for shared in () if aliases else division.shared:
            give(shared, tensors)
    return LoadStats(
        sum(division.bytes_by_rank),
        time.perf_counter() - started,
        division.expanded_bytes,
        rounded,
        tuple(division.bytes_by_rank) if everyone.size > 1 else (),
    )


def read_part(
    everyone: Group,
    mine: Sequence[Placement],
    tensors: Mapping[str, Tensor],
    progress: Progress | None = None,
) -> int:
    """Read this process's part while all others read theirs. Return how many numbers were rounded.

    Raises CheckpointError; in the other processes UserError.
    """
    rounded, error = 0, None
    try:
        rounded = stream(mine, tensors, progress).rounded
    except CheckpointError as found:
        error = found
    failed = everyone.any(error is not None)
    if error is not None:
        raise error
    if failed:
        raise UserError(
            "another process could not read its part of the checkpoint, so this one stops too",
            next="see that process's message",
        )
    return rounded


def give(shared: Shared, tensors: Mapping[str, Tensor]) -> None:
    """Broadcast what each process read, in buckets of at most BUCKET bytes or one long span."""
    flat = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
    for source, spans in enumerate(shared.spans):
        parts = [flat[param][start:stop].view(torch.uint8) for param, start, stop in spans]
        for bucket in _buckets(parts):
            if len(bucket) == 1:
                shared.group.broadcast(bucket[0], source)
                continue
            together = torch.cat(bucket)
            shared.group.broadcast(together, source)
            if source != shared.group.rank:
                for part, value in zip(bucket, split(together, [len(b) for b in bucket]), strict=True):
                    part.copy_(value)


def _buckets(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for part in parts:
        if bucket and sum(map(len, bucket)) + len(part) > BUCKET:
            yield bucket
            bucket = []
        bucket.append(part)
    if bucket:
        yield bucket


def _nbytes(placements: Sequence[Placement]) -> int:
    return sum(map(bytes_read, placements))
