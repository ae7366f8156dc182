"""Write the checkpoint of a model whose weights are sharded over processes; each process writes some tensors.

Tensors on disk are whole, for any program to read. So weights are all-gathered one by one, in the model's
order, and one process writes each: process 0 the first ones, the last process the last ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.checkpoint.save import MAX_SHARD_BYTES, ShardPart, begin, finish_folder, name_parts, write_parts
from unfreeze.core.errors import UserError
from unfreeze.core.rows import gathered

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.checkpoint import Manifest
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.state import State


def write_divided(
    state: State, manifest: Manifest, folder: Path, group: Group, extra: Mapping[str, Path]
) -> None:
    """Write the checkpoint to `folder` atomically. Collective: all processes call it with the same folder.

    If the run is killed, the folder is complete or absent. A process that cannot write its part stops all.
    """
    temporary = group.texts(group.on_rank0(lambda: str(begin(folder))) or "")[0]
    try:
        own = group.meet(lambda: _write_own(state, manifest, Path(temporary), group))
        every = [json.loads(text) for text in group.texts(json.dumps([asdict(part) for part in own]))]
        parts = [ShardPart(**part) for of_process in every for part in of_process]

        def finish() -> None:
            name_parts(Path(temporary), parts)
            finish_folder(Path(temporary), folder, manifest.config, extra)

        group.on_rank0(finish)
    finally:
        if group.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)


def _write_own(state: State, manifest: Manifest, temporary: Path, group: Group) -> list[ShardPart]:
    """All-gather every weight, and write those assigned to this process."""
    from unfreeze.models.publish import carried, named_as_stored, published, stored_dtypes

    model, gathered = state.model, Gathered(state, group)
    dtypes = stored_dtypes(model, manifest)
    trained = published(model, manifest.config, dtypes=dtypes, values=gathered)

    def own() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in trained:
            if gathered.writer == group.rank:
                yield name, tensor.cpu()

    last = group.rank == group.size - 1
    beside = carried(model, manifest) if last else ()
    try:
        return write_parts(
            temporary,
            chain(named_as_stored(model, manifest, own()), beside),
            stem=f"shard-{group.rank}",
            max_shard_bytes=MAX_SHARD_BYTES // 4,  # a shard is held in host memory until it is written
        )
    except (OSError, UserError):
        for _ in trained:  # finish the collective gathers; the others learn of the error afterwards
            pass
        raise


class Gathered(Mapping[str, "Tensor"]):
    """Mapping from a parameter's name to the full tensor, all-gathered on access.

    Collective: all processes must access the same names in the same order.
    writer  process that writes the parameter accessed last
    """

    def __init__(self, state: State, group: Group):
        self._parameters, self.writer = state.optimizer.parameters, 0
        total, done = sum(p.numel() for p in self._parameters.values()), 0
        self._writers: dict[str, int] = {}
        for name, parameter in self._parameters.items():  # numel() is that of the full tensor
            self._writers[name] = min(group.size - 1, done * group.size // total)
            done += parameter.numel()

    def __getitem__(self, name: str) -> Tensor:
        self.writer = self._writers[name]
        return gathered(self._parameters[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
