"""Train all weights on several processes; each holds a shard of every weight (torch's FSDP2).

A layer's weights are all-gathered when it is visited, and freed after it. Its gradients are reduce-scattered
as soon as its backward is done. Embedding, last norm and head are one unit that stays gathered from a forward
pass to the end of its backward, because losses read the head outside of any module.

held here   rows r·c to (r + 1)·c of dimension 0 of each weight, c = ceil(rows / n), in float32: the master
            weights that AdamW updates, with their gradient and moments
gathered    in the compute dtype: a bf16 weight is its rounded master, as on one process
gradients   summed in float32, from what backward computed in the compute dtype. They are not divided by the
            number of processes: a step's losses are divided by one token count (train/step.py)

Source: torch.distributed.fsdp.fully_shard; stage 3 of ZeRO, arXiv:1910.02054.
"""

# torch's modules' parameters, DTensor and fully_shard are partly untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unfreeze.checkpoint.resolve import Params, Placement
from unfreeze.core.errors import ConfigError
from unfreeze.core.process import give_back_freed
from unfreeze.core.rows import Rows, here
from unfreeze.core.torch_types import buffers_of, parameters_of
from unfreeze.kernels.loops.numba_options import lend_memory
from unfreeze.models import Decoder
from unfreeze.parallel.placement.owned import Owned, Shared, cut_placement, divide, spans_of
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.parallel.processes.mesh import HeldPart

FORWARD = ("hidden", "_fill", "_step")
"""A Decoder's methods that go through its layers. Its own weights are gathered when one is called."""


class Sharded:
    """The weights of a model sharded over the processes of `group`, and this process's shards.

    dtype  compute dtype
    held   parameter name -> its shard. Its gradient is already summed.
    local  name -> that shard as a float32 tensor that shares memory with the model's parameter.
    """

    def __init__(self, model: Decoder, group: Group, dtype: torch.dtype, device: torch.device | str):
        """Shard a model on "meta". Its weights then have memory but no values; buffers are unchanged.

        Raises ConfigError if a weight is packed or frozen.
        """
        self.model, self.group, self.dtype = model, group, dtype
        packed = [
            name for name, module in model.named_modules() if getattr(module, "codec", None) is not None
        ]
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        if packed or frozen:
            raise ConfigError(
                f"place.weights is sharded, and {(packed or frozen)[0]} is"
                f" {'packed' if packed else 'frozen'}: only trained weights can be sharded",
                next="--place.weights device, or --train adapters (sft, prefer, distill)",
            )
        wide = [name for name, module in model.named_modules() if getattr(module, "float32", False)]
        self._wide = {f"{name}.{own}" for name in wide for own in parameters_of(model.get_submodule(name))}
        self._rows = {name: chunk(len(p), group.rank, group.size) for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        lend_memory()
        if torch.device(device).type == "cpu":
            give_back_freed()
        _fully_shard(model, dtype, torch.device(device).type)
        _materialise(model, torch.device(device))
        self.local = {name: here(p) for name, p in model.named_parameters()}
        model.sharded = True

    def held(self, name: str) -> HeldPart:
        """Return what this process holds of the named parameter."""
        return HeldPart(self._rows[name], ALONE, 1, half=self._rounded(name))

    def put(self, name: str, whole: Tensor) -> None:
        """Copy this process's shard of a full weight, rounded to the compute dtype as on one process."""
        part = whole[self._rows[name].slice]
        self.local[name].copy_(part.to(self.dtype) if self._rounded(name) else part)

    def _rounded(self, name: str) -> bool:
        """True if the computation rounds this weight: all but decays, if it is in half precision."""
        return self.dtype.itemsize < 4 and name not in self._wide

    def zero_buffers(self, device: torch.device | str) -> None:
        """Replace buffers on "meta" by zeros, for a model with randomly initialised weights."""
        for module in self.model.modules():
            for name, old in buffers_of(module).items():
                if old is not None and old.is_meta:
                    buffers_of(module)[name] = torch.zeros_like(old, device=device)

    def round_(self) -> int:
        """Round the loaded weights to the compute dtype, as on one process. Return how many changed."""
        changed = 0
        for name, tensor in self.local.items():
            if not self._rounded(name):
                continue
            rounded = tensor.to(self.dtype).float()
            changed += not torch.equal(rounded, tensor)
            tensor.copy_(rounded)
        return changed


def chunk(of: int, index: int, parts: int) -> Rows:
    """Return part `index` of `of` rows as torch.chunk cuts them.

    Each has ceil(of / parts) rows, the last ones fewer or none.
    """
    each = -(-of // parts)
    return Rows(min(of, index * each), min(of, (index + 1) * each), of)


def placement_of_rows(placement: Placement, shape: Sequence[int], rows: Rows) -> Placement | None:
    """Return the part of a placement that fills those rows of its parameter, counted from the first of them.

    shape: of the full parameter. None if it fills none of the rows.
    Raises ConfigError for a transposed matrix that would have to be cut across its rows.
    """
    row, info = prod(shape[1:]), placement.info
    first, last = max(placement.start, rows.first * row), min(placement.stop, rows.last * row)
    if first >= last:
        return None
    back = rows.first * row
    begin, end = first - placement.start, last - placement.start
    whole = (begin, end) == (0, placement.stop - placement.start)
    if whole:
        part = placement
    else:
        matrix = prod(info.shape[-2:]) if placement.transposed else 1
        if begin % matrix or end % matrix or placement.parse is not None or placement.expected is not None:
            raise ConfigError(
                f"{info.name} {list(info.shape)} is stored transposed and cannot be read by rows",
                next="--place.weights device",
            )
        inner = ((end - begin) // matrix, *info.shape[-2:]) if placement.transposed else (end - begin,)
        part = cut_placement(placement, begin, end, inner)
    return replace(part, index=(), start=part.start - back, stop=part.stop - back)


def division(
    placements: Sequence[Placement], params: Params, sharded: Sharded
) -> tuple[list[Placement], Owned]:
    """Return (placements of the rows held here and the buffers, who reads what of them).

    params: of the full model. Every process reads its rows. Buffers, which all hold, are read by one process
    each and broadcast to the others.
    """
    group = sharded.group
    buffers = [p for p in placements if p.param not in sharded.local]
    weights = [p for p in placements if p.param in sharded.local]

    def rows(rank: int) -> list[Placement]:
        parts: list[Placement] = []
        for placement in weights:
            shape = params[placement.param][1]
            part = placement_of_rows(placement, shape, chunk(shape[0], rank, group.size))
            parts += [] if part is None else [part]
        return parts

    mine, of_buffers = rows(group.rank), divide(buffers, [1.0] * group.size)
    by_rank = [_nbytes(rows(rank)) + _nbytes(of_buffers[rank]) for rank in range(group.size)]
    shared = [Shared(group, [spans_of(part) for part in of_buffers])]
    expanded = sum(placement.expanded_bytes for placement in placements)
    return [*mine, *buffers], Owned([*mine, *of_buffers[group.rank]], shared, by_rank, expanded)


def _nbytes(placements: Sequence[Placement]) -> int:
    return sum(placement.info.nbytes for placement in placements)


def _fully_shard(model: Decoder, dtype: torch.dtype, device: str) -> None:
    """Shard the model: one unit per layer, and one for embedding, norm and head."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import (
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    world = dist.group.WORLD
    assert world is not None
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype.itemsize < 4 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {"mesh": DeviceMesh.from_group(world, device), "mp_policy": policy}
    whole: dict[str, Any] = {
        **options,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False),
    }
    for part in model.modules():
        if getattr(part, "float32", False):  # decays and hyper-connections, which bf16 would round
            fully_shard(part, reshard_after_forward=True, **whole)
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # plain sums: gloo has no scaled ones, and nothing needs scaling
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
    for name in FORWARD:
        register_fsdp_forward_method(model, name)


def _materialise(model: Decoder, device: torch.device) -> None:
    """Allocate this process's shards in place of tensors on "meta". A tied weight stays one."""
    from torch.distributed.tensor import DTensor

    materialised: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in parameters_of(module).items():
            if old is None:
                continue
            if id(old) not in materialised:
                assert isinstance(old, DTensor)
                local = torch.zeros(old.to_local().shape, dtype=old.dtype, device=device)
                materialised[id(old)] = nn.Parameter(
                    DTensor.from_local(
                        local,
                        old.device_mesh,
                        old.placements,
                        run_check=False,
                        shape=old.shape,
                        stride=old.stride(),
                    )
                )
            parameters_of(module)[name] = materialised[id(old)]
    # fully_shard inspects and pads its parameters again; this torch call triggers it
    model._apply(_unchanged)  # pyright: ignore[reportPrivateUsage]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
