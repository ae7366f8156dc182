"""All weights trained on several processes, each of which holds rows of every one: torch's FSDP2.

A layer's weights are gathered from all processes when it is visited, and freed behind it; its gradients are
summed and divided by rows as soon as backward has passed it. Embedding, last norm and head are one unit that
stays gathered from a forward pass to the end of its backward: losses read the head outside of any module.

    held here   of each weight rows r·c to (r + 1)·c of dimension 0, c = ceil(rows / n), in float32: they are
                the masters that AdamW moves, with their gradient and moments
    gathered    in the dtype of the computation: a bf16 weight is its master rounded, as on one process
    gradients   summed in float32, of what backward gave in the computation's dtype. Nothing is divided by the
                number of processes: a step's losses are divided by one count of tokens (train/step.py)

Source: torch.distributed.fsdp.fully_shard; stage 3 of ZeRO, arXiv:1910.02054.
"""

# torch leaves modules' parameters, DTensor and fully_shard partly without types:
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
"""A Decoder's ways through its layers. Its own weights are gathered when one is entered."""


class Sharded:
    """The weights of a model that are divided among the processes of `group`, and what of them is here.

    dtype  of the computation.
    held   name of a parameter -> its rows here. Its gradient comes summed.
    local  name -> those rows: a float32 tensor that shares its memory with the model's parameter.
    """

    def __init__(self, model: Decoder, group: Group, dtype: torch.dtype, device: torch.device | str):
        """Divide a model on "meta". Its weights have memory then, and no values; buffers are as before.

        Raises ConfigError where a weight is packed or frozen.
        """
        self.model, self.group, self.dtype = model, group, dtype
        packed = [
            name for name, module in model.named_modules() if getattr(module, "codec", None) is not None
        ]
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        if packed or frozen:
            raise ConfigError(
                f"place.weights is sharded, and {(packed or frozen)[0]} is"
                f" {'packed' if packed else 'frozen'}: only weights that train are divided so",
                next="--place.weights device, or --train adapters (sft, prefer, distill)",
            )
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
        """What this process holds of the parameter of that name."""
        return HeldPart(self._rows[name], ALONE, 1, half=self.dtype.itemsize < 4)

    def put(self, name: str, whole: Tensor) -> None:
        """Copy the rows held here of a whole weight, rounded to the computation's dtype as on one process."""
        self.local[name].copy_(whole[self._rows[name].slice].to(self.dtype))

    def zero_buffers(self, device: torch.device | str) -> None:
        """Zeros in place of buffers on "meta", for a model that begins with random weights."""
        for module in self.model.modules():
            for name, old in buffers_of(module).items():
                if old is not None and old.is_meta:
                    buffers_of(module)[name] = torch.zeros_like(old, device=device)

    def round_(self) -> int:
        """Round what was read to the computation's dtype, as on one process. -> how many weights changed."""
        changed = 0
        for tensor in self.local.values() if self.dtype.itemsize < 4 else ():
            rounded = tensor.to(self.dtype).float()
            changed += not torch.equal(rounded, tensor)
            tensor.copy_(rounded)
        return changed


def chunk(of: int, index: int, parts: int) -> Rows:
    """Part `index` of `of` rows as torch.chunk cuts them: ceil(of / parts) each, fewer or none at the end."""
    each = -(-of // parts)
    return Rows(min(of, index * each), min(of, (index + 1) * each), of)


def placement_of_rows(placement: Placement, shape: Sequence[int], rows: Rows) -> Placement | None:
    """The part of a placement that fills those rows of its parameter, counted from the first of them.

    shape: of the whole parameter. None where it fills none of them.
    Raises ConfigError for a matrix stored transposed that would be cut across its rows.
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
    """(what fills the rows held here and the buffers, who reads what of it). params: of the whole model.

    Every process reads its rows. Buffers, which all hold, are read by one each and given to the others.
    """
    group = sharded.group
    buffers = [p for p in placements if p.param not in sharded.local]
    weights = [p for p in placements if p.param in sharded.local]

    def rows(rank: int) -> list[Placement]:
        found: list[Placement] = []
        for placement in weights:
            shape = params[placement.param][1]
            part = placement_of_rows(placement, shape, chunk(shape[0], rank, group.size))
            found += [] if part is None else [part]
        return found

    mine, of_buffers = rows(group.rank), divide(buffers, [1.0] * group.size)
    by_rank = [_nbytes(rows(rank)) + _nbytes(of_buffers[rank]) for rank in range(group.size)]
    shared = [Shared(group, [spans_of(part) for part in of_buffers])]
    expanded = sum(placement.expanded_bytes for placement in placements)
    return [*mine, *buffers], Owned([*mine, *of_buffers[group.rank]], shared, by_rank, expanded)


def _nbytes(placements: Sequence[Placement]) -> int:
    return sum(placement.info.nbytes for placement in placements)


def _fully_shard(model: Decoder, dtype: torch.dtype, device: str) -> None:
    """A unit per layer, and one of embedding, norm and head."""
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
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # sums, as plain sums: gloo has no scaled ones, and nothing is to be scaled
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
    for name in FORWARD:
        register_fsdp_forward_method(model, name)


def _materialise(model: Decoder, device: torch.device) -> None:
    """Memory for the rows held here, in place of what was on "meta". A tied weight stays one."""
    from torch.distributed.tensor import DTensor

    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in parameters_of(module).items():
            if old is None:
                continue
            if id(old) not in made:
                assert isinstance(old, DTensor)
                local = torch.zeros(old.to_local().shape, dtype=old.dtype, device=device)
                made[id(old)] = nn.Parameter(
                    DTensor.from_local(
                        local,
                        old.device_mesh,
                        old.placements,
                        run_check=False,
                        shape=old.shape,
                        stride=old.stride(),
                    )
                )
            parameters_of(module)[name] = made[id(old)]
    # fully_shard looks at its parameters again, and pads them; it listens to this call, which is torch's own
    model._apply(_unchanged)  # pyright: ignore[reportPrivateUsage]


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
