"""The checkpoint of a model whose weights are divided among processes: each writes some of its tensors.

A tensor on disk is whole, as every program reads it; so weights are gathered one by one, in the order of the
model, and one process writes each: the first its beginning, the last its end.
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
    """The checkpoint in `folder`, in one move; all processes call it together, with the same folder.

    A kill leaves all of it or nothing. A process that cannot write its part ends all.
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
    """Gather every weight with the others, and write those that are this process's to write."""
    from unfreeze.checkpoint.nested import name_on_disk
    from unfreeze.checkpoint.tensors import stored_tensor
    from unfreeze.models.publish import carried, published, stored_dtypes

    model, gathered = state.model, Gathered(state, group)
    dtypes = stored_dtypes(model, manifest)
    trained = published(model, manifest.config, dtypes=dtypes, values=gathered)

    def own() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in trained:
            if gathered.writer == group.rank:
                yield name_on_disk(manifest.prefix, name), tensor.cpu()

    last = group.rank == group.size - 1
    beside = ((info.name, stored_tensor(info)) for info in carried(model, manifest)) if last else ()
    try:
        return write_parts(
            temporary,
            chain(own(), beside),
            stem=f"shard-{group.rank}",
            max_shard_bytes=MAX_SHARD_BYTES // 4,  # they are held in host memory until they are written
        )
    except (OSError, UserError):
        for _ in trained:  # the others gather the rest with this process before they hear of it
            pass
        raise


class Gathered(Mapping[str, "Tensor"]):
    """Name of a parameter -> all of it, gathered when it is asked for: by all processes, in one order.

    writer  the process that writes the parameter asked for last.
    """

    def __init__(self, state: State, group: Group):
        self._parameters, self.writer = state.optimizer.parameters, 0
        total, done = sum(p.numel() for p in self._parameters.values()), 0
        self._writers: dict[str, int] = {}
        for name, parameter in self._parameters.items():  # its numel() is the whole one's
            self._writers[name] = min(group.size - 1, done * group.size // total)
            done += parameter.numel()

    def __getitem__(self, name: str) -> Tensor:
        self.writer = self._writers[name]
        return gathered(self._parameters[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
