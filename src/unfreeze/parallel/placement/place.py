"""place: load the weights of a model on "meta", each filled once from the files.

Order: resolve names and shapes (allocates nothing) → allocate → stream → check → only then assign the tensors
to the modules. So after an error the model is unchanged.
Packed weights are copied from file to memory as bytes (docs/why/trust.md L1); nothing is left uninitialised
(L8).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unfreeze.checkpoint.keymap import StackRule
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.resolve import Params, Placement, resolve
from unfreeze.checkpoint.stream import LoadStats
from unfreeze.core.errors import CheckpointError
from unfreeze.core.torch_types import buffers_of, parameters_of
from unfreeze.models import Decoder
from unfreeze.parallel.placement.dispatch import split_experts
from unfreeze.parallel.placement.owned import fill_owned, held_here, owned
from unfreeze.parallel.placement.peers import FromPeers, read_by
from unfreeze.parallel.placement.residency import Streaming
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.parallel.processes.mesh import ONE, Mesh

if TYPE_CHECKING:
    from unfreeze.parallel.placement.fsdp import Sharded

_ADAPTER = ".adapter."


def place(
    model: nn.Module,
    manifest: Manifest,
    rules: Sequence[StackRule],
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    ignore: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    mesh: Mesh = ONE,
    streaming: Streaming | None = None,
    peers: FromPeers | None = None,
) -> LoadStats:
    """Fill `model` (parameters and persistent buffers on "meta") from a checkpoint, on `device`.

        dtype     of floating-point parameters; None: that of each meta tensor. Buffers (packed parts, routing
                  biases) keep theirs
        progress  called with (bytes done, total bytes)
        mesh      the processes that load it together: each holds its own experts (dispatch.py) and reads its
                  share of the bytes (owned.py)
        streaming takes tensors out of what is loaded, and fills them when needed. They are resolved and
                  checked for coverage like all others

    Parameters under ".adapter." and non-persistent buffers don't come from the files: they keep their values
    and are moved to `device`. One that is on meta is an error, because no file could fill it.
    Raises CheckpointError (see checkpoint.resolve and checkpoint.stream); the model is then unchanged.
    """
    wanted = _wanted(model, dtype)
    params: Params = {name: (kind, tuple(tensor.shape)) for name, (tensor, kind) in wanted.items()}
    _check_fillable(model, wanted.keys())
    placements = resolve(manifest, rules, params, ignore=ignore, tied=tied)
    check_coverage(placements, params)
    names = frozenset[str]() if streaming is None else streaming.names(model, params)
    names |= frozenset[str]() if peers is None else peers.names(model, params)
    rests = [] if peers is None else peers.rests(model, placements, params)
    division = owned(placements, params, mesh, names, read_by(rests))
    if mesh.rows is not None:
        assert isinstance(model, Decoder)
        placements = held_here(placements, params, mesh)
        split_experts(model, mesh)
        wanted = _wanted(model, dtype)
        params = {name: (kind, tuple(tensor.shape)) for name, (tensor, kind) in wanted.items()}
        check_coverage(placements, params)
    streamed = {} if streaming is None else streaming.take(model, placements, params, device)
    if peers is not None:
        before, after = read_by(rests)[mesh.all.rank], sum(p.info.nbytes for p in division.mine)
        streamed |= peers.take(model, rests, device, _part_of(progress, 0, after))
        progress = _part_of(progress, before, 0)
    tensors = streamed | {
        name: torch.empty(shape, dtype=kind, device=device)
        for name, (kind, shape) in params.items()
        if name not in streamed
    }
    loaded = {name: tensor for name, tensor in tensors.items() if name not in streamed}
    stats = fill_owned(division, loaded, mesh, progress)
    if peers is not None:
        expanded = stats.expanded_bytes + peers.expanded_bytes
        stats = replace(stats, expanded_bytes=expanded, rounded=stats.rounded + peers.rounded)
    hand_over(model, {id(old): tensors[name] for name, (old, _) in wanted.items()}, torch.device(device))
    _check_materialised(model)
    return stats


def place_sharded(
    model: Decoder,
    manifest: Manifest,
    rules: Sequence[StackRule],
    group: Group,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    ignore: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[LoadStats, Sharded]:
    """Like `place`, with every weight sharded over the processes of `group`, which call it together.

    Each process reads its own rows (parallel/placement/fsdp.py). dtype: compute dtype.
    """
    from unfreeze.parallel.placement.fsdp import Sharded, division

    # check against the shapes of the whole model
    wanted = _wanted(model, dtype)
    params: Params = {name: (kind, tuple(tensor.shape)) for name, (tensor, kind) in wanted.items()}
    _check_fillable(model, wanted.keys())
    placements = resolve(manifest, rules, params, ignore=ignore, tied=tied)
    check_coverage(placements, params)

    # then load this process's part
    sharded = Sharded(model, group, dtype, device)
    here, divided = division(placements, params, sharded)
    own: dict[str, Tensor] = dict(sharded.local)
    buffers = {
        name: torch.empty(shape, dtype=kind, device=device)
        for name, (kind, shape) in params.items()
        if name not in own
    }
    held = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in (own | buffers).items()}
    check_coverage(here, held)
    stats = fill_owned(divided, own | buffers, Mesh(group, group, ALONE), progress)
    stats = replace(stats, rounded=stats.rounded + sharded.round_())
    _hand_over_buffers(model, {id(wanted[name][0]): buffer for name, buffer in buffers.items()}, device)
    return stats, sharded


def _part_of(
    progress: Callable[[int, int], None] | None, before: int, after: int
) -> Callable[[int, int], None] | None:
    """Return a progress callback for a part of the load.

    `before` bytes come before it and `after` bytes after it.
    """
    if progress is None:
        return None
    return lambda done, total: progress(before + done, before + total + after)


def _wanted(model: nn.Module, dtype: torch.dtype | None) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Return name -> (meta tensor, target dtype) of everything the files must fill.

    Shared parameters count once, under their first name.
    """
    wanted: dict[str, tuple[Tensor, torch.dtype]] = {}
    for name, parameter in model.named_parameters():
        if _ADAPTER not in name:
            floating = parameter.is_floating_point()
            wanted[name] = parameter, dtype if dtype is not None and floating else parameter.dtype
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent and _ADAPTER not in name:
            wanted[name] = buffer, buffer.dtype
    return wanted


def _check_fillable(model: nn.Module, filled: Collection[str]) -> None:
    """Check that everything no file will fill already has values."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name not in filled and tensor.is_meta:
            raise CheckpointError(
                f"{name} {list(tensor.shape)} has no memory and no file fills it",
                next="build non-persistent buffers and adapters on a real device, or compute them at use",
            )


def check_coverage(placements: Sequence[Placement], params: Params) -> None:
    """Check that every element of every parameter is written exactly once (docs/why/trust.md L8).

    resolve promises it; this verifies it for each load.
    Raises CheckpointError naming the first parameter with a hole or an overlap.
    """
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in params}
    for placement in placements:
        if placement.expected is None and not placement.alias:
            ranges[placement.param].append((placement.start, placement.stop))
    for name, (_, shape) in params.items():
        end = 0
        for start, stop in sorted(ranges[name]):
            if start != end:
                what = "is filled twice from" if start < end else "is left uninitialised from"
                raise CheckpointError(
                    f"{name} {list(shape)} {what} element {min(start, end):,} on",
                    next="report this: a key map is wrong",
                )
            end = stop
        if end != torch.Size(shape).numel():
            raise CheckpointError(
                f"{name} {list(shape)} is left uninitialised from element {end:,} on",
                next="report this: a key map is wrong",
            )


def hand_over(model: nn.Module, new: Mapping[int, Tensor], device: torch.device) -> None:
    """Assign the filled tensors in place of the meta ones, and move all others to `device`.

    new: id of a meta tensor -> the filled one. Shared parameters stay shared.
    """
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(parameters_of(module).items()):
            if old is not None and id(old) in new:
                if id(old) not in parameters:
                    parameters[id(old)] = nn.Parameter(new[id(old)], requires_grad=old.requires_grad)
                parameters_of(module)[name] = parameters[id(old)]
            elif old is not None:
                old.data = old.data.to(device)
    _hand_over_buffers(model, new, device)


def _hand_over_buffers(model: nn.Module, new: Mapping[int, Tensor], device: torch.device | str) -> None:
    for module in model.modules():
        for name, old in list(buffers_of(module).items()):
            if old is not None:
                buffers_of(module)[name] = new[id(old)] if id(old) in new else old.to(device)


def _check_materialised(model: nn.Module) -> None:
    """Check L8 again on the result: nothing is on meta or has size zero."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta or tensor.numel() == 0:
            raise CheckpointError(
                f"{name} {list(tensor.shape)} is not materialised after placing",
                next="report this: a placing rule is wrong",
            )
